"""Trajectories are written beside the training, a step at a time, and a full disk ends nothing."""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from rlsys.observe import kept as module
from rlsys.observe.kept import Keeper, Kept, kept_steps, write_kept
from tests.observe.test_kept import group


class Slow:
    """Writes when it is allowed to."""

    def __init__(self) -> None:
        self.go, self.begun = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, run_dir: Path, step: int, kept: Iterable[Kept]) -> None:
        self.begun.release()
        assert self.go.acquire(timeout=60)
        write_kept(run_dir, step, kept)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    writes = Slow()
    monkeypatch.setattr(module, "write_kept", writes)
    yield writes
    writes.go.release(9)


@pytest.fixture
def keeper(tmp_path: Path) -> Keeper:
    return Keeper(tmp_path, lambda ids: str(list(ids)))


async def still_waits(waiting: asyncio.Task[None]) -> bool:
    """Whether `waiting` still waits, having had every chance to go on."""
    for _ in range(100):
        await asyncio.sleep(0)
    return not waiting.done()


async def test_training_goes_on_and_the_next_step_waits_its_turn(keeper: Keeper, slow: Slow, tmp_path: Path) -> None:
    await keeper.begin(1, [group(1)], None)  # Returns although nothing may be written yet.
    assert await asyncio.to_thread(slow.begun.acquire, timeout=60)
    second = asyncio.create_task(keeper.begin(2, [group(2)], None))
    assert await still_waits(second)
    slow.go.release()
    await second
    assert kept_steps(tmp_path) == [1], "what was begun before is on disk"
    finished = asyncio.create_task(keeper.finish())
    assert await still_waits(finished), "a checkpoint waits"
    slow.go.release()
    await finished
    assert kept_steps(tmp_path) == [1, 2]
    keeper.close()


def test_a_run_that_ends_waits_for_its_last_trajectories(keeper: Keeper, slow: Slow, tmp_path: Path) -> None:
    """Also one that fails, and whose event loop is gone."""
    asyncio.run(keeper.begin(1, [group(1)], None))
    closing = threading.Thread(target=keeper.close)
    closing.start()
    assert slow.begun.acquire(timeout=60)
    assert kept_steps(tmp_path) == []
    slow.go.release()
    closing.join(60)
    assert kept_steps(tmp_path) == [1]


async def test_a_full_disk_costs_one_warning_and_no_run(
    keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def train(*steps: int) -> None:
        for step in steps:
            await keeper.begin(step, [group(step)], None)
        await keeper.finish()

    await train(1)
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        await train(2, 3)
    await train(4)
    keeper.close()
    assert [path.name for path in (tmp_path / "trajectories").iterdir()] == ["step_000001.jsonl.gz"]
    (record,) = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert str(tmp_path / "trajectories" / "step_000002.jsonl.gz") in record.getMessage()


async def test_other_errors_end_the_run(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("a sample without log-probs")

    monkeypatch.setattr(module, "write_kept", broken)
    await keeper.begin(1, [group(1)], None)
    with pytest.raises(ValueError, match="without log-probs"):
        await keeper.begin(2, [group(2)], None)
    keeper.close()
