"""A conversion that is killed goes on where it stopped; files are the same whoever writes them."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlsys.errors import Interrupted, RunError, UserError
from rlsys.weights.convert.conversion import Job, run

COUNT = 6


@dataclass(frozen=True)
class Letters:
    """Writes files of a letter each, and notes by whom and how often each was begun."""

    log: Path
    source: str = "first"
    hold: str = ""
    """File at which to wait for ever, half-way."""
    fail: str = ""
    """File at which to fail, and how: `name:user`, `name:disk`, `name:death`, `name:memory` or `name:interrupt`."""
    count: int = COUNT
    crowd: int = 1
    """Processes that must have begun before a file is written."""

    def recipe(self) -> Mapping[str, Any]:
        return {"source": self.source, "pair": (1, 2)}

    def jobs(self, _folder: Path) -> Sequence[Job]:
        return [Job(f"{number}.bin", 1000 * (number + 1)) for number in range(self.count)]

    def write(self, name: str, folder: Path) -> Any:
        with self.log.open("a") as log:
            log.write(f"{name} {os.getpid()}\n")
        while len({line.split()[1] for line in self.log.read_text().splitlines()}) < self.crowd:
            time.sleep(0.01)
        failing, _, how = self.fail.partition(":")
        if name == failing:
            self._fail(how)
        number = int(name.removesuffix(".bin"))
        partial = folder / f".{name}.{os.getpid()}"
        partial.write_bytes(bytes([number]) * 1000 * (number + 1))
        if name == self.hold:
            time.sleep(600)
        partial.replace(folder / name)
        return [self.source, name]

    def finish(self, folder: Path, receipts: Mapping[str, Any]) -> Sequence[str]:
        (folder / "receipts.json").write_text(json.dumps(dict(sorted(receipts.items()))))
        return ["A note."]

    def _fail(self, how: str) -> None:
        if how == "user":
            raise UserError("The source is wrong; give another.")
        if how == "disk":
            raise OSError(28, "No space left on device", "/some/file")
        if how == "interrupt":
            raise KeyboardInterrupt
        if how == "memory":
            raise MemoryError
        os._exit(1)


def begun(conversion: Letters) -> list[str]:
    return [line.split()[0] for line in conversion.log.read_text().splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def letters(tmp_path: Path) -> Letters:
    return Letters(tmp_path / "log")


def test_files_do_not_depend_on_processes(tmp_path: Path) -> None:
    made = []
    for processes in (1, 2):
        letters = Letters(tmp_path / f"log{processes}", crowd=processes)
        out = tmp_path / f"out{processes}"
        outcome = run(letters, out, processes)
        assert (outcome.files, outcome.kept, outcome.notes) == (COUNT, 0, ("A note.",))
        assert outcome.nbytes == sum(1000 * (number + 1) for number in range(COUNT))
        writers = {line.split()[1] for line in letters.log.read_text().splitlines()}
        assert (str(os.getpid()) in writers) == (processes == 1)
        assert len(writers) == processes
        made.append(contents(out))
    assert made[0] == made[1]
    assert {path.name for path in tmp_path.iterdir()} == {"log1", "log2", "out1", "out2"}


def start(letters: Letters, out: Path, processes: int) -> subprocess.Popen[bytes]:
    """The conversion in a process that can be killed."""
    code = (
        "import sys; from pathlib import Path; from tests.weights.convert.test_engine import Letters, run\n"
        f"if __name__ == '__main__': run({letters!r}, Path({str(out)!r}), {processes})"
    ).replace("PosixPath", "Path")
    script = out.with_suffix(".py")
    script.write_text(code)
    return subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": os.getcwd()})


def kill_at(letters: Letters, out: Path, processes: int) -> None:
    """Run until it waits in the file `hold`, with all others written that one process can write; then SIGKILL."""
    process = start(letters, out, processes)
    folder = out.with_name(f".{out.name}.partial") / "folder"
    half = f".{letters.hold}.*"
    try:
        for _ in range(600):
            others = len(list(folder.glob("[0-9].bin"))) if folder.is_dir() else 0
            if list(folder.glob(half)) and others >= (COUNT - 1 if processes > 1 else 1):
                break
            assert process.poll() is None
            time.sleep(0.05)
        else:
            pytest.fail("it never came so far")
        time.sleep(0.2)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_conversion_goes_on_with_what_is_missing(processes: int, tmp_path: Path) -> None:
    letters, out = Letters(tmp_path / "log", hold="2.bin"), tmp_path / "out"
    kill_at(letters, out, processes)
    assert not out.exists()
    journal = json.loads((tmp_path / ".out.partial" / "journal.json").read_text())
    complete = set(journal["files"])
    assert complete
    assert "2.bin" not in complete
    letters.log.unlink()

    again = Letters(letters.log)
    outcome = run(again, out, 1)
    assert outcome.kept == len(complete)
    assert set(begun(again)) == {f"{number}.bin" for number in range(COUNT)} - complete
    run(Letters(tmp_path / "log2"), tmp_path / "whole", 1)
    assert contents(out) == contents(tmp_path / "whole"), "no trace of the kill"
    assert not (tmp_path / ".out.partial").exists()


def test_no_process_outlives_the_one_that_started_it(tmp_path: Path) -> None:
    letters = Letters(tmp_path / "log", hold="2.bin")
    kill_at(letters, tmp_path / "out", 2)
    workers = {int(line.split()[1]) for line in letters.log.read_text().splitlines()}
    assert len(workers) == 2
    for _ in range(200):
        if not any(alive(worker) for worker in workers):
            return
        time.sleep(0.05)
    pytest.fail("a worker is left")


def alive(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("how", "kind", "sentence"),
    [
        ("user", UserError, "The source is wrong; give another."),
        (
            "disk",
            RunError,
            "/some/file cannot be read or written (No space left on device); the same command goes on",
        ),
    ],
)
def test_a_failure_is_a_sentence_and_keeps_what_is_complete(
    processes: int, how: str, kind: type[Exception], sentence: str, letters: Letters, tmp_path: Path
) -> None:
    failing = Letters(letters.log, fail=f"3.bin:{how}")
    with pytest.raises(kind) as error:
        run(failing, tmp_path / "out", processes)
    assert str(error.value).startswith(sentence)
    assert not (tmp_path / "out").exists()
    letters.log.unlink()
    outcome = run(letters, tmp_path / "out", 1)
    assert outcome.kept == COUNT - len(begun(letters)) > 0


@pytest.mark.parametrize("how", ["death", "memory"])
def test_a_process_that_dies_is_a_sentence(how: str, letters: Letters, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"was ended .* fewer processes.* goes on where"):
        run(Letters(letters.log, fail=f"3.bin:{how}"), tmp_path / "out", 2)


def test_an_interrupt_says_how_to_go_on(letters: Letters, tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match="the same command goes on"):
        run(Letters(letters.log, fail="3.bin:interrupt"), tmp_path / "out", 1)
    letters.log.unlink()
    assert run(letters, tmp_path / "out", 1).kept == 3


def test_another_source_starts_over_and_says_so(letters: Letters, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        run(Letters(letters.log, source="other", fail="3.bin:user", count=9), tmp_path / "out", 1)
    letters.log.unlink()
    outcome = run(letters, tmp_path / "out", 1)
    assert outcome.kept == 0
    assert "thrown away" in outcome.notes[0]
    assert len(begun(letters)) == COUNT
    assert json.loads((tmp_path / "out" / "receipts.json").read_text())["0.bin"] == ["first", "0.bin"]


def test_a_complete_file_that_was_cut_short_since_is_written_again(letters: Letters, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        run(Letters(letters.log, fail="3.bin:user"), tmp_path / "out", 1)
    (tmp_path / ".out.partial" / "folder" / "1.bin").write_bytes(b"x")
    letters.log.unlink()
    assert run(letters, tmp_path / "out", 1).kept == 2
    assert (tmp_path / "out" / "1.bin").read_bytes() == b"\1" * 2000


def test_a_failure_before_the_first_file_leaves_nothing(letters: Letters, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        run(Letters(letters.log, fail="0.bin:user"), tmp_path / "out", 1)
    assert {path.name for path in tmp_path.iterdir()} == {"log"}


def test_nothing_is_overwritten_or_deleted_that_it_did_not_make(letters: Letters, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="exists already"):
        run(letters, tmp_path / "out", 1)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="exists already"):
        run(letters, tmp_path / "dangling", 1)
    foreign = tmp_path / ".mine.partial"
    for precious in ("thesis.txt", "folder/thesis.txt"):
        (foreign / precious).parent.mkdir(parents=True, exist_ok=True)
        (foreign / precious).write_text("years of work")
        with pytest.raises(UserError, match="was not made by a conversion"):
            run(letters, tmp_path / "mine", 1)
        assert (foreign / precious).read_text() == "years of work"
        (foreign / precious).unlink()
    assert not letters.log.exists()


def test_a_place_where_nothing_can_be_is_one_sentence(
    letters: Letters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for out in (Path("/proc/out"), tmp_path / ("x" * 300), tmp_path / ("x" * 250)):
        with pytest.raises(UserError, match=f"Nothing can be written to {out}"):
            run(letters, out, 1)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UserError, match="Nothing can be written to out"):
        run(letters, Path("out"), 1)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_from_the_start_is_one_sentence_and_leaves_nothing(
    letters: Letters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, _text: str) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(RunError, match=r"out cannot be read or written \(No space left on device\)"):
            run(letters, tmp_path / "out", 1)
    assert not list(tmp_path.iterdir())
    assert run(letters, tmp_path / "out", 1).kept == 0


def test_one_process_converts_to_one_place(tmp_path: Path) -> None:
    letters, out = Letters(tmp_path / "log", hold="0.bin"), tmp_path / "out"
    process = start(letters, out, 1)
    try:
        while not letters.log.exists():
            assert process.poll() is None
            time.sleep(0.05)
        with pytest.raises(UserError, match="Another process converts"):
            run(Letters(tmp_path / "log2"), out, 1)
    finally:
        process.kill()
        process.wait()


def test_progress_begins_with_what_was_there_and_ends_with_all(letters: Letters, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        run(Letters(letters.log, fail="3.bin:user"), tmp_path / "out", 1)
    seen: list[tuple[int, int]] = []
    outcome = run(letters, tmp_path / "out", 1, lambda done, total: seen.append((done, total)))
    assert {total for _, total in seen} == {outcome.nbytes}
    assert seen[0][0] >= 6000
    assert outcome.nbytes in {done for done, _ in seen}


@pytest.mark.parametrize("processes", [0, -1])
def test_no_processes_are_refused(processes: int, letters: Letters, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"processes is {processes}"):
        run(letters, tmp_path / "out", processes)
