"""Tests of running a conversion: resuming after kills and failures, the journal, destinations, worker processes."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from rlsys.errors import Interrupted, RunError, UserError
from rlsys.weights.convert.conversion import Job, _begin_process, _receipt_of, locked_draft, run
from tests.support.megatron_processes import forks
from tests.support.processes import is_gone
from tests.support.refusals import refused
from tests.support.waiting import wait_until

COUNT = 6


FAILURES = {
    "user": UserError("The source is wrong; give another.", code="malformed", key="the source"),
    "disk": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/some/file"),
    "interrupt": KeyboardInterrupt(),
}


@dataclass(frozen=True)
class FakeConversion:
    """Conversion that fills each file with one byte, and logs each begun file with its process."""

    log: Path
    source: str = "first"
    hold: str = ""
    """Name of a file that is never finished."""
    fail: str = ""
    """Name of a file that fails and kind of its failure, such as `3.bin:user`."""
    crowd: int = 1
    """Number of processes that must have begun before a file is written."""

    def recipe(self) -> Mapping[str, Any]:
        return {"source": self.source, "pair": (1, 2)}

    def jobs(self, _folder: Path) -> Sequence[Job]:
        return [Job(f"{number}.bin", 1000 * (number + 1)) for number in range(COUNT)]

    def write(self, name: str, folder: Path) -> Any:
        with self.log.open("a") as log:
            log.write(f"{name} {os.getpid()}\n")
        wait_until(lambda: len(self.writers()) >= self.crowd)
        failing, _, cause = self.fail.partition(":")
        if name == failing:
            raise FAILURES[cause]
        number = int(name.removesuffix(".bin"))
        partial = folder / f".{name}.{os.getpid()}"
        partial.write_bytes(bytes([number]) * 1000 * (number + 1))
        if name == self.hold:
            signal.pause()
        partial.replace(folder / name)
        return [self.source, name]

    def finish(self, folder: Path, receipts: Mapping[str, Any]) -> Sequence[str]:
        (folder / "receipts.json").write_text(json.dumps(dict(sorted(receipts.items()))))
        return ["A note."]

    def begun(self) -> list[str]:
        return [line.split()[0] for line in self.log.read_text().splitlines()] if self.log.is_file() else []

    def writers(self) -> set[int]:
        return {int(line.split()[1]) for line in self.log.read_text().splitlines()}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def journal(out: Path) -> dict[str, Any]:
    """Files that the journal of the conversion to `out` lists as complete."""
    file = out.with_name(f".{out.name}.partial") / "journal.json"
    return dict(json.loads(file.read_text())["files"]) if file.is_file() else {}


@pytest.fixture
def conversion(tmp_path: Path) -> FakeConversion:
    return FakeConversion(tmp_path / "log")


@pytest.mark.parametrize(("processes", "done"), [(1, 2), pytest.param(2, COUNT - 1, marks=pytest.mark.slow)])
def test_killed_conversion_resumes_with_the_missing_files(processes: int, done: int, tmp_path: Path) -> None:
    """The kill also ends worker processes; the result equals that of an undisturbed conversion in one process."""
    conversion, out = FakeConversion(tmp_path / "log", hold="2.bin", crowd=processes), tmp_path / "out"
    process = forks().Process(target=run, args=(conversion, out, processes))
    process.start()
    try:
        # With two processes, one holds the file that is never finished, and the other writes all other files.
        wait_until(lambda: (len(journal(out)) == done and "2.bin" in conversion.begun()) or not process.is_alive())
    finally:
        process.kill()
        process.join()
    workers, complete = conversion.writers(), set(journal(out))
    assert (len(workers), len(complete)) == (processes, done)
    assert not out.exists()
    wait_until(lambda: all(map(is_gone, workers)))
    conversion.log.unlink()
    again = FakeConversion(conversion.log)
    outcome = run(again, out, 1)
    assert (outcome.files, outcome.kept, outcome.notes) == (COUNT, done, ("A note.",))
    assert outcome.nbytes == sum(1000 * (number + 1) for number in range(COUNT))
    assert {*again.begun()} == {f"{number}.bin" for number in range(COUNT)} - complete
    run(FakeConversion(tmp_path / "log2"), tmp_path / "whole", 1)
    assert contents(out) == contents(tmp_path / "whole"), "the kill must leave no trace"
    assert not (tmp_path / ".out.partial").exists()


def _pause_in_a_process(pipe: Connection) -> None:
    _begin_process(pipe)
    signal.pause()


def test_worker_process_ends_with_its_parent() -> None:
    context = forks()
    there, here = context.Pipe(duplex=False)
    process = context.Process(target=_pause_in_a_process, args=(there,))
    process.start()
    here.close()
    process.join(240)
    assert process.exitcode == 1


@pytest.mark.parametrize(("cause", "kind"), [("user", UserError), ("disk", RunError), ("interrupt", Interrupted)])
def test_failed_conversion_keeps_complete_files(
    cause: str, kind: type[Exception], conversion: FakeConversion, tmp_path: Path
) -> None:
    with pytest.raises(kind) as failure:
        run(FakeConversion(conversion.log, fail=f"3.bin:{cause}"), tmp_path / "out", 1)
    assert ("/some/file" in str(failure.value)) == (cause == "disk")
    assert not (tmp_path / "out").exists()
    conversion.log.unlink()
    outcome = run(conversion, tmp_path / "out", 1)
    assert outcome.kept == COUNT - len(conversion.begun()) > 0


@pytest.mark.parametrize("death", [BrokenProcessPool(), MemoryError()], ids=repr)
def test_dead_worker_process_is_a_run_error_that_mentions_memory(death: Exception) -> None:
    receipt: Future[None] = Future()
    receipt.set_exception(death)
    with pytest.raises(RunError, match="memory"):
        _receipt_of(receipt)


def fail(conversion: FakeConversion, out: Path) -> None:
    """Run a conversion that fails after three of its six files."""
    with refused("malformed", "the source"):
        run(FakeConversion(conversion.log, source=conversion.source, fail="3.bin:user"), out, 1)
    conversion.log.unlink()


def test_other_source_starts_over_with_a_note(conversion: FakeConversion, tmp_path: Path) -> None:
    fail(FakeConversion(conversion.log, source="other"), tmp_path / "out")
    outcome = run(conversion, tmp_path / "out", 1)
    assert (outcome.kept, len(outcome.notes), len(conversion.begun())) == (0, 2, COUNT)
    assert json.loads((tmp_path / "out" / "receipts.json").read_text())["0.bin"] == ["first", "0.bin"]


def test_truncated_file_is_written_again(conversion: FakeConversion, tmp_path: Path) -> None:
    fail(conversion, tmp_path / "out")
    (tmp_path / ".out.partial" / "folder" / "1.bin").write_bytes(b"x")
    assert run(conversion, tmp_path / "out", 1).kept == 2
    assert (tmp_path / "out" / "1.bin").read_bytes() == b"\1" * 2000


def test_damaged_journal_is_refused(conversion: FakeConversion, tmp_path: Path) -> None:
    fail(conversion, tmp_path / "out")
    file = tmp_path / ".out.partial" / "journal.json"
    for damage in ("{", "[]", "[" * 100_000):
        file.write_text(damage)
        with refused("malformed", file):
            run(conversion, tmp_path / "out", 1)


def test_failure_before_the_first_file_leaves_nothing(conversion: FakeConversion, tmp_path: Path) -> None:
    with refused("malformed"):
        run(FakeConversion(conversion.log, fail="0.bin:user"), tmp_path / "out", 1)
    assert {path.name for path in tmp_path.iterdir()} == {"log"}


def test_existing_and_foreign_files_are_neither_overwritten_nor_deleted(
    conversion: FakeConversion, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("out", "dangling"):
        with refused("exists", tmp_path / name):
            run(conversion, tmp_path / name, 1)
    foreign = tmp_path / ".mine.partial"
    for own_file in ("thesis.txt", "folder/thesis.txt"):
        (foreign / own_file).parent.mkdir(parents=True, exist_ok=True)
        (foreign / own_file).write_text("text")
        with refused("exists", foreign):
            run(conversion, tmp_path / "mine", 1)
        assert (foreign / own_file).read_text() == "text"
        (foreign / own_file).unlink()
    assert not conversion.log.exists()


def test_unwritable_destination_and_zero_processes_are_refused(conversion: FakeConversion, tmp_path: Path) -> None:
    with refused("out_of_range", "processes"):
        run(conversion, tmp_path / "out", 0)
    for out in (Path("/proc/out"), tmp_path / ("x" * 300), tmp_path / ("x" * 250)):
        with refused("denied", out):
            run(conversion, out, 1)
    assert not list(tmp_path.iterdir())


def test_second_conversion_to_the_same_destination_is_refused(conversion: FakeConversion, tmp_path: Path) -> None:
    with locked_draft(tmp_path / "out"), refused("in_use", tmp_path / ".out.partial"):
        run(conversion, tmp_path / "out", 1)
    assert run(conversion, tmp_path / "out", 1).files == COUNT
