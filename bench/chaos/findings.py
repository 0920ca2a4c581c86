"""Judges runs with faults from what they left behind: outcome, lost prompts, quality, and figures of a campaign. Pure."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.chaos.faults import PARTS, Fault, Kind
from rlsys.data.prompt_source import SourceState
from rlsys.errors import without_code
from rlsys.observe.status import FAILED

RECOVERED, ENDED, UNCLEAR, HUNG = "recovered", "ended", "unclear", "hung"
MAX_LOSSES = 3
"""Times that a prompt may be lost before the run gives it up; see `rlsys.orchestrator.pipeline.rollout_pipeline`."""
_TRACE = re.compile(r"^(Traceback \(most|  \+ Exception Group Traceback)", re.MULTILINE)
_LOGGED = re.compile(r"^\d{4}-\d\d-\d\d .* rlsys|^step \d+/")
_TEMPORARY = re.compile(r"\.(part|partial|deleted|replaced|tmp)$")


@dataclass(slots=True)
class Row:
    """Effect of one fault."""

    fault: Fault
    outcome: str = HUNG
    seconds: float | None = None
    """Until the run worked again, or had ended; None if it did neither in time."""
    resumed: bool | None = None
    """For a fault that ended the run: whether the next launch went on from its last checkpoint, or began again."""
    sentence: str = ""
    """Last words of a run that ended."""
    commit: str = ""
    """Commit on which it struck, with + if files differed from it."""
    during: str = ""
    """Activities of the run at the moment of the fault."""
    began: float = 0.0
    """Time of the fault, on the monotonic clock."""
    left_over: list[str] = field(default_factory=list)
    """Processes and files that outlived the launch, if this was its last fault."""

    def as_dict(self, seed: int) -> dict[str, Any]:
        """Return the row as it is written to the result file."""
        known = asdict(self) | asdict(self.fault)
        del known["fault"], known["seed"], known["began"]
        return known | {"repeat": repeat(seed, self.fault.number)}


def still_open(rows: Iterable[Mapping[str, Any]]) -> int:
    """Return the number of faults that have begun and are not over, from the rows of a run's faults.jsonl.

    Each driver numbers its faults from 1. Those of one that died have no end, and ended with it.
    """
    found = set[int]()
    for row in rows:
        if row["event"] != "began":
            found.discard(row.get("fault", 0))
        elif row["fault"] == 1:
            found = {1}
        else:
            found.add(row["fault"])
    return len(found)


def is_wrong(row: Mapping[str, Any]) -> bool:
    """Return True if the row of a fault is not as it must be."""
    return row["outcome"] not in (RECOVERED, ENDED) or bool(row["left_over"])


def continued(found: Mapping[str, Any], commit: str, questions: int) -> dict[str, Any]:
    """Return the result file `found` with what still counts on `commit`. Its exact matches are over `questions` answers.

    What was as it must be counts, whatever it ran on, if its run was complete and judged. The rest counts on its own commit
    only, and so do all faults of a complete run that lost or left something, or whose exact match is outside of noise.
    """
    without = found["em_without_faults"]
    ends = [
        end
        for end in found["ends"]
        if end["commit"] == commit or not (end["lost"] or end["left_over"] or outside_noise(end, without, questions))
    ]
    judged = {number for end in ends for number in end["faults"]}
    rows = [row for row in found["rows"] if (row["commit"] == commit if is_wrong(row) else row["number"] in judged)]
    return {**found, "rows": rows, "ends": ends}


def repeat(seed: int, number: int) -> str:
    """Return the command that repeats one fault."""
    return f"python -m bench.chaos --seed {seed} --first {number} --kills 1 --again"


def verdict(fault: Fault, code: int, printed: str, ended: str | None, before: Iterable[Fault] = ()) -> tuple[str, str]:
    """Return the outcome of a fault after which the driver exited with `code`, and its sentence.

    `printed`: stderr of the driver. `ended`: how the run ended according to its status.json, None if it does not say.
    `before`: faults of the same launch before this one. An ending is `ENDED` if it is one sentence that names the part,
    without a traceback of the driver. If Ray's head has been stopped before, it may name that: the run ends only half a
    minute later, or when it needs the head.
    """
    lines = [line for line in printed.splitlines() if line.strip() and not _LOGGED.match(line)]
    if fault.process == "driver" and code < 0:
        return ENDED, f"The driver was killed by signal {-code}."
    last = "" if ended is None else ended.removeprefix(FAILED)
    sentence = last or without_code(lines[-1])[0] if last or lines else ""
    sentence = sentence.partition(" The last lines of")[0]
    if code not in (1, 2) or _TRACE.search(printed):
        return UNCLEAR, f"status {code}: {_traced(lines) or sentence}"
    stopped = any((one.process, one.kind) == ("gcs", Kind.stop) for one in before)
    named = re.search(PARTS[fault.process], sentence) or (stopped and "gcs_server" in sentence)
    return (ENDED if named else UNCLEAR), sentence


def _traced(lines: Sequence[str]) -> str:
    """Return the last line of a traceback of the driver: the error; empty if there is none."""
    return lines[-1].strip() if _TRACE.search("\n".join(lines)) else ""


def lost(folder: Path, uids: Sequence[str], seed: int, state: SourceState, steps: int, trained: int) -> list[str]:
    """Return what a complete run lost or did twice: one sentence each.

    `uids` are the questions of the training file in its order, which `seed` shuffles; `state` is the state of the prompt
    source in the last checkpoint; `trained` is the number of prompt groups of a step.
    """
    rows = _rows(folder / "prompts.jsonl")
    problems = []
    groups = Counter(row["group"] for row in rows)
    problems += [f"prompt group {number} ended {times} times" for number, times in groups.items() if times > 1]
    problems += [
        f"prompt group {number} has no end" for number in range(max(groups, default=-1) + 1) if number not in groups
    ]
    ends: dict[str, list[str]] = {}
    for row in rows:
        ends.setdefault(row["uid"], []).append(row["end"])
    order = list(range(len(uids)))
    random.Random(f"{seed}:0").shuffle(order)
    handed_out = {uids[index] for index in order[: state.position]}
    waiting = {question.uid for question in state.given_back}
    problems += [f"prompt {uid} was handed out and has no end" for uid in sorted(handed_out - ends.keys() - waiting)]
    problems += [f"prompt {uid} was not handed out" for uid in sorted(ends.keys() - handed_out)]
    problems += [f"prompt {uid} was trained twice" for uid, found in ends.items() if found.count("trained") > 1]
    problems += [
        f"prompt {uid} was lost and not tried again"
        for uid, found in ends.items()
        if {*found} == {"lost"} and len(found) < MAX_LOSSES and uid not in waiting
    ]
    per_step = Counter(row["step"] for row in rows if row["end"] == "trained")
    if per_step != dict.fromkeys(range(1, steps + 1), trained):
        problems.append(f"trained prompt groups by step: {dict(per_step)}")
    if (found := [row["step"] for row in _rows(folder / "metrics.jsonl")]) != [*range(1, steps + 1)]:
        problems.append(f"steps of metrics.jsonl: {found}")
    return problems


def temporary(folder: Path) -> list[str]:
    """Return the unfinished files and folders that a complete run left in its folder."""
    return [f"file {path.relative_to(folder)}" for path in sorted(folder.rglob(".*")) if _TEMPORARY.search(path.name)]


def within_noise(em: float, without_faults: float, questions: int) -> bool:
    """Return True if two exact matches over `questions` answers differ by at most three standard errors."""
    share = min(max((em + without_faults) / 2, 1 / questions), 1 - 1 / questions)
    return abs(em - without_faults) <= 3 * math.sqrt(2 * share * (1 - share) / questions)


def outside_noise(end: Mapping[str, Any], without_faults: Mapping[str, float], questions: int) -> bool:
    """Return True if the exact match of a complete run is known, and further than noise from one without faults."""
    known = end["em"] is not None and end["setup"] in without_faults
    return known and not within_noise(end["em"], without_faults[end["setup"]], questions)


def summary(
    rows: Sequence[dict[str, Any]],
    ends: Sequence[dict[str, Any]],
    em_without_faults: Mapping[str, float],
    questions: int,
    limit_s: float,
) -> dict[str, Any]:
    """Return the figures of a campaign. `ends`: per complete run, its setup, exact match, and what it lost and left over.

    `em_without_faults`: setup -> exact match over `questions` of a run without faults. `late` counts the faults after which
    a run needed more than `limit_s` to work again or to end. The exact match of a short run is None.
    """
    outcomes = Counter(row["outcome"] for row in rows)
    times = [row["seconds"] for row in rows if row["outcome"] == RECOVERED]
    p50, p99 = (float(np.quantile(times, share)) if times else None for share in (0.5, 0.99))
    return {
        "kills": len(rows),
        "commits": dict(Counter(row["commit"] for row in rows)),
        "recovered": outcomes[RECOVERED],
        "ended_with_sentence": outcomes[ENDED],
        "ended_unclear": outcomes[UNCLEAR],
        "hung": outcomes[HUNG],
        "late": sum(row["seconds"] is not None and row["seconds"] > limit_s for row in rows),
        "lost": sum(len(end["lost"]) for end in ends),
        "left_over": sum(len(row["left_over"]) for row in rows) + sum(len(end["left_over"]) for end in ends),
        "complete_runs": len(ends),
        "em_outside_noise": sum(outside_noise(end, em_without_faults, questions) for end in ends),
        "recovery_p50_s": p50,
        "recovery_p99_s": p99,
    }


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
