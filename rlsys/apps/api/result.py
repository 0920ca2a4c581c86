"""What came of a training run, read from its folder: history, checkpoint, evaluations, report."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rlsys.apps.api.questions import Data, read_data
from rlsys.apps.api.reading import read_history, read_object, read_objects
from rlsys.apps.api.retrievers import SearchBackend
from rlsys.apps.api.settings import Settings, quoted
from rlsys.apps.evaluation.result_files import ANSWERS, RESULTS
from rlsys.errors import RunError, UserError
from rlsys.search.launch import child_environment

_GRACE_S = 15.0
"""For a command that was interrupted to end what it has started."""
_READ_S = 2.0
"""For the last lines of a command that has ended."""
_LINES_SAID = 40
"""Of a command that fails, which its error repeats."""
_REMEDY = "evaluate again, or give the folder of an evaluation that has come to its end"
"""For a result that cannot be read."""


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
        return read_object(self.folder / RESULTS, _REMEDY)

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
        return read_objects(self.folder / ANSWERS, _REMEDY)

    def __str__(self) -> str:
        searches = self._averaged("searches")
        return (
            f"EM {self.em:.3f}, F1 {self.f1:.3f}, {searches:.2f} searches a question, {self.questions} questions; "
            f"see {self.folder}"
        )

    def _averaged(self, *keys: str) -> float:
        """A figure of the mean over sets. Raises UserError if there is none."""
        found: Any = self.results.get("average")
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        if not isinstance(found, int | float):
            raise UserError(f"{self.folder / RESULTS} has no figure average.{'.'.join(keys)}: {_REMEDY}.")
        return found


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """A finished run."""

    run_dir: Path
    """Its folder: everything that is known of it (docs/metrics.md)."""
    summary: Mapping[str, Any]
    """What `summary.json` holds: `em_before`, `em_after`, ..."""
    settings: Settings
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
        return read_history(self.run_dir)

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
        out = _new_folder(self.run_dir)
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
        from rlsys.observe.run_folder import open_run
        from rlsys.report.report_page import write_report

        return write_report([open_run(self.run_dir)])

    def __str__(self) -> str:
        before, after = self.summary["em_before"], self.summary["em_after"]
        return f"EM {before:.3f} before, {after:.3f} after {self.summary['steps']} steps; checkpoint {self.checkpoint}"


def _new_folder(run_dir: Path) -> Path:
    stem = f"eval-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (stem if count == 0 else f"{stem}-{count}" for count in range(1000))
    return next(run_dir / name for name in names if not (run_dir / name).exists())


def _rlsys(*words: str) -> None:
    """Run a command of rlsys, whose standard error is shown here; an interrupt ends it first.

    Its own process: engines start others, which begin by running the script again. Its own process group: Ctrl-C of a
    terminal reaches it once, through this process, as that of a notebook does.

    Raises UserError or RunError with the end of what it says on standard error.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "rlsys.apps.cli.main", *words],
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        process_group=0,
    )
    said: deque[str] = deque(maxlen=_LINES_SAID)
    # A thread of its own, so that the process never waits for its lines to be read.
    reader = threading.Thread(target=_pass_on, args=(process.stderr, said), daemon=True)
    reader.start()
    status = _ended(process)
    reader.join(_READ_S)
    if status:
        kind = UserError if status == 2 else RunError
        raise kind(f"rlsys {words[0]}: {''.join(said).strip() or f'it ended with status {status}'}")


def _pass_on(stream: TextIO, said: deque[str]) -> None:
    for line in stream:
        said.append(line)
        sys.stderr.write(line)


def _ended(process: subprocess.Popen[str]) -> int:
    """Its status, once it has ended. What interrupts the wait interrupts the process, which has a while to end cleanly."""
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
