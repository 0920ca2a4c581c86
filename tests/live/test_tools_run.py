"""Tests of tools: one real step of `rlsys train` by a policy that has learnt to call them, by tags and by ReAct."""

import os
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rlsys.observe.kept import TrajectoryRecord
from tests.docs.pages import fenced_blocks
from tests.live.learnt_run import kept_episodes, learnt, one_step
from tests.support import tiny
from tests.support.chat_templates import CHATML, END, FUNCTIONS, called
from tests.support.paths import PROJECT
from tests.support.runs import Finished

pytestmark = [pytest.mark.slow, pytest.mark.engine]

PROMPT = "Question: What is six by seven?\n"
ASKED, SYSTEM = "What is six by seven?", "Use tools."
SEARCHED, COMPUTED = ("search", {"query": tiny.QUERY}), ("calculator", {"text": "6 * 7"})
FOUND = tiny.OBSERVATION.strip().removeprefix("<information>").removesuffix("</information>")
SEARCH = (f"<search> {tiny.QUERY} </search>", tiny.OBSERVATION)
RIGHT = [  # (text that the policy writes, observation) of each turn
    SEARCH,
    ("<calculator> 6 * 7 </calculator>", "\n\n<information>42</information>\n\n"),
    ("<word> etude </word>", "\n\n<information>a short piece to practise a technique with</information>\n\n"),
    ("<answer> 42 </answer>", ""),
]
WRONG = [
    SEARCH,
    ("<calculator> 6 + 7 </calculator>", "\n\n<information>13</information>\n\n"),
    ("<word> polka </word>", "\n\n<information>dictionary failed: polka is in no dictionary</information>\n\n"),
    ("<answer> 13 </answer>", ""),
]


def test_tools_and_search_are_called_and_observations_are_not_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tmp_path / "policy"
    tiny.tokenizer().save_pretrained(policy)
    tiny.train(tiny.FIRST, tiny.tokenizer(), seed=0, steps=0).save_pretrained(policy)
    # The run loads the tokenizer in the same way. For a Qwen2 model, transformers always splits text like Qwen2's
    # tokenizer, even if the tokenizer file says otherwise.
    words = AutoTokenizer.from_pretrained(policy)
    texts = [PROMPT + "".join(said + read for said, read in turns) + tiny.EOS for turns in (RIGHT, WRONG)]
    learnt(texts, words).save_pretrained(policy)
    (tmp_path / "my_tools.py").write_text(fenced_blocks(PROJECT / "docs" / "tutorials" / "own-tool.md", "python")[0])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    run = one_step(tmp_path, PROMPT, "task.tools=[rlsys.rollout.tools.calculator.Calculator,my_tools.Dictionary]")
    kept = kept_episodes(run)
    for turns, reward in ((RIGHT, 1.0), (WRONG, 0.0)):
        taken = [one for one in kept if [turn.text for turn in one.turns] == [said for said, _ in turns]]
        assert taken, "the policy must have learnt both episodes"
        for one in taken:
            assert_as_played(one, turns, words)
            assert one.reward == reward
    assert_counted(run, kept)
    (row,) = run.rows
    assert row["actor/grad_norm"] > 0
    assert run.summary["weight_syncs"] == 2


def test_react_trains_the_tokens_that_the_engine_sampled_between_the_templates_own(tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    words = tiny.tokenizer()
    words.add_special_tokens({"additional_special_tokens": ["<|im_start|>", END]})
    words.chat_template, words.eos_token = CHATML, END
    words.save_pretrained(policy)
    tiny.train(tiny.FIRST, words, seed=0, steps=0).save_pretrained(policy)
    words = AutoTokenizer.from_pretrained(policy)
    calls = [(called(*SEARCHED), called(*COMPUTED)), (called(*SEARCHED), called("calculator", {"text": "6 + 7"}))]
    texts = [
        words.apply_chat_template(
            [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": ASKED},
                {"role": "assistant", "content": "\n".join(both)},
                {"role": "tool", "content": FOUND},
                {"role": "tool", "content": number},
                {"role": "assistant", "content": f"<answer>{number}</answer>"},
            ],
            tools=FUNCTIONS,
            tokenize=False,
        ).removesuffix("\n")
        for both, number in zip(calls, ("42", "13"), strict=True)
    ]
    learnt(texts, words).save_pretrained(policy)
    run = one_step(
        tmp_path,
        ASKED,
        "task.agent=react",
        f"task.agent.system={SYSTEM}",
        "task.token_mode=append",
        "task.tools=[rlsys.rollout.tools.calculator.Calculator]",
        "task.max_prompt_tokens=1000",
        "task.max_turn_tokens=256",
        "task.max_total_tokens=2000",
    )
    kept = kept_episodes(run)
    opening = "<|im_start|>assistant\n"
    for text, reward in zip(texts, (1.0, 0.0), strict=True):
        response = text.partition(opening)[2]
        taken = [one for one in kept if "".join(one.pieces) == response]
        assert taken, "the policy must have learnt both episodes"
        for one in taken:
            assert (one.reward, one.finish) == (reward, "answer")
            trained = one.loss_mask[one.prompt_length :]
            own = "".join(piece for piece, sampled in zip(one.pieces, trained, strict=True) if sampled)
            assert own == "".join(part.partition(END)[0] + END for part in response.split(opening))
    (row,) = run.rows
    assert row["tool/calculator/calls"] > 0
    assert row["env/number_of_valid_search"] > 0
    assert row["actor/grad_norm"] > 0
    assert 0 < row["logprob/max_diff"] < 1e-3
    assert run.summary["weight_syncs"] == 2


def assert_as_played(one: TrajectoryRecord, turns: list[tuple[str, str]], words: PreTrainedTokenizerFast) -> None:
    """Assert that the trajectory has `turns`, its tools were called, and only the policy's text is trained."""
    assert [turn.observation for turn in one.turns] == [read for _, read in turns]
    assert [turn.tool for turn in one.turns] == ["", "calculator", "dictionary", ""]
    assert [turn.action for turn in one.turns] == ["search", "tool", "tool", "answer"]
    trained = one.loss_mask[one.prompt_length :]
    text = {
        mask: "".join(piece for piece, own in zip(one.pieces, trained, strict=True) if own == mask)
        for mask in (True, False)
    }
    assert text[False] == "".join(read for _, read in turns)
    assert text[True] == "".join(said for said, _ in turns) + tiny.EOS
    assert not one.loss_mask[: one.prompt_length].any()
    for turn in one.turns[:-1]:
        assert words.decode(turn.sampled_ids) == turn.text, "the engine must stop at the closing tag"


def assert_counted(run: Finished, kept: list[TrajectoryRecord]) -> None:
    """Assert that the step's metrics count tool calls, and not similar text written by the policy itself."""
    (row,) = run.rows
    turns = [turn for one in kept for turn in one.turns if turn.observation.startswith("\n\n<information>")]
    called = Counter(turn.text.rpartition("</")[2] for turn in turns)
    assert row["tool/calculator/calls"] == called["calculator>"] / len(kept)
    assert row["tool/dictionary/calls"] == called["word>"] / len(kept)
    assert row["env/number_of_valid_search"] == called["search>"] / len(kept)
    assert row["tool/dictionary/errors"] == sum("dictionary failed: " in turn.observation for turn in turns)
    assert row["tool/calculator/errors"] == sum("calculator failed: " in turn.observation for turn in turns)
    assert row["tool/dictionary/s_mean"] >= 0.01, "the tool sleeps that long"
