"""A run of the driver: where it stands before its first step, and the order of a save."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlsys.config.schema import RunConfig, TrainerConfig
from rlsys.observe import status
from rlsys.observe.guards import GuardsState
from rlsys.orchestrator.run import Run, _progress
from rlsys.orchestrator.run_logger import History


class _BeganError(Exception):
    """The checkpoint has begun."""


def test_a_checkpoint_begins_once_the_trajectories_of_its_steps_are_on_disk() -> None:
    """Else a run that is killed and goes on from it would lack some of them."""
    said: list[str] = []

    async def kept() -> None:
        said.append("kept")

    async def in_flight() -> None:
        said.append("the checkpoint's moment")
        raise _BeganError

    run = Run.__new__(Run)
    run.log = SimpleNamespace(trajectories_kept=kept)  # type: ignore[assignment]
    run.groups = SimpleNamespace(engines=SimpleNamespace(in_flight=in_flight), trained={"actor": None})  # type: ignore[assignment]
    reported = status.reported_to(lambda stage, text: said.append(f"{stage}: {text}"))
    with reported, pytest.raises(_BeganError):
        asyncio.run(run.save(3))
    assert said == [
        "actor.trajectories: waits for trajectories to be written",
        "kept",
        "actor.trajectories: ",
        "the checkpoint's moment",
    ]


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
