"""Tests of the record of chat clients: random conversations, and one of each kind written down by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.rollout.agent.conversation_tree import Cause, ConversationTree
from rlsys.rollout.agent.tokens import SampledTurn
from tests.rollout.agent.conversations import TOOLS, fuzz
from tests.support.chat_templates import TEMPLATES, Message, Template
from tests.support.refusals import refused

CHATML, THINKING, LLAMA, MISTRAL = TEMPLATES
each_template = pytest.mark.parametrize("template", TEMPLATES, ids=lambda one: one.name)


@each_template
def test_random_conversations_train_what_was_sampled_once(template: Template) -> None:
    fuzz(LLAMA, 4203482)  # The text "{" before a call, which the template leaves out.
    fuzz(THINKING, 22509)  # A call after a thought that the template leaves out.
    causes = sum((fuzz(template, seed) for seed in range(250)), start=Counter())
    assert causes.keys() >= {each.value for each in Cause if each not in (Cause.CONTINUED, Cause.TEMPLATE)}
    assert (Cause.TEMPLATE in causes) is (template is not CHATML)


@pytest.mark.slow
@each_template
@given(seed=st.binary(min_size=4, max_size=4).map(int.from_bytes))  # Integers would be drawn small.
@settings(max_examples=2_500)
def test_further_random_conversations(template: Template, seed: int) -> None:
    """Conversations of drawn seeds train what was sampled once; `make test-full` draws others each time."""
    fuzz(template, seed)


class Script:
    """A client that says what it asks, and an engine that says what it answers, ended by the template's token."""

    def __init__(self, template: Template) -> None:
        self.codec, self.template = template.codec, template
        self.tree = ConversationTree(template.codec)

    def ask(self, messages: list[Message], answer: str, tools: Sequence[Any] = (), **more: Any) -> list[Message]:
        opening = self.tree.open(messages, tools)
        ids = self.codec.encode(answer + self.template.end)
        turn = SampledTurn(opening.input_ids, ids, [-1.0] * len(ids), [0] * len(ids), ended_itself=True)
        made = self.tree.add(opening, turn, {"role": "assistant", "content": answer, **more})
        return list(made.messages)

    @property
    def contexts(self) -> list[tuple[str, str, str]]:
        """Cause, context and trained text of each branch."""
        record, _, branches = self.tree.record()
        starts = [branch.start for branch in branches]
        parts = zip(np.split(record.tokens, starts[1:]), np.split(record.loss_mask, starts[1:]), strict=True)
        return [
            (branch.cause, self.codec.decode_all(ids.tolist()), self.codec.decode_all(ids[mask].tolist()))
            for branch, (ids, mask) in zip(branches, parts, strict=True)
        ]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def test_fork_trains_the_shared_beginning_once() -> None:
    client = Script(CHATML)
    said = client.ask([user("Who?")], "A")
    client.ask([*said, user("b")], "B")
    client.ask([*said, user("c")], "C")
    client.ask([*said, user("c")], "D")
    assert [(cause, trained) for cause, _, trained in client.contexts] == [
        ("first", "A<|im_end|>B<|im_end|>"),
        ("forked", "C<|im_end|>"),
        ("resampled", "D<|im_end|>"),
    ]
    assert all(context.startswith("<|im_start|>user\nWho?<|im_end|>") for _, context, _ in client.contexts)


def test_last_generation_is_in_the_last_branch() -> None:
    client = Script(CHATML)
    said = client.ask([user("Who?")], "A")
    client.ask([user("help")], "sub")
    client.ask([*said, user("b")], "B")
    assert [(cause, trained) for cause, _, trained in client.contexts] == [
        ("new_conversation", "sub<|im_end|>"),
        ("first", "A<|im_end|>B<|im_end|>"),
    ]


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda said: [*said[:-1], said[-1] | {"content": "B"}, user("go on")], Cause.EDITED),
        (lambda said: [said[0], user("Whom?"), *said[2:], user("go on")], Cause.EDITED),
        (lambda said: [said[0], said[1], user("go on")], Cause.EDITED),
        (lambda said: [system("Be long."), *said[1:], user("go on")], Cause.SYSTEM),
        (lambda said: [*said[1:], user("go on")], Cause.SYSTEM),
        (lambda said: [said[0], user("Summary: A. Go on.")], Cause.NEW),
        (lambda _: [system("You search."), user("go on")], Cause.NEW),
        (lambda said: said[:-1], Cause.RESAMPLED),
    ],
)
def test_request_that_does_not_continue_is_a_branch_with_its_cause(change: Any, cause: Cause) -> None:
    client = Script(CHATML)
    said = client.ask([system("Be brief."), user("Who?")], "A")
    client.ask(change(said), "B")
    assert [(found, trained) for found, _, trained in client.contexts] == [
        ("first", "A<|im_end|>"),
        (cause.value, "B<|im_end|>"),
    ]


def test_summary_in_place_of_turns_begins_a_branch() -> None:
    client = Script(CHATML)
    said = client.ask([user("Who?")], "A")
    client.ask([*said, user("b")], "B")
    client.ask([user("Who?"), {"role": "assistant", "content": "A, then B"}, user("c")], "C")
    assert [cause for cause, _, _ in client.contexts] == ["first", "compacted"]


def test_other_tools_begin_a_branch() -> None:
    client = Script(CHATML)
    said = client.ask([system("Be brief."), user("Who?")], "A", TOOLS[1])
    client.ask([*said, user("b")], "B", TOOLS[2])
    client.ask([*said, user("b")], "C", TOOLS[1])
    assert [cause for cause, _, _ in client.contexts] == ["tools", "first"]


def test_reasoning_that_the_template_strips_begins_a_branch_and_that_it_keeps_does_not() -> None:
    client, call = Script(THINKING), {"id": "123456789", "function": {"name": "search", "arguments": {"query": "x"}}}
    said = client.ask([system("s"), user("Who?")], "<think>hm</think>", TOOLS[1], tool_calls=[call])
    said = client.ask([*said, {"role": "tool", "content": "found"}], "<think>ah</think>Paris", TOOLS[1])
    client.ask([*said, user("And?")], "Rome", TOOLS[1])
    (first, long, trained), (second, short, rest) = client.contexts
    assert (first, second, trained.count("</think>"), rest) == ("first", "template", 2, "Rome<|im_end|>")
    assert "<think>" in long
    assert "<think>" not in short


def test_plain_text_continues_the_text_that_was_sampled_with_its_special_tokens() -> None:
    codec, tree = CHATML.codec, ConversationTree(CHATML.codec)
    first = tree.open_text("Q: Who?\nA:")
    ids = codec.encode(" Paris<|im_end|>")
    turn = SampledTurn(first.input_ids, ids, [-1.0] * len(ids), [0] * len(ids), ended_itself=True)
    tree.add(first, turn, {"role": "assistant", "content": " Paris"})
    assert tree.open_text("Q: Who?\nA: Paris<|im_end|>\n").input_ids == [*first.input_ids, *ids, *codec.encode("\n")]
    assert tree.open_text("Q: Who?\nA: Paris\n").parent is None


def test_messages_that_a_template_refuses_are_one_sentence() -> None:
    call = {"id": "short", "function": {"name": "search", "arguments": {}}}
    with refused("unsupported", "messages"):
        ConversationTree(MISTRAL.codec).open([user("a"), {"role": "assistant", "content": "", "tool_calls": [call]}])
