"""Tests of an async run, and of evaluation on reserved engines: one real `rlsys train` each."""

from pathlib import Path

import pytest

from tests.support.runs import Finished

pytestmark = [pytest.mark.slow, pytest.mark.engine]


def test_async_run_with_turn_rewards_trains_stale_tokens_within_its_bound(tmp_path: Path) -> None:
    run = Finished(
        tmp_path,
        "reward.terms={correct_answer: 10.0, search_penalty: -0.1, invalid_format: -5.0}",
        "algorithm.advantage.credit=turn",
        "algorithm.kl_in=reward",
        "algorithm.kl_control=adaptive",
        "trainer.steps=4",
        "trainer.schedule.kind=async",
        "algorithm.correction.kind=truncate",
        "algorithm.curation.oversample=1.25",
        "algorithm.curation.drop_no_spread=true",
        "algorithm.curation.max_replaced=0.5",
        "search.cassette.mode=record",
        f"search.cassette.path={tmp_path / 'searches.jsonl'}",
    )
    assert max(row["staleness/max"] for row in run.rows) == 1, "rollouts must be one version ahead, and no more"
    assert sum(row.get("staleness/lag_1", 0.0) for row in run.rows) > 0.2
    assert run.summary["weight_syncs"] == 5
    assert run.rows[-1]["engine/0/version"] >= 3
    assert run.rows[-1]["engine/0/drain_s"] == 0, "a switch waits for no episode"
    late = [row for row in run.rows if row["staleness/max"]]
    assert all(0 < row["correction/ess"] <= 1 for row in late)
    assert any(row["correction/ess"] < 1 for row in late), "stale tokens must have different correction weights"
    dropped = run.rows[-1]
    assert dropped["pipeline/dropped_no_spread"] <= 4 * 4, "at most half of the prompts of each step are replaced"
    assert dropped["pipeline/dropped_lost"] == 0
    assert run.rows[-1]["engine/0/search_recorded"] > 0
    assert len((tmp_path / "searches.jsonl").read_text().splitlines()) > 1
    for row in run.rows:
        assert {"reward/term/correct_answer", "reward/term/search_penalty", "critic/kl"} <= row.keys()
    assert run.rows[0]["critic/kl_coef"] == 0.001
    assert run.rows[-1]["critic/kl_coef"] < 0.001, "the coefficient must fall while the KL is far below its target"


def test_rollouts_continue_on_the_other_engine_during_an_evaluation(tmp_path: Path) -> None:
    place = "cluster.placement={actor: '0', inference: '1', rollout: '2-3'}"
    aside = ["eval.engines=1", "eval.interval=1", "eval.limit=64", "trainer.prompts_per_step=16"]
    run = Finished(tmp_path, "trainer.steps=4", "trainer.schedule.kind=async", place, *aside)
    assert [row["step"] for row in run.summary["evaluations"]] == [0, 1, 2, 3, 4]
    assert all(row["questions"] == 64 for row in run.summary["evaluations"])
    asked = [span for span in run.spans if span["name"] == "eval.episode"]
    rolled = [span for span in run.spans if span["name"] == "rollout.group"]
    meanwhile = [
        (one["args"]["question"], other["args"]["question"])
        for one in asked
        for other in rolled
        if one["ts"] < other["ts"] < one["ts"] + one["dur"] and one["tid"] != other["tid"]
    ]
    assert meanwhile, "no rollout started on the other engine during an evaluation"
