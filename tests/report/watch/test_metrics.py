"""Figures for Prometheus, read by Prometheus' own parser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rlsys.observe.run_folder import open_run
from rlsys.observe.status import WAIT_PREFIX
from rlsys.report.run_model import Phase, RunLife
from rlsys.report.watch import exposition
from tests.support.growing_run import add_evaluation, add_step, write_run, write_status

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(run: Path, phase: Phase, now: float) -> Samples:
    text = exposition(open_run(run), RunLife(phase, ""), now).decode()
    return {
        (one.name, tuple(sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def of(found: Samples, name: str) -> dict[str, float]:
    """A family with one label: its value -> the sample."""
    return {labels[0][1]: value for (one, labels), value in found.items() if one == name}


@pytest.mark.parametrize(("odd", "shown"), [("\ud800", "?"), ('"q"\n\\', '"q"\n\\')])
def test_strange_names_and_states_are_told_all_the_same(tmp_path: Path, odd: str, shown: str) -> None:
    run = write_run(tmp_path / "run")
    (run / "config.yaml").write_text(json.dumps({"name": f"a{odd}"}))
    add_step(run, 1, **{f"half{odd}": 1.0, f"idle/a{odd}": 0.5, f"engine/{odd}/requests": 2, "engine/0/a-b c": 3})
    write_status(run, states={f"a{odd}": {"text": f"{WAIT_PREFIX}for b{odd}", "since": 1.0}, "rollout": None})
    found = samples(run, Phase.running, 2.0)
    assert found["rlsys_run_info", (("name", f"a{shown}"), ("run", "run"))] == 1
    assert of(found, "rlsys_figure")[f"half{shown}"] == 1.0
    assert of(found, "rlsys_engine_a_b_c") == {"0": 3}
    assert of(found, "rlsys_group_at_work") == {f"a{shown}": 0}
    assert of(found, "rlsys_group_idle_ratio")[f"a{shown}"] == 0.5
    waits = {labels for name, labels in found if name == "rlsys_group_wait_seconds"}
    assert [dict(labels)["group"] for labels in waits] == [f"a{shown}"]


def test_a_run_in_the_middle(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    add_step(run, 1)
    add_step(run, 2, **{"idle/actor": 0.75})
    add_evaluation(run, 0, em=0.125)
    now = write_status(run, step=2)["at"]
    found = samples(run, Phase.running, now)
    assert found["rlsys_run_info", (("name", "own"), ("run", "run"))] == 1
    assert of(found, "rlsys_run_phase") == {phase: float(phase == "running") for phase in Phase}
    plain = {name.removeprefix("rlsys_run_"): value for (name, labels), value in found.items() if not labels}
    assert plain == {
        "step": 2,
        "steps": 9,
        "begun_timestamp_seconds": pytest.approx(now - 60),
        "status_timestamp_seconds": pytest.approx(now),
        "exact_match": 0.125,
        "evaluation_step": 0,
        "reward": 0.5,
        "tokens_per_second": 1234.5,
    }
    assert of(found, "rlsys_group_at_work") == {"rollout": 1, "actor": 0}
    waits = {labels: value for (name, labels), value in found.items() if name == "rlsys_group_wait_seconds"}
    assert waits == {(("cause", "log-probs and values"), ("group", "actor")): pytest.approx(30, abs=0.01)}
    assert of(found, "rlsys_group_idle_ratio") == {"actor": 0.75, "rollout": 0.5}
    assert of(found, "rlsys_engine_requests") == {"0": 40, "1": 41}
    assert of(found, "rlsys_engine_update_seconds") == {"0": 1.5}
    assert of(found, "rlsys_engine_tokens_per_s") == {"0": 700}
    # All other figures keep the names of docs/metrics.md; one that is null is left out.
    assert of(found, "rlsys_figure") == {
        "critic/score/mean": 0.5,
        "rollout/tokens_per_s": 1234.5,
        "time/step": 8,
        "time/rollout": 6,
        "staleness/max": 2,
    }


def test_before_the_first_step_there_is_little_to_tell(tmp_path: Path) -> None:
    found = samples(write_run(tmp_path / "run"), Phase.unknown, 1000.0)
    assert {name for name, _ in found} == {"rlsys_run_info", "rlsys_run_phase"}


def test_a_run_that_is_over_waits_for_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_status(run, ended="failed: no disk")
    found = samples(run, Phase.failed, 9e9)
    assert of(found, "rlsys_run_phase")["failed"] == 1
    assert not {name for name, _ in found} & {"rlsys_group_at_work", "rlsys_group_wait_seconds"}
