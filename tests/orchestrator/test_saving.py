"""Checkpoints on their way to disk: in order, one at a time, beside the training, and never half there."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import rlsys.orchestrator.saving
from rlsys.data.question import SourceState
from rlsys.errors import RunError
from rlsys.orchestrator.saving import Saver
from rlsys.weights.checkpoint.state_file import save_values
from rlsys.weights.checkpoint.store import CheckpointStore, Keep, check
from tests.support.trajectories import question

ALL = Keep(last=None, every=None, best=False)


@pytest.fixture(autouse=True)
def _look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rlsys.orchestrator.saving, "LOOK_S", 0.0)


class Part:
    """Writes one file, as soon as it may."""

    def __init__(self, name: str, events: list[str], written: asyncio.Event | None = None) -> None:
        self.name, self.events = name, events
        self.written = written or asyncio.Event()
        self.fails: str | None = None
        self.fails_to_begin: str | None = None
        self.folder: Path | None = None

    async def begin_save(self, folder: Path) -> None:
        assert self.folder is None, "the save before is not finished"
        self.events.append(f"begin {self.name} {folder.name}")
        if self.fails_to_begin is not None:
            problem, self.fails_to_begin = self.fails_to_begin, None
            raise RunError(problem)
        self.folder = folder
        folder.mkdir()

    async def saving(self) -> bool:
        await asyncio.sleep(0)
        return not self.written.is_set()

    async def finish_save(self) -> None:
        """As groups do: what failed is told once, and a save that is finished may be finished again."""
        await self.written.wait()
        self.events.append(f"finish {self.name}")
        folder, self.folder = self.folder, None
        if self.fails is not None:
            problem, self.fails = self.fails, None
            raise RunError(problem)
        if folder:
            (folder / "part").write_text(f"{self.name}\n")


class Run:
    """A saver with two parts; `events` is what was asked of them and of the store, in order."""

    def __init__(
        self,
        folder: Path,
        keep: Keep = ALL,
        scores: Mapping[int, float] | None = None,
        background: bool = True,
    ) -> None:
        self.events: list[str] = []
        self.store = Watched(folder / "checkpoints", self.events)
        self.parts = {name: Part(name, self.events) for name in ("actor", "critic")}
        self.saver = Saver(self.store, keep, (scores or {}).get, self._need, background)

    async def begin(self, step: int, write_data: Callable[[Path], None] | None = None) -> None:
        await self.saver.begin(
            step,
            write_data or self.write_data,
            {name: (f"{name} group", p) for name, p in self.parts.items()},
        )

    def let_write(self) -> None:
        for part in self.parts.values():
            part.written.set()

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

    def write_data(self, folder: Path) -> None:
        self.events.append("data")
        (folder / "data").write_text("state")


class Watched(CheckpointStore):
    """Says what it does."""

    def __init__(self, folder: Path, events: list[str]) -> None:
        super().__init__(folder)
        self._events = events

    def begin(self, step: int) -> Path:
        self._events.append(f"open {step}")
        return super().begin(step)

    def publish(self, step: int) -> Path:
        self._events.append(f"publish {step}")
        return super().publish(step)

    def prune(self, keep: Keep, score_of: Callable[[int], float | None], spared: Collection[int] = ()) -> None:
        self._events.append("prune")
        super().prune(keep, score_of, spared)


BEGUN = [
    "open {0}",
    "data",
    "need actor group",
    "begin actor actor",
    "need critic group",
    "begin critic critic",
]
FINISHED = ["finish actor", "finish critic", "publish {0}", "prune"]


def expected(lines: Sequence[str], step: int) -> list[str]:
    return [line.format(step) for line in lines]


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    """Run it; a save that waits for what never comes fails instead of hanging."""

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(bounded())


def test_a_save_is_begun_part_by_part_and_published_once_all_is_written(tmp_path: Path) -> None:
    async def scenario() -> None:
        run = Run(tmp_path)
        await run.begin(3)
        assert run.events == expected(BEGUN, 3)
        assert run.steps() == []
        run.let_write()
        await run.saver.finish()
        assert run.events == expected(BEGUN + FINISHED, 3)
        assert run.steps() == [3]
        assert run.saver.newest == run.store.path(3)
        assert (run.store.path(3) / "critic" / "part").read_text() == "critic\n"
        await run.saver.finish()
        assert run.events == expected(BEGUN + FINISHED, 3), "there is nothing left to finish"
        at_once = Run(tmp_path / "at once", background=False)
        at_once.let_write()
        await at_once.begin(3)
        assert at_once.events == expected(BEGUN + FINISHED, 3)

    play(scenario)


def test_the_next_save_waits_for_the_one_before(tmp_path: Path) -> None:
    async def scenario() -> None:
        run = Run(tmp_path)
        await run.begin(1)
        settled = asyncio.create_task(run.saver.settle())
        second = asyncio.create_task(run.begin(2))
        for _ in range(100):
            await asyncio.sleep(0)
        assert run.events == expected(BEGUN, 1)
        run.let_write()
        await second
        await settled
        assert run.events == expected(BEGUN + FINISHED, 1) + expected(BEGUN, 2)
        assert run.steps() == [1]
        await run.saver.finish()
        assert run.steps() == [1, 2]

    play(scenario)


@pytest.mark.parametrize("way", ["settle", "finish"])
def test_a_part_that_fails_is_told_once_and_leaves_what_was_there(way: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        run = Run(tmp_path)
        run.let_write()
        await run.begin(1)
        await run.saver.finish()
        await run.begin(2)
        run.parts["critic"].fails = "critic rank 0: the disk is full."
        with pytest.raises(RunError, match="critic rank 0"):
            await getattr(run.saver, way)()
        await run.saver.finish()
        await run.saver.settle()
        assert run.steps() == [1], "a part that is asked again complains no more"
        assert run.left() == ["global_step_1"]
        assert run.saver.newest == run.store.path(1)
        await run.begin(3)
        await run.saver.finish()
        assert run.steps() == [1, 3]

    play(scenario)


def test_a_failed_save_is_deleted_once_nobody_writes_to_it(tmp_path: Path) -> None:
    """The actor fails while the critic still writes, once as it begins and once as it ends."""

    async def scenario() -> None:
        run = Run(tmp_path)
        run.let_write()
        await run.begin(1)
        await run.saver.finish()
        for fails in ("begin", "finish"):
            actor, critic = run.parts.values()
            parts = {"actor": ("actor group", actor), "critic": ("critic group", critic)}
            if fails == "begin":
                parts = dict(reversed(parts.items()))
            critic.written.clear()
            setattr(actor, f"fails{'_to_begin' if fails == 'begin' else ''}", "the disk is full.")

            async def save(parts: Mapping[str, Any] = parts) -> None:
                await run.saver.begin(2, run.write_data, parts)
                await run.saver.finish()

            saved = asyncio.create_task(save())
            while critic.folder is None or run.events[-1].split()[1] != "actor":
                await asyncio.sleep(0)
            for _ in range(10):
                await asyncio.sleep(0)
            assert run.left() == [".global_step_2.partial", "global_step_1"]
            assert not saved.done()
            critic.written.set()
            with pytest.raises(RunError, match="the disk is full"):
                await saved
            assert run.left() == ["global_step_1"]

    play(scenario)


def test_older_ones_go_and_the_best_stays(tmp_path: Path) -> None:
    async def scenario() -> None:
        run = Run(tmp_path, Keep(last=2, every=None, best=True), {1: 0.1, 2: 0.9, 3: 0.3})
        run.let_write()
        for step in range(1, 7):
            await run.begin(step)
        await run.saver.finish()
        assert run.steps() == [2, 5, 6]

    play(scenario)


def test_an_old_checkpoint_that_cannot_be_deleted_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck(*_: Any) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    async def scenario() -> None:
        run = Run(tmp_path)
        run.let_write()
        await run.begin(1)
        monkeypatch.setattr(CheckpointStore, "prune", stuck)
        await run.saver.finish()
        assert run.steps() == [1]

    play(scenario)


def test_all_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and the folders that name them: a machine that goes down must not leave an empty checkpoint."""
    synced: list[str] = []

    def fsync(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))

    monkeypatch.setattr(os, "fsync", fsync)

    async def scenario() -> None:
        run = Run(tmp_path)
        run.let_write()
        await run.begin(1)
        await run.saver.finish()

    play(scenario)
    partial = tmp_path / "checkpoints" / ".global_step_1.partial"
    inside = {"data", "actor", "actor/part", "critic", "critic/part", "manifest.json"}
    assert {*synced[:-1]} >= {str(partial), *(str(partial / name) for name in inside)}
    assert synced[-1] == str(partial.parent)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A disk on which no file can grow further: the kernel writes what fits, then refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write_state(folder: Path) -> None:
    """Some kilobytes, as the driver writes them."""
    (folder / "data").mkdir()
    save_values(folder / "data" / "state.npz", SourceState(1, tuple(map(question, range(100)))))


def test_a_full_disk_while_the_drivers_part_is_written(tmp_path: Path) -> None:
    async def scenario() -> None:
        run = Run(tmp_path)
        run.let_write()
        await run.begin(1)
        await run.saver.finish()
        with files_of_at_most(500), pytest.raises(RunError) as told:
            await run.begin(2, write_state)
        assert "global_step_2" in str(told.value)
        assert not [event for event in run.events[len(BEGUN + FINISHED) :] if event.startswith("begin")]
        await run.saver.finish()
        assert run.steps() == [1]
        assert run.left() == ["global_step_1"]
        await run.begin(2, write_state)
        await run.saver.finish()
        assert run.steps() == [1, 2]

    play(scenario)


@pytest.mark.parametrize(("call", "way"), [("manifest", "settle"), ("fsync", "finish"), ("rename", "settle")])
def test_a_full_disk_while_it_is_published(
    call: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def scenario() -> None:
        run = Run(tmp_path)
        run.let_write()
        await run.begin(1)
        await run.saver.finish()
        await run.begin(2)
        homes = {"manifest": (Path, "write_text"), "fsync": (os, "fsync"), "rename": (Path, "rename")}
        for part in run.parts.values():
            await part.finish_save()
        with monkeypatch.context() as patch:
            patch.setattr(*homes[call], full)
            with pytest.raises(RunError) as told:
                await getattr(run.saver, way)()
        assert str(run.store.path(2)) in str(told.value)
        assert run.steps() == [1]
        assert run.left() == ["global_step_1"]
        assert run.saver.newest == run.store.path(1)
        await run.begin(3)
        await run.saver.finish()
        assert run.steps() == [1, 3]

    play(scenario)
