"""Records the episode of a chat client: its requests, which the engine answers, as a tree of generations.

Invariants beside those of `conversation_tree`:
- No branch has more than `task.max_total_tokens` tokens, and no episode more than `task.max_turns` + 1 generations.
- A request that is refused, or whose client is gone before the answer, records nothing.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter, time_ns
from typing import Any, Literal, cast
from uuid import uuid4

from rlsys.config.schema import TaskConfig, TokenMode
from rlsys.data.question import Question
from rlsys.data.trajectory import Action, Branch, Finish, Trajectory, Turn
from rlsys.errors import UserError
from rlsys.files import require_shallow
from rlsys.rollout.agent.conversation_tree import ConversationTree, Message, Opening, RecentAnswers
from rlsys.rollout.agent.recorder import Generation, Generator, Streaming, TurnSampling, sampled_turn
from rlsys.rollout.agent.tokens import Codec, SampledTurn, encodable_json, known_routes, open_context

TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class Refused(Exception):
    """Reason why a request is not answered, as an HTTP status, a code and a sentence."""

    def __init__(
        self, sentence: str, *, status: int = 400, code: str = "invalid_request", param: str | None = None
    ) -> None:
        super().__init__(sentence)
        self.status, self.code, self.param = status, code, param


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, as all protocols ask it."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    stop: Sequence[str] = ()
    """Texts that end the answer and are cut off it."""
    max_tokens: int | None = None
    prompt: str | None = None
    """Plain text to continue instead of messages."""
    sampling: TurnSampling | None = None
    """Sampling of this request; None for the recorder's own."""
    id: str = ""
    """Id of the answer, by which the agent may name its branch."""


@dataclass(frozen=True, slots=True)
class Reply:
    message: Message
    finish: Literal["stop", "length", "tool_calls"]
    stop: str | None
    """Text of `Asked.stop` that ended the answer."""
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    prompt_tokens: int
    cached_tokens: int


OnText = Callable[[str], None]
"""Receives the text of the answer so far, as far as it is certain, each time it grows."""


class ChatRecorder:
    """Answers and records the requests of one episode."""

    def __init__(
        self,
        question: Question,
        sample: int,
        generator: Generator,
        codec: Codec,
        task: TaskConfig,
        sampling: TurnSampling,
        recent: RecentAnswers | None = None,
    ) -> None:
        """`recent` has answers of other recorders, which requests may continue, and receives those of this one."""
        self.codec, self.task, self.sampling = codec, task, sampling
        self.limit: Finish | None = None
        """Limit at which a request was refused first; None so far."""
        self.reward: float | None = None
        """Reward that the agent gave itself."""
        self.answer: str | None = None
        """Answer that the agent gave; None if its last message is the answer."""
        self.counts: Counter[str] = Counter()
        """Reason -> requests without an answer."""
        self._question, self._sample, self._generator = question, sample, generator
        self._tree = ConversationTree(codec, recent)
        self._facts: dict[int, Turn] = {}
        """Id of a sampled turn -> its facts."""
        self._turns: dict[str, SampledTurn] = {}
        """Id of an answer -> its turn."""
        self._branch_rewards: list[tuple[SampledTurn, float]] = []
        """Turn -> reward of the branch in which it is trained."""
        self._running = 0
        self._number = 0

    @property
    def generations(self) -> int:
        """Number of recorded generations."""
        return len(self._tree.generations)

    async def generate(self, asked: Asked, on_text: OnText | None = None) -> Reply:
        """Answer a request. Raises Refused, and RunError if the engine fails; on cancellation, nothing is recorded."""
        self._require_turn()
        opening = self._opened(asked)
        if not opening.input_ids:
            raise Refused("The request has no text to answer.", code="empty", param="messages")
        room = self.task.max_total_tokens - len(opening.input_ids)
        if room <= 0:
            self.limit = self.limit or Finish.TOKEN_LIMIT
            self._refuse_length(len(opening.input_ids), "task.max_total_tokens", self.task.max_total_tokens)
        if opening.parent is None and len(opening.input_ids) > self.task.max_prompt_tokens:
            self._refuse_length(len(opening.input_ids), "task.max_prompt_tokens", self.task.max_prompt_tokens)
        sampling = self._sampling_of(asked, opening, room)
        began_ns, started = time_ns(), perf_counter()
        self._running += 1
        try:
            generation = await self._sample_turn(opening.input_ids, asked, sampling, on_text)
        finally:
            self._running -= 1
        reply = self._reply(asked, opening.input_ids, generation)
        ids = generation.token_ids
        sampled = sampled_turn(opening.input_ids, generation, sampling)
        self._tree.add(opening, sampled, reply.message)
        self._turns[asked.id] = sampled
        self._facts[id(sampled)] = Turn(
            text=self.codec.decode(ids),
            action=Action.MESSAGE,
            content="",
            observation="",
            generated_tokens=len(ids),
            prompt_tokens=len(opening.input_ids),
            cached_tokens=generation.cached_tokens,
            generate_s=perf_counter() - started,
            tool_s=0.0,
            began_ns=began_ns,
        )
        if generation.finish == "abort":
            self.limit = Finish.ABORTED
            raise Refused("The engine ended the generation: the episode is over.", status=503, code="aborted")
        return reply

    def refused(self, reason: str) -> None:
        """Count a request without an answer."""
        self.counts[reason] += 1

    def reward_branches(self, rewards: Mapping[str, float]) -> None:
        """Give branches rewards of their own; each is named by the id of an answer that is trained in it.

        Raises LookupError, with the reason, for an unknown id, and for two answers of one branch.
        """
        if unknown := rewards.keys() - self._turns.keys():
            raise _NoBranch(f"{min(map(str, unknown)):.80}, which is the id of no answer of the episode")
        found = [(self._turns[name], reward) for name, reward in rewards.items()]
        places = [self._tree.branch_of(turn) for turn, _ in found]
        if twice := next((name for at, name in enumerate(rewards) if places[at] in places[:at]), None):
            raise _NoBranch(f"{twice:.80}, whose branch another answer names too")
        self._branch_rewards = found

    def trajectory(self, finish: Finish) -> Trajectory:
        """Return the trajectory so far, ended by `finish`."""
        if self.generations:
            record, sampled, branches = self._tree.record()
        else:
            context = open_context(TokenMode.append, self.codec, self.codec.prompt(self._question.prompt))
            record, sampled, branches = context.close(False, self.task.max_prompt_tokens), [], (Branch(0),)
        turns = [self._facts[id(each)] for each in sampled]
        turns = [replace(turn, observation=self._following(each)) for turn, each in zip(turns, sampled, strict=True)]
        if turns and finish is Finish.ANSWER:
            answer = self.answer if self.answer is not None else tagged(turns[-1].text, self.task.tags.answer)
            turns[-1] = replace(turns[-1], action=Action.ANSWER, content=answer)
        own = {self._tree.branch_of(turn): reward for turn, reward in self._branch_rewards}
        branches = tuple(replace(branch, reward=own.get(number)) for number, branch in enumerate(branches))
        facts = {"branches": branches, "agent_reward": self.reward}
        return record.trajectory(self._question, self._sample, turns, sampled, finish, **facts)

    def _require_turn(self) -> None:
        if self.generations + self._running > self.task.max_turns:
            self.limit = self.limit or Finish.TURN_LIMIT
            most = self.task.max_turns + 1
            sentence = f"The episode has had its task.max_turns + 1 = {most} answers: end it, or raise the limit."
            raise Refused(sentence, code="turn_limit")

    def _opened(self, asked: Asked) -> Opening:
        try:
            if asked.prompt is not None:
                return self._tree.open_text(asked.prompt)
            return self._tree.open(asked.messages, asked.tools)
        except UserError as error:
            raise Refused(str(error), code=error.code, param=error.key) from error

    def _refuse_length(self, length: int, key: str, limit: int) -> None:
        sentence = f"The messages have {length} tokens, more than {key}={limit}: shorten them, or raise the limit."
        raise Refused(sentence, code="context_length_exceeded", param="messages")

    def _sampling_of(self, asked: Asked, opening: Opening, room: int) -> TurnSampling:
        own, parent = asked.sampling or self.sampling, opening.parent
        return replace(
            own,
            stop=tuple(dict.fromkeys((*own.stop, *asked.stop))),
            max_new_tokens=min(self.task.max_turn_tokens, room, asked.max_tokens or room),
            routes_from=None
            if self.sampling.routes_from is None
            else known_routes([parent.turn] if parent else [], opening.input_ids),
        )

    async def _sample_turn(
        self, input_ids: list[int], asked: Asked, sampling: TurnSampling, on_text: OnText | None
    ) -> Generation:
        name = f"{self._question.uid}#{self._sample}.{self._number}"
        self._number += 1
        if on_text is None:
            return await self._generator.generate(input_ids, sampling, rid=name)
        streaming = cast("Streaming", self._generator)
        certain = CertainText(self.codec, asked.stop, on_text)
        return await streaming.generate(input_ids, sampling, rid=name, on_tokens=certain)

    def _reply(self, asked: Asked, input_ids: Sequence[int], generation: Generation) -> Reply:
        text, stop = cut_at(self.codec.decode(generation.token_ids), asked.stop)
        content, calls = calls_in(text) if asked.tools else (text, [])
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = calls
        finish: Literal["stop", "length", "tool_calls"] = "length" if generation.finish == "length" else "stop"
        return Reply(
            message,
            "tool_calls" if calls else finish,
            stop,
            generation.token_ids,
            generation.logprobs,
            len(input_ids),
            generation.cached_tokens,
        )

    def _following(self, turn: SampledTurn) -> str:
        """Return the text that followed a turn when it was first continued; empty if it never was."""
        made = next(each for each in self._tree.generations if each.turn is turn)
        if not made.children:
            return ""
        begin = len(turn.input_ids) + len(turn.output_ids)
        return self.codec.decode(made.children[0].turn.input_ids[begin:])


class _NoBranch(LookupError):
    """Reason why a branch cannot be found, as the end of a sentence."""


class CertainText:
    """Passes on the text of tokens as they arrive, without a beginning of a stop string or of a character."""

    def __init__(self, codec: Codec, stops: Sequence[str], on_text: OnText) -> None:
        self._codec, self._stops, self._on_text = codec, stops, on_text
        self._held = max((len(stop) - 1 for stop in stops), default=0)
        self._passed = 0

    def __call__(self, token_ids: Sequence[int]) -> None:
        """Take all tokens so far."""
        text, stop = cut_at(self._codec.decode(token_ids), self._stops)
        if stop is None:
            text = text[: max(0, len(text) - self._held)].rstrip("\ufffd")
        if len(text) > self._passed:
            self._passed = len(text)
            self._on_text(text)


def cut_at(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Return `text` before the first of `stops`, and this stop; None without one."""
    found = [(text.find(stop), stop) for stop in stops if stop and stop in text]
    if not found:
        return text, None
    place, stop = min(found)
    return text[:place], stop


def tagged(message: str, tag: str) -> str:
    """Return the text between the last answer tags of a message, else all text after its reasoning."""
    said = message.rpartition("</think>")[2]
    found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", said, re.DOTALL)
    return str(found[-1] if found else said).strip()


def calls_in(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the content of an answer and its tool calls: JSON in <tool_call>, or an answer that is JSON as a whole.

    An answer with a call that cannot be read is content as a whole.
    """
    reasoning, mark, said = text.rpartition("</think>")
    bodies = TOOL_CALL.findall(said)
    content = reasoning + mark + said.partition("<tool_call>")[0].rstrip("\n") if bodies else reasoning + mark
    read = [call for body in bodies or [said] for call in _read_calls(body)]
    if not read or None in read:
        return text, []
    return content, [_call(name, given) for name, given in filter(None, read)]


def _read_calls(body: str) -> list[tuple[str, dict[str, Any]] | None]:
    try:
        found = json.loads(body)
        require_shallow(found)
    except (ValueError, RecursionError):
        return [None]
    found = encodable_json(found)
    read: list[tuple[str, dict[str, Any]] | None] = []
    for one in found if isinstance(found, list) else [found]:
        name = one.get("name") if isinstance(one, dict) else None
        given = one.get("arguments", one.get("parameters")) if isinstance(one, dict) else None
        read.append((name, given) if isinstance(name, str) and isinstance(given, dict) else None)
    return read or [None]


def _call(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return a call as messages have it. Some templates require an id of nine letters and digits."""
    return {"id": uuid4().hex[:9], "type": "function", "function": {"name": name, "arguments": given}}
