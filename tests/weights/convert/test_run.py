"""A conversion that is killed goes on where it stopped; files are the same whoever writes them."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
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
from tests.support.refusals import refused

COUNT = 6


FAILURES = {
    "user": UserError("The source is wrong; give another.", code="malformed", key="the source"),
    "disk": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/some/file"),
    "interrupt": KeyboardInterrupt(),
}


@dataclass(frozen=True)
class Letters:
    """Writes files of a letter each, and notes by whom and how often each was begun."""

    log: Path
    source: str = "first"
    hold: str = ""
    """File at which to wait for ever, half-way."""
    fail: str = ""
    """File at which to fail, and how: `name:user`, say."""
    crowd: int = 1
    """Processes that must have begun before a file is written."""

    def recipe(self) -> Mapping[str, Any]:
        return {"source": self.source, "pair": (1, 2)}

    def jobs(self, _folder: Path) -> Sequence[Job]:
        return [Job(f"{number}.bin", 1000 * (number + 1)) for number in range(COUNT)]

    def write(self, name: str, folder: Path) -> Any:
        with self.log.open("a") as log:
            log.write(f"{name} {os.getpid()}\n")
        until(lambda: len(self.writers()) >= self.crowd)
        failing, _, how = self.fail.partition(":")
        if name == failing:
            raise FAILURES[how]
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


def until(holds: Callable[[], object]) -> None:
    """Wait for it; how long that takes tells how busy the machine is."""
    end = time.monotonic() + 240
    while not holds():
        assert time.monotonic() < end, "it never came so far"
        time.sleep(0.02)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def journal(out: Path) -> dict[str, Any]:
    """The files that are complete beside `out`."""
    file = out.with_name(f".{out.name}.partial") / "journal.json"
    return dict(json.loads(file.read_text())["files"]) if file.is_file() else {}


@pytest.fixture
def letters(tmp_path: Path) -> Letters:
    return Letters(tmp_path / "log")


@pytest.mark.parametrize(("processes", "done"), [(1, 2), pytest.param(2, COUNT - 1, marks=pytest.mark.slow)])
def test_a_conversion_that_is_killed_goes_on_with_what_is_missing(processes: int, done: int, tmp_path: Path) -> None:
    """Its processes end with it; the result is the one that one process writes at once."""
    letters, out = Letters(tmp_path / "log", hold="2.bin", crowd=processes), tmp_path / "out"
    process = forks().Process(target=run, args=(letters, out, processes))
    process.start()
    try:
        # Of two processes, the one that does not wait at the one file writes all others.
        until(lambda: (len(journal(out)) == done and "2.bin" in letters.begun()) or not process.is_alive())
    finally:
        process.kill()
        process.join()
    workers, complete = letters.writers(), set(journal(out))
    assert (len(workers), len(complete)) == (processes, done)
    assert not out.exists()
    until(lambda: not any(alive(worker) for worker in workers))
    letters.log.unlink()
    again = Letters(letters.log)
    outcome = run(again, out, 1)
    assert (outcome.files, outcome.kept, outcome.notes) == (COUNT, done, ("A note.",))
    assert outcome.nbytes == sum(1000 * (number + 1) for number in range(COUNT))
    assert {*again.begun()} == {f"{number}.bin" for number in range(COUNT)} - complete
    run(Letters(tmp_path / "log2"), tmp_path / "whole", 1)
    assert contents(out) == contents(tmp_path / "whole"), "no trace of the kill"
    assert not (tmp_path / ".out.partial").exists()


def _pause_in_a_process(pipe: Connection) -> None:
    _begin_process(pipe)
    signal.pause()


def test_a_process_of_a_conversion_ends_with_the_one_that_started_it() -> None:
    context = forks()
    there, here = context.Pipe(duplex=False)
    process = context.Process(target=_pause_in_a_process, args=(there,))
    process.start()
    here.close()
    process.join(240)
    assert process.exitcode == 1


def alive(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("processes", "how", "kind"),
    [
        (1, "user", UserError),
        (1, "disk", RunError),
        (1, "interrupt", Interrupted),
        pytest.param(2, "user", UserError, marks=pytest.mark.slow),
    ],
)
def test_a_failure_keeps_what_is_complete(
    processes: int, how: str, kind: type[Exception], letters: Letters, tmp_path: Path
) -> None:
    with pytest.raises(kind) as failure:
        run(Letters(letters.log, fail=f"3.bin:{how}"), tmp_path / "out", processes)
    assert ("/some/file" in str(failure.value)) == (how == "disk")
    assert not (tmp_path / "out").exists()
    letters.log.unlink()
    outcome = run(letters, tmp_path / "out", 1)
    assert outcome.kept == COUNT - len(letters.begun()) > 0


@pytest.mark.parametrize("death", [BrokenProcessPool(), MemoryError()], ids=repr)
def test_a_process_that_dies_is_a_failure_of_the_run(death: Exception) -> None:
    receipt: Future[None] = Future()
    receipt.set_exception(death)
    with pytest.raises(RunError, match="memory"):
        _receipt_of(receipt)


def fail(letters: Letters, out: Path) -> None:
    """Begin a conversion that has three files of six complete."""
    with refused("malformed", "the source"):
        run(Letters(letters.log, source=letters.source, fail="3.bin:user"), out, 1)
    letters.log.unlink()


def test_another_source_starts_over_and_says_so(letters: Letters, tmp_path: Path) -> None:
    fail(Letters(letters.log, source="other"), tmp_path / "out")
    outcome = run(letters, tmp_path / "out", 1)
    assert (outcome.kept, len(outcome.notes), len(letters.begun())) == (0, 2, COUNT)
    assert json.loads((tmp_path / "out" / "receipts.json").read_text())["0.bin"] == ["first", "0.bin"]


def test_a_complete_file_that_was_cut_short_since_is_written_again(letters: Letters, tmp_path: Path) -> None:
    fail(letters, tmp_path / "out")
    (tmp_path / ".out.partial" / "folder" / "1.bin").write_bytes(b"x")
    assert run(letters, tmp_path / "out", 1).kept == 2
    assert (tmp_path / "out" / "1.bin").read_bytes() == b"\1" * 2000


def test_a_damaged_journal_is_named(letters: Letters, tmp_path: Path) -> None:
    fail(letters, tmp_path / "out")
    file = tmp_path / ".out.partial" / "journal.json"
    for damage in ("{", "[]", "[" * 100_000):
        file.write_text(damage)
        with refused("malformed", file):
            run(letters, tmp_path / "out", 1)


def test_a_failure_before_the_first_file_leaves_nothing(letters: Letters, tmp_path: Path) -> None:
    with refused("malformed"):
        run(Letters(letters.log, fail="0.bin:user"), tmp_path / "out", 1)
    assert {path.name for path in tmp_path.iterdir()} == {"log"}


def test_nothing_is_overwritten_or_deleted_that_it_did_not_make(letters: Letters, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("out", "dangling"):
        with refused("exists", tmp_path / name):
            run(letters, tmp_path / name, 1)
    foreign = tmp_path / ".mine.partial"
    for precious in ("thesis.txt", "folder/thesis.txt"):
        (foreign / precious).parent.mkdir(parents=True, exist_ok=True)
        (foreign / precious).write_text("years of work")
        with refused("exists", foreign):
            run(letters, tmp_path / "mine", 1)
        assert (foreign / precious).read_text() == "years of work"
        (foreign / precious).unlink()
    assert not letters.log.exists()


def test_a_place_where_nothing_can_be_is_refused_and_nobody_to_write(letters: Letters, tmp_path: Path) -> None:
    with refused("out_of_range", "processes"):
        run(letters, tmp_path / "out", 0)
    for out in (Path("/proc/out"), tmp_path / ("x" * 300), tmp_path / ("x" * 250)):
        with refused("denied", out):
            run(letters, out, 1)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_from_the_start_leaves_nothing(
    letters: Letters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, _text: str) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(RunError, match="out"):
            run(letters, tmp_path / "out", 1)
    assert not list(tmp_path.iterdir())
    assert run(letters, tmp_path / "out", 1).kept == 0


def test_one_process_converts_to_one_place(letters: Letters, tmp_path: Path) -> None:
    with locked_draft(tmp_path / "out"), refused("in_use", tmp_path / ".out.partial"):
        run(letters, tmp_path / "out", 1)
    assert run(letters, tmp_path / "out", 1).files == COUNT
