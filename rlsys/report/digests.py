"""What a page needs of the kept trajectories of each step, added up, and read once: a step's file never changes.

Contract: of a step no more than its digest is held. A file that is another one than before (its steps were done again) is
read again; steps that are gone are forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsys.observe.kept import Kept, kept_file, kept_steps, read_kept_step
from rlsys.observe.run_folder import RunFolder
from rlsys.observe.settings import section
from rlsys.report.drift import DriftTally, tally_step
from rlsys.report.trajectories import Chunks, Index

Stamp = tuple[int, int, int]
"""Inode, bytes and ns of the last change of a file."""


@dataclass(frozen=True, slots=True)
class Digest:
    """Of one step."""

    stamp: Stamp | None
    sampling: Mapping[str, Any]
    """That its drift was told by."""
    index: Index
    drift: DriftTally
    problems: tuple[str, ...]
    """What could not be read."""


class Digests:
    """Those of one run, from one look at it to the next."""

    def __init__(self) -> None:
        self._known: dict[int, Digest] = {}

    def of(self, run: RunFolder, chunks: Chunks | None = None) -> list[Digest]:
        """Those of all steps of `run`, in order; what could not be read is added to its problems.

        `chunks` gets the rows of what is read; with them give a new object, that reads everything.
        """
        sampling = sampling_of(run)
        found: dict[int, Digest] = {}
        for step in kept_steps(run.path):
            stamp, known = _stamp(kept_file(run.path, step)), self._known.get(step)
            if known is None or (known.stamp, known.sampling) != (stamp, sampling):
                known = _read(run.path, step, stamp, sampling, chunks)
            found[step] = known
            run.problems.extend(one for one in known.problems if one not in run.problems)
        self._known = found
        return list(found.values())


def sampling_of(run: RunFolder) -> Mapping[str, Any]:
    """How `run` draws tokens."""
    return section(run.config, "rollout", "sampling")


def _read(path: Path, step: int, stamp: Stamp | None, sampling: Mapping[str, Any], chunks: Chunks | None) -> Digest:
    index, problems = Index(), list[str]()

    def noted(kept: Iterable[Kept]) -> Iterator[Kept]:
        for one in kept:
            index.add(one)
            yield one

    kept = noted(read_kept_step(path, step, problems.append))
    drift = tally_step(step, chunks.passing(kept) if chunks else kept, sampling)
    return Digest(stamp, sampling, index, drift, tuple(problems))


def _stamp(file: Path) -> Stamp | None:
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
