"""Runs the default suite ten times (network, load, kernels and alignment, order), or the long tests once.

    python -m bench.suite [--only avx2 --only random-1]      # hours on two cores
    python -m bench.suite --only full                        # `make test-full` once: about an hour

Runs under load share the cores with busy processes. After each run, outputs/bench/suite.json is written: seconds, the
machine's load, cases, failures by name, and the peak memory of all tests together. The output of a run is in
suite-<condition>.log beside it. A table is printed at the end; for `full`, also the seconds of each group of tests, as
docs/results/test-full.md shows them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated
from xml.etree import ElementTree

import psutil
import typer
from rich.console import Console
from rich.table import Table

RESULT = Path("outputs/bench/suite.json")
BUSY = 8
OFFLINE = ("unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


@dataclass(frozen=True)
class Condition:
    name: str
    capability: str = ""
    """Value of ATEN_CPU_CAPABILITY, which selects torch's kernels; empty selects the best that the CPU supports."""
    offset: int | None = None
    """Offset, modulo 64, of the weights in the files of the tests' models (see tests/support/tensors.py); None: as usual."""
    offline: bool = False
    """In a network namespace that has the loopback interface alone."""
    busy: int = 0
    """Number of busy processes beside the tests."""
    seed: int | None = None
    """Seed of a random order of the tests and of Hypothesis's examples; None keeps the default order and examples."""
    target: str = "test"
    """Target of the Makefile."""


CONDITIONS = (
    Condition("plain"),
    Condition("offline", offline=True),
    *(Condition(f"load-{number}", busy=BUSY) for number in (1, 2, 3)),
    *(Condition(name, capability=name, offset=at) for name, at in {"default": 4, "avx2": 8, "avx512": 40}.items()),
    *(Condition(f"random-{seed}", seed=seed) for seed in (1, 2)),
)
FULL = Condition("full", target="test-full")
"""Not in the series of ten."""
LONG_S = 60.0
"""Seconds from which a file has a row of its own in the table of groups."""


@dataclass(frozen=True)
class Outcome:
    """Metrics of one run of the suite."""

    condition: str
    seconds: float
    load: float
    """Mean of the machine's load average over one minute."""
    passed: int
    skipped: int
    failed: tuple[str, ...]
    peak_gib: float
    """Peak proportional set size of all processes of the tests."""


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep `count` processes computing."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


class Meter:
    """Samples the load, and the memory of a process with its descendants: every two seconds, in at most 2% of the time."""

    def __init__(self, root: int) -> None:
        self.peak_bytes, self.loads = 0, [os.getloadavg()[0]]
        self._root, self._over = psutil.Process(root), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        pause_s = 2.0
        while not self._over.wait(pause_s):
            used, begun = 0, time.thread_time()
            with suppress(psutil.Error):
                for process in [self._root, *self._root.children(recursive=True)]:
                    with suppress(psutil.Error):
                        used += process.memory_full_info().pss
            self.peak_bytes = max(self.peak_bytes, used)
            self.loads.append(os.getloadavg()[0])
            pause_s = max(2.0, 50 * (time.thread_time() - begun))  # A process takes 14 ms for each GiB.


def file_of(condition: Condition, suffix: str) -> Path:
    return RESULT.with_name(f"suite-{condition.name}.{suffix}").resolve()


def cases_of(condition: Condition) -> list[ElementTree.Element]:
    """Cases of the last run under `condition`."""
    return list(ElementTree.parse(file_of(condition, "xml")).getroot().iter("testcase"))


def groups(cases: Iterable[tuple[str, float]]) -> list[tuple[str, int, float]]:
    """(group, cases, seconds), longest first, of cases given as (module, seconds).

    A group is a file that takes at least `LONG_S`, or all other files of a folder of tests/.
    """
    files, found = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for module, seconds in cases:
        files[module.replace(".", "/")].append(seconds)
    for file, times in files.items():
        found[f"{file}.py" if sum(times) >= LONG_S else "/".join(file.split("/")[:-1][:2])] += times
    return sorted(((name, len(times), sum(times)) for name, times in found.items()), key=lambda row: -row[2])


def run(condition: Condition) -> Outcome:
    """Run the condition's target of the Makefile; `test` includes lint and types."""
    draws = f"--hypothesis-profile=random --hypothesis-seed={condition.seed} --order-seed={condition.seed}"
    environment = dict(os.environ)
    if condition.capability:
        environment["ATEN_CPU_CAPABILITY"] = condition.capability
    if condition.offset is not None:
        environment["RLSYS_TEST_WEIGHTS_OFFSET"] = str(condition.offset)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    file_of(condition, "xml").unlink(missing_ok=True)
    with file_of(condition, "log").open("w") as output, busy_processes(condition.busy):
        begun = time.monotonic()
        arguments = f"--junitxml={file_of(condition, 'xml')} {'' if condition.seed is None else draws}"
        command = [*(OFFLINE if condition.offline else ()), "make", condition.target, f"ARGS={arguments}"]
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        meter = Meter(process.pid)
        process.wait()
        meter.close()
        seconds = time.monotonic() - begun
    if not file_of(condition, "xml").is_file():
        raise SystemExit(f"{condition.name}: no test was run; see {file_of(condition, 'log')}.")
    cases = cases_of(condition)
    failed = [one for one in cases if one.find("failure") is not None or one.find("error") is not None]
    skipped = [one for one in cases if one.find("skipped") is not None]
    names = tuple(f"{one.get('classname')}::{one.get('name')}" for one in failed)
    passed = len(cases) - len(failed) - len(skipped)
    load, peak_gib = round(fmean(meter.loads), 1), round(meter.peak_bytes / 2**30, 1)
    return Outcome(condition.name, round(seconds), load, passed, len(skipped), names, peak_gib)


def main(
    only: Annotated[list[str] | None, typer.Option(help="Condition; repeat for several. Default: all.")] = None,
    busy: Annotated[int, typer.Option(min=1, help="Busy processes beside the runs under load.")] = BUSY,
) -> None:
    """Run the suite under each condition, print the results and write the result file."""
    console, outcomes = Console(width=140), []
    table = Table("condition", "s", "load", "passed", "skipped", "failed", "GiB")
    for condition in (*CONDITIONS, FULL) if only else CONDITIONS:
        if only and condition.name not in only:
            continue
        outcome = run(replace(condition, busy=busy) if condition.busy else condition)
        outcomes.append(outcome)
        table.add_row(
            outcome.condition,
            f"{outcome.seconds:.0f}",
            f"{outcome.load}",
            *(str(outcome.passed), str(outcome.skipped), "\n".join(outcome.failed) or "0", f"{outcome.peak_gib}"),
        )
        RESULT.write_text(json.dumps([asdict(one) for one in outcomes], indent=1))
        console.print(outcome)
    console.print(table)
    if only and FULL.name in only:
        times = [(case.get("classname", ""), float(case.get("time", 0))) for case in cases_of(FULL)]
        print("\n".join(f"| {name} | {count} | {seconds:.0f} |" for name, count, seconds in groups(times)))
    raise SystemExit(any(one.failed for one in outcomes))


if __name__ == "__main__":
    typer.run(main)
