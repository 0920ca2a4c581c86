"""A run of the driver: where it stands before its first step, and the order of a save."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from rlsys.observe import status
from rlsys.orchestrator.run import Run


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
