"""The order of what the driver asks for between steps."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from rlsys.observe import status
from rlsys.orchestrator.run import Run
from tests.orchestrator.pipeline.virtual_time import now, run_virtually


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


def test_what_rollouts_wait_for_is_looked_at_again_and_again() -> None:
    seen: list[tuple[float, str]] = []
    causes = iter(["", "search", "search", ""])

    async def look() -> None:
        await asyncio.sleep(0.5)
        engines.waits_for = next(causes)

    async def watch() -> None:
        watching = asyncio.create_task(run.watch_rollouts())
        await asyncio.sleep(7)
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching

    run = Run.__new__(Run)
    engines = SimpleNamespace(look=look, waits_for="")
    run.groups = SimpleNamespace(engines=engines)  # type: ignore[assignment]
    run.pipeline = SimpleNamespace(show_rollouts=lambda: seen.append((now(), engines.waits_for)))  # type: ignore[assignment]
    run_virtually(watch())
    assert seen == [(1.5, ""), (3.0, "search"), (4.5, "search"), (6.0, "")]
