"""Trajectories are written beside the training, a step at a time, and a full disk ends nothing."""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from rlsys.observe import kept as module
from rlsys.observe.kept import Keeper, Kept, kept_steps, write_kept
from tests.observe.test_kept import group


class Slow:
    """Writes when it is allowed to."""

    def __init__(self) -> None:
        self.go = threading.Semaphore(0)
        self.begun: list[int] = []

    def __call__(self, run_dir: Path, step: int, kept: Iterable[Kept]) -> None:
        self.begun.append(step)
        assert self.go.acquire(timeout=20)
        write_kept(run_dir, step, kept)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    writes = Slow()
    monkeypatch.setattr(module, "write_kept", writes)
    return writes


@pytest.fixture
def keeper(tmp_path: Path) -> Keeper:
    return Keeper(tmp_path, lambda ids: str(list(ids)))


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.01)


async def others_ran(waiting: asyncio.Task[None]) -> bool:
    """Whether `waiting` still waits, having had every chance to go on."""
    for _ in range(20):
        await asyncio.sleep(0.005)
    return not waiting.done()


def test_training_goes_on_and_the_next_step_waits_its_turn(keeper: Keeper, slow: Slow, tmp_path: Path) -> None:
    async def train() -> None:
        await keeper.begin(1, [group(1)], None)  # Returns although nothing may be written yet.
        await until(lambda: slow.begun)
        second = asyncio.create_task(keeper.begin(2, [group(2)], None))
        assert await others_ran(second)
        assert slow.begun == [1], "one at a time"
        slow.go.release()
        await second
        assert kept_steps(tmp_path) == [1], "what was begun before is on disk"
        finished = asyncio.create_task(keeper.finish())
        assert await others_ran(finished), "a checkpoint waits"
        slow.go.release()
        await finished
        assert kept_steps(tmp_path) == [1, 2]
        await keeper.finish()

    asyncio.run(train())
    keeper.close()


def test_a_run_that_ends_waits_for_its_last_trajectories(keeper: Keeper, slow: Slow, tmp_path: Path) -> None:
    """Also one that fails, and whose event loop is gone."""
    asyncio.run(keeper.begin(1, [group(1)], None))
    threading.Timer(0.05, slow.go.release).start()
    keeper.close()
    assert kept_steps(tmp_path) == [1]
    keeper.close()


def test_a_full_disk_costs_one_warning_and_no_run(
    keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def train(steps: Sequence[int]) -> None:
        for step in steps:
            await keeper.begin(step, [group(step)], None)
        await keeper.finish()

    asyncio.run(train([1]))
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        asyncio.run(train([2, 3]))
    asyncio.run(train([4]))
    keeper.close()
    assert kept_steps(tmp_path) == [1]
    assert [path.name for path in (tmp_path / "trajectories").iterdir()] == ["step_000001.jsonl.gz"]
    (record,) = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert record.getMessage() == (
        f"{tmp_path / 'trajectories' / 'step_000002.jsonl.gz'} could not be written (No space left on device): the run "
        "goes on and keeps no more trajectories."
    )


def test_what_else_goes_wrong_is_told(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("a sample without log-probs")

    async def train() -> None:
        await keeper.begin(1, [group(1)], None)
        with pytest.raises(ValueError, match="without log-probs"):
            await keeper.begin(2, [group(2)], None)

    monkeypatch.setattr(module, "write_kept", broken)
    asyncio.run(train())
    keeper.close()
