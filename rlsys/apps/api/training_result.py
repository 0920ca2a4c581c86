"""The results of a training run, read from its folder: history, checkpoint, evaluations, report.

Contract: a file that is missing, cannot be read or holds nothing of its kind is a UserError with its path and what to
do. A line that cannot be read is left out of the others, and a warning at the user's own line names it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsys.apps.api.arguments import Data, RunSettings, note, quoted, read_data
from rlsys.apps.api.retrievers import SearchBackend
from rlsys.apps.evaluation.results import ANSWERS, RESULTS
from rlsys.errors import RunError, UserError, without_code
from rlsys.files import limited_lines, open_regular, read_regular
from rlsys.observe.records import METRICS, read_object
from rlsys.observe.run_folder import open_run, section
from rlsys.search.server_process import child_environment

_GRACE_S = 15.0
"""For a command that was interrupted to end what it has started."""
_LINES_SHOWN = 40
"""Lines of a command that fails, which its error repeats."""
_REMEDY = "evaluate again, or give the folder of an evaluation that has come to its end"


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """How a model answered questions. Figures are of one answer, from 0 to 1.

    They are read from the folder when they are asked for. Raises UserError for a file that is missing or damaged.
    """

    folder: Path
    """With results.json, answers.jsonl and samples.html."""

    @property
    def results(self) -> Mapping[str, Any]:
        """All of results.json: `sets`, each figure with its interval, `average`, and what was asked how."""
        return _read_object(self.folder / RESULTS)

    @property
    def em(self) -> float:
        """Exact match, the mean over sets."""
        return self._averaged("em", "mean")

    @property
    def f1(self) -> float:
        """Overlap of words with the accepted answer, the mean over sets."""
        return self._averaged("f1", "mean")

    @property
    def questions(self) -> int:
        """How many were asked."""
        return int(self._averaged("questions"))

    @property
    def answers(self) -> list[dict[str, Any]]:
        """Every answer: question, golden answers, answer, scores, searches and the whole response.

        A line that is damaged is left out, and a warning names it.
        """
        return _read_objects(self.folder / ANSWERS)

    def __str__(self) -> str:
        searches = self._averaged("searches")
        return (
            f"EM {self.em:.3f}, F1 {self.f1:.3f}, {searches:.2f} searches a question, {self.questions} questions; "
            f"see {self.folder}"
        )

    def _averaged(self, *keys: str) -> float:
        """A figure of the mean over sets. Raises UserError if there is none."""
        *above, name = ("average", *keys)
        found = section(self.results, *above).get(name)
        if not isinstance(found, int | float):
            raise UserError(
                f"{self.folder / RESULTS} has no figure average.{'.'.join(keys)}: {_REMEDY}.",
                code="missing",
                key=str(self.folder / RESULTS),
            )
        return found


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """A finished run."""

    run_dir: Path
    """Its folder: everything that is known of it (docs/metrics.md)."""
    summary: Mapping[str, Any]
    """What `summary.json` holds: `em_before`, `em_after`, ..."""
    settings: RunSettings
    """The config and the settings over it, as `rlsys train` takes them; `command` writes them out."""
    search_backend: SearchBackend
    """What the policy searched in training, and searches again in `evaluate`."""

    @property
    def command(self) -> str:
        """The command line that trains so."""
        return self.settings.command("rlsys", "train")

    @property
    def checkpoint(self) -> Path:
        """The last checkpoint of the policy, in Megatron's format; `rlsys eval --model` and `rlsys chat --model` take it."""
        return Path(self.summary["checkpoint"])

    @property
    def history(self) -> list[dict[str, Any]]:
        """A row of figures for each step, read from the run's metrics.jsonl (docs/metrics.md).

        A line that is damaged is left out, and a warning names it. Raises UserError if no row can be read.
        """
        run = open_run(self.run_dir)
        problems = [problem for problem in run.problems if problem.startswith(METRICS)]
        if not run.rows:
            why = f" ({_shortened(problems).removesuffix('.')})" if problems else ""
            raise UserError(
                f"{self.run_dir / METRICS} holds no row of a step{why}: copy the file from where the run was, or train again.",
                code="empty",
                key=str(self.run_dir / METRICS),
            )
        _warn(self.run_dir, problems)
        return list(run.rows)

    @property
    def evaluations(self) -> Sequence[Mapping[str, Any]]:
        """Figures of the held-out questions, by step: `step`, `em`, `em_by_hop`, `searches`, ..."""
        return list(self.summary["evaluations"])

    def evaluate(
        self,
        data: Data | None = None,
        *,
        limit: int | None = None,
        samples: int | None = None,
        temperature: float | None = None,
        engine: str = "sglang",
        model: str | Path | None = None,
    ) -> EvaluationResult:
        """Ask questions to the trained policy, as `rlsys eval` does; it runs in a process of its own.

        Args:
            data: as for `train`; None is the held-out questions of training.
            limit: most questions; None asks all, or as many as `eval.limit` of the settings.
            samples: answers to each question; several need a temperature above 0.
            temperature: at which they are drawn; 0 is greedy.
            engine: sglang or transformers.
            model: another than the last checkpoint: an earlier one, or a Hugging Face folder such as the one that training
                began with.

        Raises UserError or RunError with what the evaluation says.
        """
        flags = {"limit": limit, "samples": samples, "temperature": temperature, "engine": engine}
        given = [f"--{name}={value}" for name, value in flags.items() if value is not None]
        given.append(f"--model={model or self.checkpoint}")
        if data is not None:
            given.append(f"--data={read_data(data, 'data').path(self.run_dir.parent / 'questions')}")
        stem = f"eval-{time.strftime('%Y%m%d-%H%M%S')}"
        names = (stem, *(f"{stem}-{count}" for count in range(1, 1000)))
        out = next(self.run_dir / name for name in names if not (self.run_dir / name).exists())
        with self.search_backend.serving(self.run_dir / "logs") as search:
            settings = [f"{key}={quoted(value)}" for key, value in search.items()]
            _rlsys("eval", "-c", self.settings.config, *given, f"--out={out}", *self.settings.lasting, *settings)
        return EvaluationResult(out)

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write the trained policy as a Hugging Face folder, for transformers and other engines, and return its path.

        Args:
            folder: a new one.

        Raises UserError or RunError with what the conversion says.
        """
        from rlsys.apps.evaluation.evaluation_inputs import find_model

        original = find_model(self.checkpoint, None, "the checkpoint").shape
        _rlsys("convert", "mg2hf", str(self.checkpoint), str(folder), "--hf", str(original))
        return Path(folder)

    def report(self) -> Path:
        """Write the report of the run, report.html in its folder, and return its path.

        Raises UserError for a folder that is no run, and for one that cannot be written to.
        """
        from rlsys.report.report_page import write_report

        return write_report([open_run(self.run_dir)])

    def __str__(self) -> str:
        before, after = self.summary["em_before"], self.summary["em_after"]
        return f"EM {before:.3f} before, {after:.3f} after {self.summary['steps']} steps; checkpoint {self.checkpoint}"


def _rlsys(*words: str) -> None:
    """Run a command of rlsys, whose standard error is shown here; an interrupt ends it first.

    Its own process: engines start others, which begin by running the script again. Its own process group: Ctrl-C of a
    terminal reaches it once, through this process, as that of a notebook does.

    Raises UserError or RunError with the end of what it says on standard error.
    """
    command = [sys.executable, "-m", "rlsys.apps.cli.main", *words]
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    streams |= {"encoding": "utf-8", "errors": "replace"}
    process = subprocess.Popen(command, env=child_environment(), process_group=0, **streams)
    lines: deque[str] = deque(maxlen=_LINES_SHOWN)

    def pass_on() -> None:
        for line in process.stderr or ():
            lines.append(line)
            sys.stderr.write(line)

    # A thread of its own, so that the process never waits for its lines to be read.
    reader = threading.Thread(target=pass_on, daemon=True)
    reader.start()
    status = _ended(process)
    reader.join(2.0)
    if status:
        said, code = without_code("".join(lines).strip())
        sentence = f"rlsys {words[0]}: {said or f'it ended with status {status}'}"
        if status == 2:  # Without a code where the command line itself is wrong.
            raise UserError(sentence, code=code or "malformed", key=f"rlsys {words[0]}")
        raise RunError(sentence)


def _ended(process: subprocess.Popen[str]) -> int:
    """Its status, once it has ended. What interrupts the wait interrupts the process, which has a while to end."""
    try:
        return process.wait()
    except BaseException:
        process.send_signal(signal.SIGINT)
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        raise


def _read_object(path: Path) -> dict[str, Any]:
    """The content of a file of one JSON object."""
    with _readable(path):
        found = read_object(read_regular(path))
    if found is None:
        raise UserError(f"{path} is empty or damaged: {_REMEDY}.", code="malformed", key=str(path))
    return found


def _read_objects(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of JSON objects."""
    rows, problems = [], []
    with _readable(path), open_regular(path) as file:
        for number, line in enumerate(limited_lines(file), 1):
            found = read_object(line)
            if found is not None:
                rows.append(found)
            elif line.strip():
                problems.append(f"{path.name}, line {number} is damaged: left out.")
    if not rows:
        raise UserError(f"{path} is empty or damaged: {_REMEDY}.", code="malformed", key=str(path))
    _warn(path.parent, problems)
    return rows


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raises UserError where the body cannot read `path`."""
    try:
        yield
    except OSError as problem:
        is_missing = isinstance(problem, FileNotFoundError)
        why = "is missing" if is_missing else f"cannot be read ({problem.strerror})"
        raise UserError(
            f"{path} {why}: {_REMEDY}.", code="not_found" if is_missing else "malformed", key=str(path)
        ) from problem


def _warn(folder: Path, problems: Sequence[str]) -> None:
    if problems:
        note(f"{folder}: {_shortened(problems)}")


def _shortened(problems: Sequence[str]) -> str:
    """The first three of `problems`, and how many more there are."""
    return " ".join(problems[:3]) + (f" So are {len(problems) - 3} more." if len(problems) > 3 else "")
