"""Plants faults in rlsys one at a time, and names the first test of the default suite that fails.

    python -m bench.mutants [--only stale-by-one] [--jobs 2]

A mutant of `bench/mutants/<room>.toml` replaces `old` by `new` in `file` in a copy of the project. Its `tests`, without
the slow ones, then run on that copy. A mutant whose tests do not end is caught: its fault hangs them. The command
prints a table, writes outputs/bench/mutants.json, and exits with 1 if a mutant survives or its tests cannot run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

PROJECT = Path(__file__).resolve().parents[2]
RESULT = Path("outputs/bench/mutants.json")
TEST_S, TIMEOUT_S = 60, 300
"""Time limit of one test, with which the table names a test that hangs; time limit of all tests of a mutant."""
HANGS = "the fault hangs the tests"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """A fault and the tests that must catch it."""

    name: str
    rule: str
    """Rule that the fault violates, as a sentence."""
    file: str
    old: str
    """Text that occurs once in `file`."""
    new: str
    tests: tuple[str, ...]
    room: str

    def plant(self, project: Path) -> None:
        """Write the fault into a copy of the project. Raises ValueError unless `old` occurs exactly once."""
        target = project / self.file
        text = target.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: `old` occurs {text.count(self.old)} times in {self.file}.")
        target.write_text(text.replace(self.old, self.new))


@dataclass(frozen=True)
class Verdict:
    """Result of one mutant."""

    room: str
    name: str
    rule: str
    caught_by: str
    """First test that failed, or `HANGS`; empty for a mutant that survived."""
    seconds: float
    error: str = ""
    """Reason that the tests could not run; such a mutant has neither been caught nor survived."""


def mutants() -> list[Mutant]:
    found = []
    for file in sorted(Path(__file__).parent.glob("*.toml")):
        for entry in tomllib.loads(file.read_text())["mutant"]:
            found.append(Mutant(**entry | {"tests": tuple(entry["tests"]), "room": file.stem}))
    return found


def judge(mutant: Mutant) -> Verdict:
    """Run the mutant's tests on a copy of the project with the fault. Raises ValueError as `plant` does."""
    with TemporaryDirectory(prefix="mutant-") as scratch:
        copy = Path(scratch)
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=PROJECT, capture_output=True, text=True, check=True)
        for name in filter(None, listed.stdout.split("\0")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(PROJECT / name, copy / name)
        for name in (".venv", ".git", "data"):
            if (PROJECT / name).exists():
                (copy / name).symlink_to(PROJECT / name)
        mutant.plant(copy)
        begun = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-x", "-m", "not slow", "-p", "no:cacheprovider"]
        command += [f"--timeout={TEST_S}", *mutant.tests]
        caught = error = ""
        try:
            caught = first_failure(command, copy)
        except RuntimeError as problem:
            error = str(problem)
        return Verdict(mutant.room, mutant.name, mutant.rule, caught, round(time.monotonic() - begun, 1), error)


def first_failure(command: Sequence[str], folder: Path, timeout_s: float = TIMEOUT_S) -> str:
    """Return the first test that fails, `HANGS` if they do not end in time, and an empty text if all pass.

    Raises RuntimeError if pytest itself could not run.
    """
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    # What the tests leave behind may hold a pipe open, but not a file.
    with TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=said, stderr=said, start_new_session=True
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return HANGS
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        text = said.read()
    if status == 0:
        return ""
    failed = _FAILED.search(text)
    if status not in (1, 2) or failed is None:
        raise RuntimeError(f"{' '.join(command)} exited with {status}: {text[-2000:]}")
    return failed.group(1)


def main(
    only: Annotated[list[str] | None, typer.Option(help="Mutant or room; repeat for several. Default: all.")] = None,
    jobs: Annotated[int, typer.Option(help="Mutants to test in parallel.", min=1)] = 2,
) -> None:
    """Test the mutants, print a table, write the result file and exit."""
    chosen = [one for one in mutants() if not only or one.name in only or one.room in only]
    console = Console(width=160)
    with ThreadPoolExecutor(jobs) as pool:
        verdicts = []
        for verdict in pool.map(judge, chosen):
            verdicts.append(verdict)
            said = verdict.error or verdict.caught_by or "SURVIVED"
            console.print(f"{verdict.room} {verdict.name}: {said} ({verdict.seconds} s)", markup=False)
    table = Table("room", "mutant", "first test that fails", "s")
    for one in verdicts:
        said = "[red]the tests could not run" if one.error else one.caught_by or "[red]survived"
        table.add_row(one.room, one.name, said, f"{one.seconds:.0f}")
    console.print(table)
    caught = [one.name for one in verdicts if one.caught_by]
    failed = [one.name for one in verdicts if one.error]
    survivors = [one.name for one in verdicts if not (one.caught_by or one.error)]
    found = {"survivors": survivors, "failed": failed, "verdicts": [asdict(one) for one in verdicts]}
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(found, indent=1))
    console.print(f"{len(caught)} of {len(verdicts)} mutants are caught; written to {RESULT}")
    if failed:
        console.print(f"The tests of {len(failed)} mutants could not run: {', '.join(failed)}")
    raise SystemExit(1 if survivors or failed else 0)


if __name__ == "__main__":
    typer.run(main)
