"""What a run says of itself before anything of it is built."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest

from rlsys.config.schema import RunConfig, TrainerConfig
from rlsys.observe.guards import GuardsState
from rlsys.orchestrator.run import _progress
from rlsys.orchestrator.run_logger import History


@pytest.mark.parametrize(
    ("evaluations", "em"), [((), None), (({"step": 90, "em": 0.25}, {"step": 100, "em": 0.5}), 0.5)]
)
def test_a_resumed_run_stands_where_it_was_saved(
    evaluations: tuple[dict[str, float], ...], em: float | None, tmp_path: Path
) -> None:
    """From its first word on, and when it ends before its first step is done."""
    history = History(100, {}, {}, GuardsState({}, ()), evaluations)
    config = RunConfig(trainer=TrainerConfig(steps=200))
    with suppress(RuntimeError), _progress(config, tmp_path, history):
        first = json.loads((tmp_path / "status.json").read_text())
        raise RuntimeError("out of memory")
    last = json.loads((tmp_path / "status.json").read_text())
    for said in (first, last):
        assert (said["step"], said["steps"], said["em"]) == (100, 200, em)
    assert (first["ended"], last["ended"]) == (None, "failed: out of memory")


def test_a_run_that_begins_has_done_nothing(tmp_path: Path) -> None:
    progress = _progress(RunConfig(trainer=TrainerConfig(steps=200)), tmp_path, None)
    assert (progress.status().step, progress.status().steps, progress.status().em) == (0, 200, None)
