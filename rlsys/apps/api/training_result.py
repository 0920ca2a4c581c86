"""Results of a training run, read from its folder: history, checkpoint, evaluations, report.

Contract: a missing, unreadable or empty file raises UserError with its path and a remedy. A damaged line is skipped, with a
warning at the user's line of code.
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
"""Time for an interrupted command to clean up."""
_LINES_SHOWN = 40
"""Number of last lines of a failed command that its error message repeats."""
_REMEDY = "evaluate again, or give the folder of a finished evaluation"


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Results of an evaluation. Scores are means over answers, from 0 to 1.

    Properties read the folder on access. Raises UserError for a missing or damaged file.
    """

    folder: Path
    """Folder with results.json, answers.jsonl and samples.html."""

    @property
    def results(self) -> Mapping[str, Any]:
        """Contents of results.json: `sets` with all metrics and intervals, `average`, and the settings."""
        return _read_object(self.folder / RESULTS)

    @property
    def em(self) -> float:
        """Exact match, averaged over data sets."""
        return self._averaged("em", "mean")

    @property
    def f1(self) -> float:
        """Token-level F1 against the accepted answers, averaged over data sets."""
        return self._averaged("f1", "mean")

    @property
    def questions(self) -> int:
        """Number of questions."""
        return int(self._averaged("questions"))

    @property
    def answers(self) -> list[dict[str, Any]]:
        """All answers: question, golden answers, answer, scores, searches and the whole response.

        A damaged line is skipped with a warning.
        """
        return _read_objects(self.folder / ANSWERS)

    def __str__(self) -> str:
        searches = self._averaged("searches")
        return (
            f"EM {self.em:.3f}, F1 {self.f1:.3f}, {searches:.2f} searches per question, {self.questions} questions: "
            f"see {self.folder}"
        )

    def _averaged(self, *keys: str) -> float:
        """Return a number from the section `average` of results.json. Raises UserError if it is missing."""
        *above, name = ("average", *keys)
        found = section(self.results, *above).get(name)
        if not isinstance(found, int | float):
            raise UserError(
                f"{self.folder / RESULTS} has no value average.{'.'.join(keys)}: {_REMEDY}.",
                code="missing",
                key=str(self.folder / RESULTS),
            )
        return found


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """Result of a finished run."""

    run_dir: Path
    """Folder with all records of the run (docs/metrics.md)."""
    summary: Mapping[str, Any]
    """Contents of summary.json: `em_before`, `em_after`, ..."""
    settings: RunSettings
    """Config and overrides of the run; `command` formats them for `rlsys train`."""
    search_backend: SearchBackend
    """Search backend of the training, which `evaluate` uses again."""

    @property
    def command(self) -> str:
        """Equivalent `rlsys train` command line."""
        return self.settings.command("rlsys", "train")

    @property
    def checkpoint(self) -> Path:
        """Last checkpoint of the policy, in Megatron's format, for `rlsys eval --model` and `rlsys chat --model`."""
        return Path(self.summary["checkpoint"])

    @property
    def history(self) -> list[dict[str, Any]]:
        """Metrics of each step, read from the run's metrics.jsonl (docs/metrics.md).

        A damaged line is skipped with a warning. Raises UserError if no row can be read.
        """
        run = open_run(self.run_dir)
        problems = [problem for problem in run.problems if problem.startswith(METRICS)]
        if not run.rows:
            why = f" ({_shortened(problems).removesuffix('.')})" if problems else ""
            raise UserError(
                f"{self.run_dir / METRICS} has no row of a step{why}: copy the original file of the run, or train again.",
                code="empty",
                key=str(self.run_dir / METRICS),
            )
        _warn(self.run_dir, problems)
        return list(run.rows)

    @property
    def evaluations(self) -> Sequence[Mapping[str, Any]]:
        """Evaluations on the held-out questions, by step: `step`, `em`, `em_by_hop`, `searches`, ..."""
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
        """Evaluate the trained policy, as `rlsys eval` does, in a subprocess.

        Args:
            data: questions, in any form that `train` takes; None takes the run's held-out questions.
            limit: maximum number of questions; None takes `eval.limit` of the settings, or all questions.
            samples: answers per question; more than one needs a temperature above 0.
            temperature: sampling temperature; 0 is greedy.
            engine: sglang or transformers.
            model: model to evaluate instead of the last checkpoint: an earlier checkpoint, or a Hugging Face folder,
                such as the initial model.

        Raises UserError or RunError with the error message of the evaluation.
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
        """Convert the last checkpoint to a Hugging Face folder, for transformers and other engines; return its path.

        Args:
            folder: folder to create.

        Raises UserError or RunError with the error message of the conversion.
        """
        from rlsys.apps.evaluation.evaluation_inputs import find_model

        original = find_model(self.checkpoint, None, "the checkpoint").shape
        family = section(open_run(self.run_dir).config, "model").get("family")
        own = [] if family is None else ["--family", str(family)]
        _rlsys("convert", "mg2hf", str(self.checkpoint), str(folder), "--hf", str(original), *own)
        return Path(folder)

    def report(self) -> Path:
        """Write the run's report, report.html in its folder, and return the path.

        Raises UserError if the folder is not a run's folder or is not writable.
        """
        from rlsys.report.report_page import write_report

        return write_report([open_run(self.run_dir)])

    def __str__(self) -> str:
        before, after = self.summary["em_before"], self.summary["em_after"]
        em = ["unknown" if value is None else f"{value:.3f}" for value in (before, after)]
        return f"EM {em[0]} before, {em[1]} after {self.summary['steps']} steps; checkpoint {self.checkpoint}"


def _rlsys(*words: str) -> None:
    """Run an rlsys command as a subprocess and pass its stderr on.

    It is a subprocess because engines spawn processes that would import the user's script again. It has its own process
    group so that Ctrl-C reaches it exactly once, through this process, in both a terminal and a notebook. This function
    raises the interrupt after the subprocess has ended.

    Raises UserError or RunError with the last lines of its stderr.
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

    # Read in a thread, so that the subprocess never blocks on a full pipe.
    reader = threading.Thread(target=pass_on, daemon=True)
    reader.start()
    status = _ended(process)
    reader.join(2.0)
    if status:
        said, code = without_code("".join(lines).strip())
        sentence = f"rlsys {words[0]}: {said or f'it ended with status {status}'}"
        if status == 2:  # The error of a wrong command line has no code.
            raise UserError(sentence, code=code or "malformed", key=f"rlsys {words[0]}")
        raise RunError(sentence)


def _ended(process: subprocess.Popen[str]) -> int:
    """Wait for the process and return its exit status. Forwards an interrupt to the process, and kills it after a grace
    period."""
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
    """Read a file with one JSON object."""
    with _readable(path):
        found = read_object(read_regular(path))
    if found is None:
        raise UserError(f"{path} is empty or damaged: {_REMEDY}.", code="malformed", key=str(path))
    return found


def _read_objects(path: Path) -> list[dict[str, Any]]:
    """Read a JSON Lines file of objects."""
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
    """Convert an OSError of the body into a UserError about `path`."""
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
    """Return the first three of `problems`, and the number of further problems."""
    return " ".join(problems[:3]) + (f" {len(problems) - 3} more." if len(problems) > 3 else "")
