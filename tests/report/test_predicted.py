"""Tests of predictions beside measurements: by hand, and with content that is no prediction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.observe.run_folder import PLAN, open_run
from rlsys.report.predicted import compare
from rlsys.report.run_model import build
from tests.support.made_run import made_run

PREDICTION = {
    "step_s": 8.0,
    "stages_s": {"rollout": 4.0, "training": 5.0},
    "idle": {"actor": 0.25},
    "bottleneck": "actor works 75% of the time",
    "helps": [{"change": "one more engine", "saves_s": 1.5}, {"change": "nothing", "saves_s": -1.0}],
    "costs": {"engine": "12 turns of a run"},
}
ROWS = [
    {"step": 1, "time/step": 99.0, "time/rollout": 50.0},
    {"step": 2, "time/step": 9.0, "time/rollout": 4.5, "time/training": 3.0, "idle/actor": 0.5},
    {"step": 3, "time/step": 11.0, "time/rollout": 5.5, "time/training": 3.0, "idle/actor": 0.7},
]


def test_stages_are_compared_without_the_first_step() -> None:
    found = compare(PREDICTION, ROWS)
    assert found["seconds"] == [
        {"name": "step", "predicted": 8.0, "measured": 10.0},
        {"name": "rollout", "predicted": 4.0, "measured": 5.0},
        {"name": "training", "predicted": 5.0, "measured": 3.0},
    ]
    assert found["idle"] == [{"name": "actor", "predicted": 0.25, "measured": pytest.approx(0.6)}]
    assert "-20%" in found["differs"]
    assert "training differs most: 5.00 s predicted, 3.00 s measured" in found["differs"]
    assert [note.split(":")[0] for note in found["notes"]] == [
        "actor works 75% of the time",
        "one more engine",
        "engine",
    ]


def test_a_prediction_before_the_run_has_nothing_to_differ_from() -> None:
    found = compare(PREDICTION, [])
    assert found["differs"] is None
    assert [row["measured"] for row in found["seconds"]] == [None] * 3


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*PREDICTION]), inner, max_size=3),
)


@given(st.dictionaries(st.sampled_from([*PREDICTION]), JSON))
def test_no_content_is_an_error(content: dict[str, Any]) -> None:
    found = compare(content, ROWS)
    assert all(isinstance(row["predicted"], float) for row in [*found["seconds"], *found["idle"]])


@pytest.mark.parametrize("text", [json.dumps(PREDICTION), "[]", None])
def test_page_has_the_prediction_of_a_run_if_there_is_one(text: str | None, tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    if text is not None:
        (run / PLAN).write_text(text)
    (model,) = build([open_run(run)], audited=False)["runs"]
    if text is None or text == "[]":
        assert model["plan"] is None
        assert any(PLAN in problem for problem in model["problems"]) is (text is not None)
    else:
        assert model["plan"]["seconds"][0]["measured"] == pytest.approx(9, abs=0.1)
