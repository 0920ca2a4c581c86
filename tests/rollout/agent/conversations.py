"""Plays random conversations against a `ConversationTree`, and checks every token by brute force."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from rlsys.rollout.agent.conversation_tree import Cause, ConversationTree, Opening
from rlsys.rollout.agent.tokens import SampledTurn, known_routes
from tests.rollout.agent.scripted import routes_of
from tests.support.chat_templates import Message, Template

WORDS = [
    "",
    " ",
    "Paris",
    "東京 🚀",
    "\n\n",
    " naïve ",
    "<think>hm</think>",
    "</think>x",
    "<tool_call>",
    "{}",
    "rlsys_message",
]
WORDS += ["<|im_end|>", "\u202e", "a" * 40, "Doc 1(Title: T)", "\r\n"]


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "a tool", "parameters": {"type": "object"}}}


TOOLS: Sequence[tuple[dict[str, Any], ...]] = [(), (function("search"),), (function("search"), function("open"))]


@dataclass
class Call:
    """One generation as the engine saw it."""

    messages: list[Message]
    tools: tuple[dict[str, Any], ...]
    turn: SampledTurn


@dataclass
class Client:
    """An agent with several conversations, which it continues, edits, repeats, compacts and forgets at random."""

    template: Template
    random: Random
    calls: list[Call] = field(default_factory=list)
    waiting: list[tuple[Opening, list[Message], tuple[dict[str, Any], ...]]] = field(default_factory=list)
    sampled: int = 0

    def play(self, requests: int) -> ConversationTree:
        """Send requests, up to three at a time, and check the engine's input of each."""
        tree = ConversationTree(self.template.codec)
        for _ in range(requests):
            messages, tools = self._next()
            opening = tree.open(messages, tools)
            self._check_input(opening, messages, tools)
            self.waiting.append((opening, messages, tools))
            if self.random.random() < 0.7 or len(self.waiting) > 2:
                self._answer(tree)
        while self.waiting:
            self._answer(tree)
        return tree

    def _answer(self, tree: ConversationTree) -> None:
        opening, messages, tools = self.waiting.pop(self.random.randrange(len(self.waiting)))
        ids = self._sample()
        # A float32 holds each number up to 2 ** 24, so each log-prob names one sampled token.
        logprobs = [-float(self.sampled + at) for at in range(len(ids))]
        self.sampled += len(ids)
        version = len(self.calls)
        whole, first = (
            [*opening.input_ids, *ids],
            known_routes([opening.parent.turn] if opening.parent else [], opening.input_ids),
        )
        versions = [version + at // 3 for at in range(len(ids))]
        turn = SampledTurn(opening.input_ids, ids, logprobs, versions, True, routes_of(whole, first), first)
        answer: dict[str, Any] = {"role": "assistant", "content": self.template.codec.decode(ids)}
        if tools and self.random.random() < 0.5:
            answer["tool_calls"] = [self._tool_call() for _ in range(self.random.choice([1, 1, 2]))]
            if self.random.random() < 0.5:
                answer["content"] = ""
        tree.add(opening, turn, answer)
        self.calls.append(Call([*messages, answer], tools, turn))

    def _sample(self) -> list[int]:
        codec, random = self.template.codec, self.random
        ids = codec.encode(self._text()) if random.random() < 0.6 else []
        ids += [random.randrange(600) for _ in range(random.randrange(6))]
        return ids + codec.encode(self.template.end) * (random.random() < 0.8)

    def _text(self) -> str:
        return "".join(self.random.choices(WORDS, k=self.random.randrange(4)))

    def _tool_call(self) -> dict[str, Any]:
        given = {"query": self._text(), "n": self.random.randrange(3)}
        identity = "".join(self.random.choices("abc123", k=9))
        return {"id": identity, "type": "function", "function": {"name": "search", "arguments": given}}

    def _next(self) -> tuple[list[Message], tuple[dict[str, Any], ...]]:
        if not self.calls or self.random.random() < 0.1:
            return self._begin()
        call = self.calls[-1] if self.random.random() < 0.6 else self.random.choice(self.calls)
        change = self.random.choice([self._continue] * 6 + CHANGES)
        return change(self, call) if change in CHANGES else change(call)

    def _begin(self) -> tuple[list[Message], tuple[dict[str, Any], ...]]:
        system = [{"role": "system", "content": self.random.choice(["Be brief.", self._text()])}]
        asked = {"role": "user", "content": self._text()}
        tools = self.random.choice(TOOLS)
        return [*(system if tools or self.random.random() < 0.5 else []), asked], tools

    def _continue(self, call: Call) -> tuple[list[Message], tuple[dict[str, Any], ...]]:
        calls = call.messages[-1].get("tool_calls") or ()
        new: list[Message] = [{"role": "tool", "content": self._text(), "tool_call_id": one["id"]} for one in calls]
        if not new or self.random.random() < 0.2:
            new.append({"role": "user", "content": self._text()})
        return [*call.messages, *new], call.tools

    def _check_input(self, opening: Opening, messages: list[Message], tools: tuple[dict[str, Any], ...]) -> None:
        """Compare the engine's input with the template, or with a recorded context and what is known to follow it."""
        codec, template = self.template.codec, self.template
        longest = 0
        candidates: list[Call] = []
        for call in self.calls:
            length = len(call.messages)
            if call.tools == tools and longest <= length < len(messages) and same(messages[:length], call.messages):
                candidates = [*(candidates if length == longest else []), call]
                longest = length
        new = messages[longest:]
        if not candidates or template.changes(messages[:longest], new, bool(tools)):
            assert opening.input_ids == codec.encode(codec.chat(messages, list(tools) or None))
            return
        continued = []
        for call in candidates:
            text = template.closing + template.written(new)
            ended = call.turn.output_ids and codec.special_text(call.turn.output_ids[-1])
            text = text.removeprefix(ended or "")
            continued.append([*call.turn.input_ids, *call.turn.output_ids, *codec.encode(text)])
        assert opening.input_ids in continued


def same(one: Sequence[Message], other: Sequence[Message]) -> bool:
    return json.dumps(list(map(plain, one))) == json.dumps(list(map(plain, other)))


def plain(message: Message) -> list[Any]:
    content = message["content"].strip() if message["role"] == "assistant" else message["content"]
    return [message["role"], content, [one["function"] for one in message.get("tool_calls") or ()]]


def _edited(client: Client, call: Call) -> tuple[list[Message], tuple[dict[str, Any], ...]]:
    messages, tools = client._continue(call)
    at = client.random.randrange(len(messages))
    messages[at] = {**messages[at], "content": messages[at]["content"] + "!"}
    return messages, tools


def _repeated(_: Client, call: Call) -> tuple[list[Message], tuple[dict[str, Any], ...]]:
    return call.messages[:-1], call.tools


def _compacted(client: Client, call: Call) -> tuple[list[Message], tuple[dict[str, Any], ...]]:
    kept = call.messages[: 1 + (call.messages[0]["role"] == "system")]
    return [*kept, {"role": "assistant", "content": "so far"}, {"role": "user", "content": client._text()}], call.tools


def _swapped(client: Client, call: Call) -> tuple[list[Message], tuple[dict[str, Any], ...]]:
    messages, tools = client._continue(call)
    users = [at for at, one in enumerate(messages) if one["role"] == "user"]
    if len(users) > 1:
        one, other = client.random.sample(users, 2)
        messages[one], messages[other] = messages[other], messages[one]
    return messages, tools


def _stripped(client: Client, call: Call) -> tuple[list[Message], tuple[dict[str, Any], ...]]:
    messages, tools = client._continue(call)
    return [one | {"content": one["content"].strip()} if one["role"] == "assistant" else one for one in messages], tools


def _with_other_tools(client: Client, call: Call) -> tuple[list[Message], tuple[dict[str, Any], ...]]:
    messages, _ = client._continue(call)
    return messages, client.random.choice(TOOLS if messages[0]["role"] == "system" else TOOLS[:1])


def _with_other_system(client: Client, call: Call) -> tuple[list[Message], tuple[dict[str, Any], ...]]:
    messages, tools = client._continue(call)
    rest = messages[1:] if messages[0]["role"] == "system" else messages
    return [{"role": "system", "content": client._text()}, *rest], tools


CHANGES: list[Any] = [_edited, _repeated, _compacted, _swapped, _stripped, _with_other_tools, _with_other_system]


def check(tree: ConversationTree, calls: Sequence[Call]) -> Counter[str]:
    """Compare the record with the engine's calls, token by token; return the branches by cause."""
    record, turns, branches = tree.record()
    tokens, mask = record.tokens.tolist(), record.loss_mask
    starts = [branch.start for branch in branches]
    owner_of = {}
    for call in calls:
        for at, logprob in enumerate(call.turn.logprobs):
            owner_of[logprob] = (call, at)
    seen = set()
    for begin, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
        assert record.routes is not None
        assert np.array_equal(record.routes[begin : end - 1], routes_of(tokens[begin:end])), "a token has other experts"
        assert (record.routes[end - 1] == 255).all(), "the engine has not read the last token"
        for place in np.flatnonzero(mask[begin:end]) + begin:
            call, at = owner_of[float(record.rollout_logprobs[place])]
            context = [*call.turn.input_ids, *call.turn.output_ids[: at + 1]]
            assert tokens[begin : place + 1] == context, "a trained token is not what was sampled there"
            assert record.versions[place] == call.turn.versions[at]
            assert turns[record.turn_of_token[place]] is call.turn
            seen.add(float(record.rollout_logprobs[place]))
    assert len(seen) == int(mask.sum()), "a token is trained twice"
    assert seen == owner_of.keys(), "a sampled token is not trained"
    assert np.isnan(record.rollout_logprobs[~mask]).all()
    assert (record.versions[~mask] == -1).all()
    owners = record.turn_of_token[mask]
    assert (np.diff(owners) >= 0).all()
    assert turns[-1] is calls[-1].turn
    assert sorted(id(turn) for turn in turns) == sorted(id(call.turn) for call in calls)
    causes = Counter(branch.cause for branch in branches)
    assert causes == Counter(each.cause.value for each in tree.generations if each.cause is not Cause.CONTINUED)
    return causes


def fuzz(template: Template, seed: int) -> Counter[str]:
    """Play and check one conversation; return its branches by cause."""
    client = Client(template, Random(seed))
    tree = client.play(client.random.randint(1, 10))
    return check(tree, client.calls)
