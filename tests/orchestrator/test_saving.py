"""Checkpoints on their way to disk: in order, one at a time, beside the training, and never half there."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rlsys.orchestrator.saving
from rlsys.data.question import SourceState
from rlsys.errors import RunError
from rlsys.observe import status
from rlsys.orchestrator import run as driver
from rlsys.orchestrator.saving import Saver
from rlsys.weights.checkpoint.state_file import save_values
from rlsys.weights.checkpoint.store import CheckpointStore, RetentionPolicy, check
from tests.support.trajectories import question


@pytest.fixture(autouse=True)
def _look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rlsys.orchestrator.saving, "POLL_S", 0.0)


class Part:
    """Writes one file, as soon as it may; it may fail, once, as it begins or as it finishes."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events
        self.written = asyncio.Event()
        self.fails = ""
        self.folder: Path | None = None

    async def begin_save(self, folder: Path) -> None:
        assert self.folder is None, "the save before is not finished"
        self.note("begin")
        self.folder = folder
        folder.mkdir()

    async def saving(self) -> bool:
        await asyncio.sleep(0)
        return not self.written.is_set()

    async def finish_save(self) -> None:
        """As groups do: what failed is told once, and a save that is finished may be finished again."""
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


class Run:
    """A saver with two parts; `events` is what was asked of them, in order."""

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
        """Steps of the checkpoints, all of which are whole."""
        for one in self.store.saved():
            check(one.folder)
        return [one.step for one in self.store.saved()]

    def left(self) -> list[str]:
        """All that is in the folder of checkpoints, hidden or not."""
        return sorted(path.name for path in self.store.folder.iterdir())

    async def _need(self, group: str) -> None:
        self.events.append(f"need {group}")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


BEGUN = ["need actor", "begin actor", "need critic", "begin critic"]
FINISHED = ["finish actor", "finish critic"]


async def let_all_go_on() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


async def test_a_save_is_begun_part_by_part_and_published_once_all_is_written(run: Run, tmp_path: Path) -> None:
    await run.begin(3)
    assert (run.events, run.steps()) == (BEGUN, [])
    for part in run.parts.values():
        part.written.set()
    await run.saver.finish()
    assert (run.events, run.steps()) == (BEGUN + FINISHED, [3])
    assert run.saver.newest == run.store.path(3)
    assert (run.store.path(3) / "critic" / "part").read_text() == "critic\n"
    await run.saver.finish()
    assert run.events == BEGUN + FINISHED, "there is nothing left to finish"
    at_once = Run(tmp_path / "at once", background=False)
    for part in at_once.parts.values():
        part.written.set()
    await at_once.begin(3)
    assert at_once.steps() == [3]


async def test_the_next_save_waits_for_the_one_before(run: Run) -> None:
    await run.begin(1)
    settled = asyncio.create_task(run.saver.settle())
    second = asyncio.create_task(run.saver.begin(2, lambda _: None, {"actor": ("actor", run.parts["actor"])}))
    await let_all_go_on()
    assert run.events == BEGUN
    for part in run.parts.values():
        part.written.set()
    await second
    await settled
    assert (run.events, run.steps()) == (BEGUN + FINISHED + BEGUN[:2], [1])
    await run.saver.finish()
    assert run.steps() == [1, 2]


@pytest.mark.parametrize("way", ["settle", "finish"])
async def test_a_part_that_fails_is_told_once_and_leaves_what_was_there(way: str, run: Run) -> None:
    await run.save(1)
    await run.begin(2)
    run.parts["critic"].fails = "finish"
    with pytest.raises(RunError, match="critic rank 0"):
        await getattr(run.saver, way)()
    await run.saver.finish()
    await run.saver.settle()
    assert run.steps() == [1], "a part that is asked again complains no more"
    assert run.left() == ["global_step_1"]
    assert run.saver.newest == run.store.path(1)
    await run.save(3)
    assert run.steps() == [1, 3]


@pytest.mark.parametrize("fails", ["begin", "finish"])
async def test_a_failed_save_is_deleted_once_nobody_writes_to_it(fails: str, run: Run) -> None:
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
    while critic.folder is None or run.events[-1] != f"{fails} actor":
        await asyncio.sleep(0)
    await let_all_go_on()
    assert run.left() == [".global_step_2.partial", "global_step_1"]
    assert not saved.done()
    critic.written.set()
    with pytest.raises(RunError, match="the disk is full"):
        await saved
    assert run.left() == ["global_step_1"]


async def test_an_old_checkpoint_that_cannot_be_deleted_does_not_end_the_run(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck(*_: Any) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(CheckpointStore, "prune", stuck)
    await run.save(1)
    assert run.steps() == [1]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A disk on which no file can grow further: the kernel writes what fits, then refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_full_disk_while_the_drivers_part_is_written(run: Run) -> None:
    def write_state(folder: Path) -> None:
        """Some kilobytes, as the driver writes them."""
        save_values(folder / "state.npz", SourceState(1, tuple(map(question, range(100)))))

    await run.save(1)
    with files_of_at_most(500), pytest.raises(RunError, match="global_step_2"):
        await run.begin(2, write_state)
    assert run.events == [], "no part was begun"
    assert run.left() == ["global_step_1"]
    await run.begin(2, write_state)
    await run.saver.finish()
    assert run.steps() == [1, 2]


@pytest.mark.parametrize(
    ("home", "call", "way"),
    [(Path, "write_text", "settle"), (os, "fsync", "finish"), (Path, "rename", "settle")],
    ids=["manifest", "fsync", "rename"],
)
async def test_a_full_disk_while_it_is_published(
    home: Any, call: str, way: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    await run.save(1)
    await run.begin(2)
    for part in run.parts.values():
        await part.finish_save()
    with monkeypatch.context() as patch:
        patch.setattr(home, call, full)
        with pytest.raises(RunError, match="global_step_2"):
            await getattr(run.saver, way)()
    assert run.left() == ["global_step_1"]
    await run.save(3)
    assert run.steps() == [1, 3]


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

    run = driver.Run.__new__(driver.Run)
    run.log = SimpleNamespace(trajectories_written=kept)  # type: ignore[assignment]
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
