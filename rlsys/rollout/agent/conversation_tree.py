"""Records the requests of a chat client as a tree of generations: token in, token out. Pure, without I/O.

A request is a list of messages. If a recorded conversation is its beginning, the request continues the *tokens* of that
conversation: what the engine sampled stays, and what the chat template writes for the new messages is appended. Any
other request begins a new root, for which the template writes everything. Example: after A, the client asks to continue
A by B, then twice by C, and then asks something else:

    A --- B                 four branches, one for each path from a root to a leaf: AB, AC, AC', D. A is trained in AB
     \\-- C    D            only; in the others it is context. B continued A; C is a fork, C' was sampled again, and D
      \\- C'                is a new conversation.

Invariants:
- The engine's input of a generation begins with the input and the output of the generation that it continues.
- Every token that the engine sampled for a recorded generation is trained exactly once, after exactly the tokens after
  which it was sampled, with its log-prob and version. No other token is trained.
- The branches are as many as the generations with a cause other than `Cause.CONTINUED`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np

from rlsys.data.trajectory import Branch, Routes
from rlsys.errors import UserError
from rlsys.rollout.agent.tokens import UNSAMPLED, Codec, SampledTurn, TokenRecord, no_routes

K = TypeVar("K")
V = TypeVar("V")
Message = Mapping[str, Any]
"""Message as a chat template reads it: `role`, `content` as text, and `tool_calls` with arguments as a mapping."""


class Cause(StrEnum):
    """Reason why a generation continues a recorded conversation, or else begins a branch."""

    CONTINUED = "continued"
    """The request continued a conversation that nothing had continued before; begins no branch."""
    FIRST = "first"
    """First request of the episode."""
    FORKED = "forked"
    """The request continued a conversation that another request had continued in another way."""
    RESAMPLED = "resampled"
    """The request repeated an earlier one."""
    TOOLS = "tools"
    """The request had other tools than the conversation that it continues."""
    SYSTEM = "system"
    """The request had another system message than the conversation that it continues."""
    TEMPLATE = "template"
    """The chat template renders earlier turns differently once new messages follow, such as without reasoning."""
    EDITED = "edited"
    """A message differs from the one recorded in its place, and no message is missing."""
    COMPACTED = "compacted"
    """The request has fewer messages than the conversation that it shares messages with, such as after a summary."""
    NEW = "new_conversation"
    """The request shares no message but the system's with any conversation, as of a sub-agent."""


@dataclass(slots=True, eq=False)
class Generation:
    turn: SampledTurn
    parent: Generation | None
    cause: Cause
    asked: tuple[str, ...]
    """Keys of the request's tools and messages."""
    text: str
    """Text of the engine's input, as the template wrote it for this request."""
    messages: tuple[Message, ...]
    """Messages of the request, and the answer."""
    children: list[Generation] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Opening:
    """A request that can be generated: what `add` needs."""

    input_ids: list[int]
    messages: tuple[Message, ...]
    asked: tuple[str, ...]
    text: str
    parent: Generation | None
    by_template: bool
    """True if only the template keeps the request from continuing a conversation."""


class Recent(dict[K, V]):
    """Entries of a limited total size; the oldest are forgotten first. Write them by `[]` alone."""

    def __init__(self, most: int, size_of: Callable[[V], int]) -> None:
        super().__init__()
        self._most, self._size_of = most, size_of
        self.size = 0

    def __setitem__(self, key: K, value: V) -> None:
        """Write an entry, and forget the oldest ones beyond the limit, if need be this one too."""
        if (former := super().pop(key, None)) is not None:
            self.size -= self._size_of(former)
        super().__setitem__(key, value)
        self.size += self._size_of(value)
        while self.size > self._most:
            self.size -= self._size_of(super().pop(next(iter(self))))


class RecentAnswers(Recent[tuple[str, ...], Generation]):
    """The last generations of many recorders: keys of tools and all messages, the answer included -> generation.

    Sizes are about the bytes of memory.
    """

    def __init__(self, most_bytes: int) -> None:
        super().__init__(most_bytes, _bytes_of)


def _bytes_of(made: Generation) -> int:
    """Return a generous estimate of the memory of a generation: an id and its place in a list take 40 bytes."""
    turn, characters = made.turn, len(made.text) + sum(map(len, made.asked))
    return 2000 + 40 * (len(turn.input_ids) + 3 * len(turn.output_ids)) + 8 * characters


class ConversationTree:
    """Generations of one episode."""

    def __init__(self, codec: Codec, recent: RecentAnswers | None = None) -> None:
        """`recent` has generations of other trees, which requests may continue, and receives those of this one."""
        self._codec, self._recent = codec, recent
        self.generations: list[Generation] = []
        """All generations, in the order in which they ended."""
        self._of: dict[tuple[str, ...], list[Generation]] = {}
        """Keys of tools and all messages, the answer included -> generations."""

    def open(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Opening:
        """Return the engine's input for a request; records nothing.

        Raises UserError if the chat template refuses the messages.
        """
        asked = (_key(list(tools)), *map(_message_key, messages))
        parent = self._longest(asked)
        if parent is not None:
            # As recorded: the client may have stripped white space since.
            known = (*parent.messages, *messages[len(parent.messages) :])
            text = self._render(known, tools)
            new = self._continuation(parent, known, tools, text)
            if new is not None:
                ids = [*parent.turn.input_ids, *parent.turn.output_ids, *self._codec.encode(new)]
                return Opening(ids, known, asked, text, parent, by_template=False)
        text = self._render(messages, tools)
        return Opening(self._codec.encode(text), tuple(messages), asked, text, None, by_template=parent is not None)

    def open_text(self, prompt: str) -> Opening:
        """Return the engine's input for a plain text, which continues the longest text that an answer has ended.

        The text of an answer includes its special tokens.
        """
        asked = (_TEXT, prompt)
        plain = [each for each in self.generations if each.asked[0] == _TEXT]
        texts = [(each.text + self._codec.decode_all(each.turn.output_ids), each) for each in plain]
        begun = [(text, each) for text, each in texts if len(text) < len(prompt) and prompt.startswith(text)]
        if not begun:
            return Opening(self._codec.encode(prompt), (), asked, prompt, None, by_template=False)
        longest = max(len(text) for text, _ in begun)
        parents = [each for text, each in begun if len(text) == longest]
        parent = next((each for each in parents if not each.children), parents[0])
        ids = [*parent.turn.input_ids, *parent.turn.output_ids, *self._codec.encode(prompt[longest:])]
        return Opening(ids, (), asked, prompt, parent, by_template=False)

    def add(self, opening: Opening, turn: SampledTurn, answer: Message) -> Generation:
        """Record the generation of an opened request; `answer` is the message that the client was given."""
        made = Generation(
            turn, opening.parent, self._cause(opening), opening.asked, opening.text, (*opening.messages, answer)
        )
        if made.parent is not None:
            made.parent.children.append(made)
        self.generations.append(made)
        keys = (*opening.asked, _message_key(answer))
        self._of.setdefault(keys, []).append(made)
        if self._recent is not None:
            self._recent[keys] = replace(made, parent=None, children=[])  # Alone, else it keeps its whole tree.
        return made

    def branches(self) -> list[tuple[Cause, list[Generation]]]:
        """Return cause and generations, from the root to a leaf, of each branch; the last generation is in the last.

        Only generations that are in no earlier branch are trained in a branch.
        """
        place = {id(each): number for number, each in enumerate(self.generations)}
        known: set[int] = set()
        forks = {id(each): [one.cause for one in each.children[1:]] for each in self.generations}
        found = []
        for leaf in sorted((each for each in self.generations if not each.children), key=lambda each: place[id(each)]):
            path = [leaf]
            while path[-1].parent is not None:
                path.append(path[-1].parent)
            path.reverse()
            first = next(each for each in path if id(each) not in known)
            cause = first.cause if first.parent is None else forks[id(first.parent)].pop(0)
            known |= set(map(id, path))
            found.append((cause, path))
        return found

    def branch_of(self, turn: SampledTurn) -> int:
        """Return the number of the branch in which a recorded turn is trained."""
        paths = (path for _, path in self.branches())
        return next(number for number, path in enumerate(paths) if any(each.turn is turn for each in path))

    def record(self) -> tuple[TokenRecord, list[SampledTurn], tuple[Branch, ...]]:
        """Return the tokens of all branches, one after another, their turns in order of training, and the branches.

        `TokenRecord.prompt_length` is the length of the first branch's first input. Requires a generation.
        """
        tokens: list[int] = []
        owners: list[int] = []
        turns: list[SampledTurn] = []
        starts: list[Branch] = []
        logprobs: list[float] = []
        versions: list[int] = []
        routes: list[tuple[int, Routes]] = []
        known: set[int] = set()
        first = 0
        for cause, path in self.branches():
            leaf, start = path[-1].turn, len(tokens)
            starts.append(Branch(start, cause.value))
            first = first or len(path[0].turn.input_ids)
            tokens += [*leaf.input_ids, *leaf.output_ids]
            unknown = len(tokens) - start
            owners += [UNSAMPLED] * unknown
            versions += [UNSAMPLED] * unknown
            logprobs += [float("nan")] * unknown
            for each in path:
                if each.turn.routes is not None:
                    routes.append((start + each.turn.routes_from, each.turn.routes))
                if id(each) not in known:
                    known.add(id(each))
                    begin = start + len(each.turn.input_ids)
                    end = begin + len(each.turn.output_ids)
                    owners[begin:end] = [len(turns)] * (end - begin)
                    logprobs[begin:end], versions[begin:end] = each.turn.logprobs, each.turn.versions
                    turns.append(each.turn)
        owner = np.array(owners, np.int32)
        whole = no_routes(turns, len(tokens))
        for begin, part in routes:
            if whole is not None:
                whole[begin : begin + len(part)] = part
        record = TokenRecord(
            tokens=np.array(tokens, np.int32),
            prompt_length=first,
            loss_mask=owner != UNSAMPLED,
            rollout_logprobs=np.array(logprobs, np.float32),
            versions=np.array(versions, np.int32),
            turn_of_token=owner,
            tokens_differing=0,
            response=self._codec.decode(tokens[first:]),
            truncated=False,
            routes=whole,
        )
        return record, turns, tuple(starts)

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        try:
            return self._codec.chat(messages, list(tools) or None)
        except Exception as error:  # Raised by the template, which is code of the model's folder.
            raise UserError(
                f"The chat template of the model refuses these messages ({' '.join(str(error).split()):.200}).",
                code="unsupported",
                key="messages",
            ) from error

    def _longest(self, asked: tuple[str, ...]) -> Generation | None:
        """Return the recorded conversation that is the longest proper beginning of a request; None without one."""
        for length in range(len(asked) - 1, 1, -1):
            if found := self._of.get(asked[:length]):
                return next((each for each in found if not each.children), found[0])
            if self._recent is not None and (known := self._recent.get(asked[:length])):
                return replace(known, children=[])
        return None

    def _continuation(
        self, parent: Generation, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], text: str
    ) -> str | None:
        """Return what follows the tokens of `parent`; None if the template renders `parent` differently by now.

        `text` is the rendering of the whole request. Between the former prompt and what follows, it must have the
        message of `parent` as it was sent.
        """
        said, place, offered = parent.messages[-1], len(parent.messages) - 1, list(tools) or None
        bare = ""
        try:
            following = self._codec.following(messages, place, offered)
            if said.get("tool_calls"):
                bare = self._codec.chat([*messages[:place], {**said, "content": ""}, *messages[place + 1 :]], offered)
        except Exception:  # noqa: BLE001, raised by the template, which may refuse a result without its call.
            return None
        if not (text.startswith(parent.text) and text.endswith(following)):
            return None
        between = text[len(parent.text) : len(text) - len(following)].strip()
        content = said["content"].strip()
        # Some templates leave the text out of a message with calls.
        calls = bare[len(parent.text) : len(bare) - len(following)].strip()
        if not (between.startswith(content) and between.removeprefix(content).strip() == calls):
            return None
        last = parent.turn.output_ids[-1:]
        return following.removeprefix(self._codec.special_text(last[0]) if last else "")

    def _cause(self, opening: Opening) -> Cause:
        asked = opening.asked
        if any(each.asked == asked and each.parent is opening.parent for each in self.generations):
            return Cause.RESAMPLED
        if opening.parent is not None:
            return Cause.FORKED if opening.parent.children else Cause.CONTINUED
        if not self.generations:
            return Cause.FIRST
        if opening.by_template:
            return Cause.TEMPLATE
        return self._difference(asked)

    def _difference(self, asked: tuple[str, ...]) -> Cause:
        """Return the reason why a request continues nothing, compared with the conversation that is most like it."""
        recorded = [keys[1:] for keys in self._of]
        if any(asked[1 : len(keys) + 1] == keys for keys in recorded):
            return Cause.TOOLS
        body = _without_system(asked[1:])
        bodies = [keys for keys in map(_without_system, recorded) if keys]
        if any(body[: len(keys)] == keys for keys in bodies):
            return Cause.SYSTEM
        likeness = [(_shared(keys, body), len({*keys} & {*body})) for keys in bodies]
        (_, common), nearest = max(zip(likeness, bodies, strict=True), default=((0, 0), ()))
        if not common:
            return Cause.NEW
        return Cause.EDITED if len(body) >= len(nearest) else Cause.COMPACTED


def _shared(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the number of leading keys that both have."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (own, others) in enumerate(pairs) if own != others), min(len(one), len(other)))


def _without_system(keys: tuple[str, ...]) -> tuple[str, ...]:
    return keys[1:] if keys and keys[0].startswith(_SYSTEM) else keys


def _message_key(message: Message) -> str:
    """Return a text that two messages share if they say the same. Ids of calls do not count, nor white space around an
    answer, which clients and templates strip."""
    role, content = message["role"], message["content"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return _key([role, content.strip() if role == "assistant" else content, calls, message.get("name")])


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


_SYSTEM = _key(["system"])[:-1]
_TEXT = "text"
"""Key of a plain text, in place of tools; no JSON of a list is like it."""
