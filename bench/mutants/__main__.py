"""Plants faults in rlsys one at a time, and names the first test of the default suite that fails.

    python -m bench.mutants [--only stale-by-one] [--jobs 2]

A mutant of `bench/mutants/<room>.toml` replaces `old` by `new` in `file` in a copy of the project. Its `tests`, without
the slow ones, then run on that copy. The command prints a table, writes outputs/bench/mutants.json, and exits with 1 if
a mutant survives.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

PROJECT = Path(__file__).resolve().parents[2]
RESULT = Path("outputs/bench/mutants.json")
TEST_S, TIMEOUT_S = 60, 300
"""Time limit of one test, with which the table names a test that hangs; time limit of all tests of a mutant."""
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
    """First test that failed; empty for a mutant that survived."""
    seconds: float


def mutants() -> list[Mutant]:
    """Return all mutants, room by room."""
    found = []
    for file in sorted(Path(__file__).parent.glob("*.toml")):
        for entry in tomllib.loads(file.read_text())["mutant"]:
            found.append(Mutant(**entry | {"tests": tuple(entry["tests"]), "room": file.stem}))
    return found


def judge(mutant: Mutant) -> Verdict:
    """Run the mutant's tests on a copy of the project with the fault."""
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
        caught = first_failure(command, copy)
        return Verdict(mutant.room, mutant.name, mutant.rule, caught, round(time.monotonic() - begun, 1))


def first_failure(command: Sequence[str], folder: Path) -> str:
    """Return the first test that fails; empty if all pass. Raises RuntimeError if pytest itself could not run."""
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{' '.join(command)} did not end within {TIMEOUT_S} s.") from error
    if done.returncode == 0:
        return ""
    failed = _FAILED.search(done.stdout)
    if done.returncode not in (1, 2) or failed is None:
        raise RuntimeError(
            f"{' '.join(command)} exited with {done.returncode}: {done.stdout[-1000:]}{done.stderr[-1000:]}"
        )
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
            console.print(f"{verdict.room} {verdict.name}: {verdict.caught_by or 'SURVIVED'} ({verdict.seconds} s)")
    table = Table("room", "mutant", "first test that fails", "s")
    for one in verdicts:
        table.add_row(one.room, one.name, one.caught_by or "[red]survived", f"{one.seconds:.0f}")
    console.print(table)
    survivors = [one.name for one in verdicts if not one.caught_by]
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps({"survivors": survivors, "verdicts": [asdict(one) for one in verdicts]}, indent=1))
    console.print(f"{len(verdicts) - len(survivors)} of {len(verdicts)} mutants are caught; written to {RESULT}")
    raise SystemExit(1 if survivors else 0)


if __name__ == "__main__":
    typer.run(main)
