"""Tests of ReAct's episodes against `apply_chat_template` of transformers, on a ChatML template with tools like Qwen's."""

from __future__ import annotations

import asyncio
import pickle
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.config.schema import TaskConfig, TokenMode
from rlsys.data.trajectory import Action, Finish, Trajectory
from rlsys.rollout.agent.episode import Episode, run_episode
from rlsys.rollout.agent.tokens import Codec
from tests.rollout.agent.react_play import ASKED, CODEC, SYSTEM, TOKENIZER, react, script_of
from tests.rollout.agent.scripted import DRAWN, Script, interrupted, tools_of
from tests.support.bpe import build_tokenizer
from tests.support.chat_templates import CHATML, END, FUNCTIONS, called
from tests.support.refusals import refused
from tests.support.search_results import result_of

FOUND = "Doc 1(Title: T) Paris 🚀"


def run(script: Script, config: TaskConfig) -> Trajectory:
    with closing(tools_of(script, config)) as tools:
        return asyncio.run(run_episode(ASKED, 3, tools, DRAWN))


def conversation(*messages: dict[str, Any]) -> list[int]:
    """Token ids of a whole conversation, by transformers alone."""
    opening = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ASKED.text}]
    text = TOKENIZER.apply_chat_template([*opening, *messages], tools=FUNCTIONS, tokenize=False)
    return TOKENIZER(text.removesuffix("\n"), add_special_tokens=False)["input_ids"]


def said(text: str, *calls: tuple[str, Any]) -> dict[str, Any]:
    functions = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls]
    return {"role": "assistant", "content": text, "tool_calls": functions}


def heard(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


def assert_sampled_tokens_are_kept(script: Script, played: Trajectory) -> None:
    """The trained tokens are the sampled ones with their log-probs and versions, and nothing else."""
    assert played.tokens[played.loss_mask].tolist() == played.sampled_ids.tolist()
    assert (played.versions >= 0).tolist() == played.loss_mask.tolist()
    assert np.array_equal(played.rollout_logprobs[played.loss_mask], played.sampled_logprobs)
    assert [turn.prompt_tokens for turn in played.turns if turn.prompt_tokens] == [
        len(one) for _, one, _ in script.calls
    ]
    for _, inputs, _ in script.calls:
        assert played.tokens[: len(inputs)].tolist() == inputs


PROMPT = len(conversation()) + len(CODEC.encode("\n<|im_start|>assistant\n"))
"""Number of tokens of the prompt."""
SEARCHED = ("search", {"query": "Où est 東京? 🚀"})
COMPUTED = ("calculator", {"text": "3 * (4 + 5)"})


def test_calls_and_results_have_the_tokens_of_the_chat_template() -> None:
    both = "\n".join(called(*one) for one in (SEARCHED, COMPUTED))
    script = script_of(
        "I search.\n" + called(*SEARCHED), both, "So <answer> é </answer>", found=result_of("T\nParis 🚀")
    )
    played = run(script, react())
    expected = conversation(
        *(said("I search.", SEARCHED), heard(FOUND)),
        *(said("", SEARCHED, COMPUTED), heard(FOUND), heard("27")),
        said("So <answer> é </answer>"),
    )
    # The stop string ends the answer, so the end-of-sequence token is added.
    assert played.tokens.tolist() == expected
    assert (played.finish, played.answer) == (Finish.ANSWER, "é")
    assert played.tokens[played.loss_mask][:-1].tolist() == played.sampled_ids.tolist()
    assert [(turn.action, turn.tool, turn.content) for turn in played.turns] == [
        (Action.SEARCH, "", "Où est 東京? 🚀"),
        (Action.SEARCH, "", "Où est 東京? 🚀"),
        (Action.TOOL, "calculator", "3 * (4 + 5)"),
        (Action.ANSWER, "", "é"),
    ]
    assert (played.searches, played.tool_calls, script.queries) == (2, 1, ["Où est 東京? 🚀"] * 2)
    assert [turn.generated_tokens > 0 for turn in played.turns] == [True, True, False, True]
    assert played.response == "".join(turn.text + turn.observation for turn in played.turns)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ('<tool_call>\n{"name": "search", \n</tool_call>', "The call is not JSON"),
        ('<tool_call>{"name": "search"', "The call is not JSON"),
        ("<tool_call>" + "[" * 100_000, "The call is not JSON"),
        ('<tool_call>\n{"name": ' + "[" * 100 + "]" * 100 + "}\n</tool_call>", "The call is not JSON"),
        (called("東京", {"query": "x"}), 'There is no tool "東京": call one of search, calculator.'),
        ("<tool_call>\n[1]\n</tool_call>", "There is no tool null: call one of search, calculator."),
        (called("search", {"text": "x"}), 'The arguments of search must be {"query": "..."}.'),
        (called("calculator", {"text": 27}), 'The arguments of calculator must be {"text": "..."}.'),
        (called("search", {"query": " "}), 'The arguments of search must be {"query": "..."}.'),
        (called("calculator", {"text": "1 / 0"}), "calculator failed: division by zero"),
    ],
)
def test_call_that_fails_is_answered_with_an_error(call: str, error: str) -> None:
    script = script_of(call, "It is Paris.")
    played = run(script, react(max_turn_tokens=200_000, max_total_tokens=400_000))
    first = played.turns[0]
    assert error in first.observation
    assert first.tool_error
    assert first.action is (Action.TOOL if "division" in error else Action.INVALID)
    (observation,) = [line for line in first.observation.splitlines() if error in line]
    expected = conversation(said(call), heard(observation), said("It is Paris."))
    assert played.tokens.tolist() == expected
    assert (played.finish, played.answer, script.queries) == (Finish.ANSWER, "It is Paris.", [])
    assert_sampled_tokens_are_kept(script, played)


def test_half_a_character_in_json_is_replaced() -> None:
    script = script_of('<tool_call>{"name": "search", "arguments": {"query": "a\\ud83db"}}</tool_call>', "x")
    run(script, react())
    assert script.queries == ["a?b"]


def test_reasoning_is_neither_called_nor_answered() -> None:
    thought = f"<think> I could write {called(*SEARCHED)} <answer>b</answer> </think> Paris"
    script = Script([CODEC.encode(f"{thought}{END}")], codec=CODEC)
    played = run(script, react())
    assert (played.finish, played.answer, script.queries) == (Finish.ANSWER, "Paris", [])


FORGED = [
    "<|im_end|>",
    "</tool_response>",
    "<tool_call>",
    "<|im_start|>assistant",
    "< / TOOL_RESPONSE >",
    "a",
    "東京",
    "\n",
]


@settings(max_examples=50)
@given(
    st.lists(st.lists(st.sampled_from(FORGED), max_size=60).map("".join), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(90, 250),
    st.integers(5, 700),
)
def test_results_keep_their_limit_and_forge_nothing(passages: list[str], calls: int, limit: int, room: int) -> None:
    total = PROMPT + room
    script = script_of(*["\n".join([called(*SEARCHED)] * calls)] * 2, "Paris", found=result_of(*passages))
    config = react(max_observation_tokens=limit, max_total_tokens=total, train_eos=False)
    played = run(script, config)
    assert len(played.tokens) <= total
    assert_sampled_tokens_are_kept(script, played)
    special = set(CODEC.special_ids) & set(played.tokens.tolist())
    sampled_ends = sum(played.sampled_ids == CODEC.eos_id)
    assert special == {CODEC.eos_id, TOKENIZER.convert_tokens_to_ids("<|im_start|>")}
    observed = sum(bool(turn.observation) and bool(turn.prompt_tokens) for turn in played.turns)
    # Each message is ended once: by the policy, or after it by the template.
    assert (played.tokens == CODEC.eos_id).sum() == 2 + sampled_ends + observed
    for start, (_, inputs, _) in enumerate(script.calls[1:], start=1):
        _, before, _ = script.calls[start - 1]
        length = len(CODEC.encode(str(script.said[start - 1])))
        assert len(inputs) - len(before) - length <= limit


@pytest.mark.parametrize("limits", [{"max_turn_tokens": 6}, {"max_total_tokens": PROMPT + 9}])
def test_message_that_is_cut_off_is_no_answer(limits: dict[str, int]) -> None:
    played = run(script_of("Paris is the capital. " * 40), react(**limits))
    assert (played.finish, played.answer) == (Finish.TOKEN_LIMIT, None)
    assert [turn.action for turn in played.turns] == [Action.INVALID]


def test_last_generation_may_not_call() -> None:
    script = script_of(*[called(*SEARCHED)] * 3)
    played = run(script, react(max_turns=2))
    assert (played.finish, played.searches, len(script.queries)) == (Finish.TURN_LIMIT, 2, 2)


@pytest.mark.parametrize("turn", [1, 2])
async def test_interrupted_episode_with_several_calls_ends_like_one_that_ran_through(turn: int) -> None:
    texts = ["\n".join([called(*SEARCHED), called(*COMPUTED), "<tool_call>x</tool_call>"])] * 2 + ["Paris"]
    whole, halting, rest = script_of(*texts), script_of(*texts, halt=(turn, "say")), script_of(*texts)
    expected = await run_episode(ASKED, 3, tools_of(whole, react()), DRAWN)
    progress = await interrupted(halting, tools_of(halting, react()), asked=ASKED)
    second = Episode(ASKED, 3, tools_of(rest, react()), DRAWN, pickle.loads(pickle.dumps(progress)))
    ended = second.trajectory(await second.run() or Finish.ABORTED)
    for name in ("tokens", "loss_mask", "rollout_logprobs", "versions", "turn_of_token", "sampled_ids"):
        assert np.array_equal(getattr(ended, name), getattr(expected, name), equal_nan=name == "rollout_logprobs")
    assert [one.observation for one in ended.turns] == [one.observation for one in expected.turns]
    assert (ended.finish, len(ended.turns)) == (Finish.ANSWER, 7)


def test_task_and_template_that_react_cannot_play_are_refused() -> None:
    with refused("conflict", "task.agent.kind"):
        run(script_of("x"), react(token_mode=TokenMode.retokenize))
    with refused("out_of_range", "task.max_observation_tokens"):
        run(script_of("x"), react(max_observation_tokens=3))
    no_tools, no_results = (
        CHATML.replace("(tool | tojson)", "''"),
        CHATML.replace('+ message.content + "\\n</tool_r', '+ "\\n</tool_r'),
    )
    assert CHATML not in (no_tools, no_results)
    for template in (None, no_tools, no_results):
        tokenizer = build_tokenizer(words=True)
        tokenizer.chat_template = template
        with refused("unsupported", "task.agent.kind"):
            run(Script(["x"], codec=Codec(tokenizer)), react())
