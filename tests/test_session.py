"""The order of what the driver asks for between steps."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rlsys.orchestrator.session import Session
from tests.pipeline.virtual_time import now, run_virtually


class _BeganError(Exception):
    """The checkpoint has begun."""


def test_a_checkpoint_begins_once_the_trajectories_of_its_steps_are_on_disk() -> None:
    """Else a run that is killed and goes on from it would lack some of them."""
    said: list[str] = []

    async def kept() -> None:
        said.append("kept")

    async def under_way() -> None:
        said.append("the checkpoint's moment")
        raise _BeganError

    def say(*voices: str) -> Any:
        return lambda text: said.append(f"{', '.join(voices)}: {text}")

    run = Session.__new__(Session)
    run.record = SimpleNamespace(trajectories_kept=kept, say=say)  # type: ignore[assignment]
    run.rollout = SimpleNamespace(under_way=under_way)  # type: ignore[assignment]
    run.trained = {"actor": None}  # type: ignore[dict-item]
    with pytest.raises(_BeganError):
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
        run.rollout.waits_for = next(causes)

    async def watch() -> None:
        watching = asyncio.create_task(run.watch_rollouts())
        await asyncio.sleep(7)
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching

    run = Session.__new__(Session)
    run.rollout = SimpleNamespace(look=look)  # type: ignore[assignment]
    run.flow = SimpleNamespace(show_rollouts=lambda: seen.append((now(), run.rollout.waits_for)))  # type: ignore[assignment]
    run_virtually(watch())
    assert seen == [(1.5, ""), (3.0, "search"), (4.5, "search"), (6.0, "")]
