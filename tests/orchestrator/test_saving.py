"""Tests of saving checkpoints: order, background writes, failures that leave no partial checkpoint."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

import rlsys.orchestrator.saving
from rlsys.config.schema import CheckpointConfig, EvalConfig, RunConfig
from rlsys.errors import RunError
from rlsys.orchestrator import run as driver
from rlsys.orchestrator.saving import Saver
from rlsys.weights.checkpoint.store import CheckpointStore, RetentionPolicy, check
from tests.support.waiting import let_tasks_run, until


@pytest.fixture(autouse=True)
def _poll_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rlsys.orchestrator.saving, "POLL_S", 0.0)


class Part:
    """Part of a checkpoint that writes one file once `written` is set.

    It fails once if `fails` names an event, such as `begin actor`.
    """

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events
        self.written = asyncio.Event()
        self.fails = ""
        self.folder: Path | None = None

    async def begin_save(self, folder: Path) -> None:
        assert self.folder is None, "the previous save is not finished"
        self.note("begin")
        self.folder = folder
        folder.mkdir()

    async def saving(self) -> bool:
        await asyncio.sleep(0)
        return not self.written.is_set()

    async def finish_save(self) -> None:
        """Finish the save, if there is one. A failure is raised once, as by a worker group."""
        await self.written.wait()
        folder, self.folder = self.folder, None
        self.note("finish")
        if folder:
            (folder / "part").write_text(f"{self.name}\n")

    def note(self, event: str) -> None:
        self.events.append(f"{event} {self.name}")
        if self.fails == event:
            self.fails = ""
            raise RunError(f"{self.name} rank 0: the disk is full.")


class SavingRun:
    """A saver with two parts, which log their calls in `events`."""

    def __init__(self, folder: Path, background: bool = True) -> None:
        self.events: list[str] = []
        self.store = CheckpointStore(folder / "checkpoints")
        self.parts = {name: Part(name, self.events) for name in ("actor", "critic")}
        keep = RetentionPolicy(last=None, every=None, best=False)
        self.saver = Saver(self.store, keep, {}.get, self._need, background)

    async def begin(self, step: int, write_data: Callable[[Path], None] = lambda _: None, **parts: Part) -> None:
        self.events.clear()
        await self.saver.begin(step, write_data, {name: (name, part) for name, part in (parts or self.parts).items()})

    async def save(self, step: int) -> None:
        for part in self.parts.values():
            part.written.set()
        await self.begin(step)
        await self.saver.finish()

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints; fails if one is not whole."""
        for one in self.store.saved():
            check(one.folder)
        return [one.step for one in self.store.saved()]

    def left(self) -> list[str]:
        """Return the names of all files in the folder of checkpoints, hidden files included."""
        return sorted(path.name for path in self.store.folder.iterdir())

    async def _need(self, group: str) -> None:
        self.events.append(f"need {group}")


@pytest.fixture
def run(tmp_path: Path) -> SavingRun:
    return SavingRun(tmp_path)


async def test_a_resumed_run_keeps_checkpoints_that_were_not_evaluated_to_the_end(tmp_path: Path) -> None:
    former = SavingRun(tmp_path)
    for step in (10, 15, 20, 25):
        await former.save(step)
    config = RunConfig(eval=EvalConfig(interval=10), checkpoint=CheckpointConfig(keep_last=1, keep_best=True))
    log, devices, origin = Mock(em_of={20: 0.5}.get), Mock(onload=AsyncMock()), Mock(**{"state.step": 25})
    former.saver = driver._saver(config, tmp_path, log, devices, origin)
    await former.save(26)
    assert former.steps() == [10, 20, 26]
    log.progress.warn.assert_called_once()


BEGUN = ["need actor", "begin actor", "need critic", "begin critic"]
FINISHED = ["finish actor", "finish critic"]


async def test_parts_are_begun_in_order_and_published_once_all_are_written(run: SavingRun, tmp_path: Path) -> None:
    await run.begin(3)
    assert (run.events, run.steps()) == (BEGUN, [])
    for part in run.parts.values():
        part.written.set()
    await run.saver.finish()
    assert (run.events, run.steps()) == (BEGUN + FINISHED, [3])
    assert run.saver.newest == run.store.path(3)
    assert (run.store.path(3) / "critic" / "part").read_text() == "critic\n"
    await run.saver.finish()
    assert run.events == BEGUN + FINISHED, "finishing again does nothing"
    blocking = SavingRun(tmp_path / "blocking", background=False)
    for part in blocking.parts.values():
        part.written.set()
    await blocking.begin(3)
    assert blocking.steps() == [3]


async def test_next_save_waits_for_the_previous_one(run: SavingRun) -> None:
    await run.begin(1)
    settled = asyncio.create_task(run.saver.settle())
    second = asyncio.create_task(run.saver.begin(2, lambda _: None, {"actor": ("actor", run.parts["actor"])}))
    await let_tasks_run()
    assert run.events == BEGUN
    for part in run.parts.values():
        part.written.set()
    await second
    await settled
    assert (run.events, run.steps()) == (BEGUN + FINISHED + BEGUN[:2], [1])
    await run.saver.finish()
    assert run.steps() == [1, 2]


@pytest.mark.parametrize("way", ["settle", "finish"])
async def test_failure_of_a_part_is_raised_once_and_leaves_older_checkpoints(way: str, run: SavingRun) -> None:
    await run.save(1)
    await run.begin(2)
    run.parts["critic"].fails = "finish"
    with pytest.raises(RunError, match="critic rank 0"):
        await getattr(run.saver, way)()
    await run.saver.finish()
    await run.saver.settle()
    assert run.steps() == [1], "the failure is not raised again"
    assert run.left() == ["global_step_1"]
    assert run.saver.newest == run.store.path(1)
    await run.save(3)
    assert run.steps() == [1, 3]


@pytest.mark.parametrize("fails", ["begin", "finish"])
async def test_failed_save_is_deleted_after_the_other_parts_have_ended(fails: str, run: SavingRun) -> None:
    """The actor fails while the critic still writes."""
    await run.save(1)
    actor, critic = run.parts.values()
    critic.written.clear()
    actor.fails = fails
    order: Mapping[str, Part] = {"critic": critic, "actor": actor} if fails == "begin" else run.parts

    async def save() -> None:
        await run.begin(2, **order)
        await run.saver.finish()

    saved = asyncio.create_task(save())
    await until(lambda: critic.folder is not None and run.events[-1] == f"{fails} actor")
    await let_tasks_run()
    assert run.left() == [".global_step_2.partial", "global_step_1"]
    assert not saved.done()
    critic.written.set()
    with pytest.raises(RunError, match="the disk is full"):
        await saved
    assert run.left() == ["global_step_1"]


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_old_checkpoint_that_cannot_be_deleted_does_not_end_the_run(
    run: SavingRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointStore, "prune", full)
    await run.save(1)
    assert run.steps() == [1]


async def test_disk_full_while_the_drivers_part_is_written_leaves_nothing(run: SavingRun) -> None:
    await run.save(1)
    with pytest.raises(RunError, match="global_step_2") as raised:
        await run.begin(2, full)
    assert raised.value.code == "no_room"
    assert run.events == [], "no part was begun"
    assert run.left() == ["global_step_1"]
    await run.save(2)
    assert run.steps() == [1, 2]


async def test_disk_full_while_a_checkpoint_is_published_leaves_the_one_before(
    run: SavingRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run.save(1)
    await run.begin(2)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full)
        with pytest.raises(RunError, match="global_step_2"):
            await run.saver.finish()
    assert run.left() == ["global_step_1"]
    await run.save(3)
    assert run.steps() == [1, 3]


async def test_a_save_that_is_cancelled_while_it_is_published_ends_first(
    run: SavingRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes back then cleans up: it must not delete files of a checkpoint that is just being published."""
    began, go_on, publish = threading.Event(), threading.Event(), CheckpointStore.publish

    def slowly(store: CheckpointStore, step: int) -> Path:
        began.set()
        go_on.wait()
        return publish(store, step)

    monkeypatch.setattr(CheckpointStore, "publish", slowly)
    saving = asyncio.create_task(run.save(1))
    await until(began.is_set)
    for _ in range(2):
        saving.cancel()
        await let_tasks_run()
    waits = not saving.done()
    go_on.set()
    assert waits
    with pytest.raises(asyncio.CancelledError):
        await saving
    run.store.recover()
    assert run.steps() == [1]


async def test_checkpoint_begins_once_the_trajectories_of_its_steps_are_on_disk() -> None:
    """Otherwise a run that resumes from the checkpoint would lack some trajectories."""
    called = AsyncMock()
    called.in_flight.side_effect = EOFError
    run = driver.Run.__new__(driver.Run)
    run.log, run.groups = called, SimpleNamespace(engines=called, trained={})  # type: ignore[assignment]
    with pytest.raises(EOFError):
        await run.save(3)
    assert [name for name, *_ in called.mock_calls] == ["trajectories_written", "in_flight"]
