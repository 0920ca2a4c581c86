"""Tests of the gateway: one real step of `rlsys train` by agents that know nothing of rlsys."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.live.learnt_run import kept_episodes, learnt, one_step
from tests.support import tiny
from tests.support.runs import PLAIN_ENGINE, Finished

pytestmark = [pytest.mark.slow, pytest.mark.engine]

ASKED = "What is six by seven?"
PROMPT = f"Question: {ASKED}\n"
SEARCH = f"<search> {tiny.QUERY} </search>"
TEXTS = [PROMPT + SEARCH + tiny.OBSERVATION + f"<answer> {answer} </answer>{tiny.EOS}" for answer in ("42", "13")]


def run(folder: Path, *settings: str) -> Finished:
    """Train one step with the agent of `settings` and a policy that has learnt `TEXTS`."""
    policy = folder / "policy"
    tiny.tokenizer().save_pretrained(policy)
    tiny.train(tiny.FIRST, tiny.tokenizer(), seed=0, steps=0).save_pretrained(policy)
    # Loaded as the run loads it; see tests/live/test_tools_run.py.
    learnt(TEXTS, AutoTokenizer.from_pretrained(policy)).save_pretrained(policy)
    usual = ["task.agent=gateway", "task.token_mode=append", "task.train_eos=false"]
    return one_step(folder, ASKED, *usual, *settings)


@pytest.mark.parametrize(
    "settings",
    [
        ["task.agent.entry=examples.agents.openai_sdk.agent"],
        ["task.agent.command=[python,-m,examples.agents.plain_http]", PLAIN_ENGINE],
    ],
)
def test_agent_searches_and_what_it_sampled_is_trained(tmp_path: Path, settings: list[str]) -> None:
    done = run(tmp_path, *settings)
    kept = kept_episodes(done)
    for text, reward in zip(TEXTS, (1.0, 0.0), strict=True):
        said = text.removeprefix(PROMPT).removesuffix(tiny.EOS)
        taken = [one for one in kept if "".join(one.pieces).removesuffix(tiny.EOS) == said]
        assert taken, "the policy must have learnt both episodes"
        for one in taken:
            assert (one.reward, one.finish) == (reward, "answer")
            trained = one.loss_mask[one.prompt_length :]
            read = "".join(piece for piece, sampled in zip(one.pieces, trained, strict=True) if not sampled)
            assert read == tiny.OBSERVATION
    (row,) = done.rows
    assert row["gateway/branches/mean"] == 1
    assert_trained_as_sampled(done)


def test_branches_are_trained_as_they_were_sampled(tmp_path: Path) -> None:
    done = run(tmp_path, PLAIN_ENGINE, "task.agent.entry=tests.rollout.agent.gateway_agents.asks_twice")
    (row,) = done.rows
    assert row["gateway/branches/mean"] == 3
    assert {"gateway/tokens/first", "gateway/tokens/resampled", "gateway/tokens/new_conversation"} <= row.keys()
    causes = Counter({name: row[name] for name in row if name.startswith("gateway/tokens/")})
    assert causes.total() == row["state_tokens/total"] == row["rollout/generated_tokens"]
    assert_trained_as_sampled(done)


def assert_trained_as_sampled(done: Finished) -> None:
    """Assert that the trainer sees the engine's log-probs: each token after the same tokens, with the same weights."""
    (row,) = done.rows
    assert row["logprob/max_diff"] < 1e-3
    assert row["actor/ratio_dev_max"] < 1e-3
    assert row["actor/grad_norm"] > 0
    for one in kept_episodes(done):
        sampled = np.concatenate([turn.sampled_logprobs for turn in one.turns])
        assert one.rollout_logprobs[one.loss_mask].tolist() == sampled.tolist()
