"""Logs a run's metrics to metrics.jsonl, TensorBoard, Weights & Biases and trackers from outside of the package.

Contract: an external tracker never ends a run. If one fails, it is dropped with one warning. metrics.jsonl is always
written, because a resume needs it. Curves of a resumed run continue and show each step once. Exception: rows that a W&B
run has already uploaded cannot be removed, so steps repeated after a kill appear twice. (The rewind function of W&B is
in beta, is not available on every server, and counts rows, not steps.)
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rlsys.config.custom import OwnComponent
from rlsys.config.schema import CustomMetric, CustomTracker, TrackingConfig, WandbMode
from rlsys.data.trajectory import Group
from rlsys.errors import RunError, UserError, first_line
from rlsys.observe.metrics import Metric
from rlsys.observe.records import METRICS, LineLog

logger = logging.getLogger(__name__)

_NAMES = {"tensorboard": "TensorBoard", "wandb": "Weights & Biases"}
_STEP = "trainer/step"
_QUIET: Any = {"silent": True, "console": "off", "disable_git": True, "disable_code": True, "x_disable_stats": True}
WANDB_START_TIMEOUT_S = 30.0
WANDB_FINISH_TIMEOUT_S = 120.0
"""Timeout of the last upload; unsent data stays on disk for `wandb sync`."""


@dataclass(frozen=True, slots=True)
class LoggedRow:
    """Metrics that were logged before the resume, at `time` in seconds since the epoch."""

    step: int
    metrics: Mapping[str, Any]
    time: float


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Point from which a resumed run's curves continue."""

    step: int
    """Step of the checkpoint; later logged steps are discarded."""
    ids: Mapping[str, str]
    """Tracker -> `id` of the run that it must continue."""
    metrics_bytes: int
    """Byte offset of metrics.jsonl at the checkpoint."""
    logged: Sequence[LoggedRow]
    """Metrics logged up to `step`, by step."""


class Tracker(Protocol):
    """Receives the metrics of steps and evaluations; metrics of an evaluation may arrive after those of later steps."""

    id: str
    """Id of the run at the tracker, needed to continue it after a resume; empty if not needed."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record flat `metrics` of `step`; skips values that are no finite numbers."""

    def close(self) -> None:
        """Flush and close; no `log` afterwards."""


class TensorBoardTracker:
    """Writes scalars as TensorBoard event files under `<run_dir>/tensorboard`."""

    id = ""

    def __init__(self, run_dir: Path, after: int | None) -> None:
        """`after`: step after which the run resumes; TensorBoard hides what was logged for later steps."""
        from torch.utils.tensorboard import SummaryWriter  # Takes a second to import.

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=None if after is None else after + 1)
        self.close = self._writer.close

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in _numbers(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()


class WandbTracker:
    """Logs to a Weights & Biases run with files under `<run_dir>/wandb`; its x axis is `trainer/step`.

    Offline mode sends nothing and needs no login; `wandb sync` uploads the run later.

    A resumed run keeps its W&B id. If nothing of the run was uploaded, its metrics up to the checkpoint are logged
    again and the old files are deleted. Otherwise, the uploaded run is continued.
    """

    def __init__(
        self,
        run_dir: Path,
        run_name: str,
        config: TrackingConfig,
        resolved_config: Mapping[str, Any],
        resumed: ResumePoint | None = None,
    ) -> None:
        """Raises RunError if `config` requires online mode and no API key is found."""
        online = config.wandb_mode is WandbMode.online
        no_account = not os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") == "offline"
        offline = no_account if config.wandb_mode is WandbMode.auto else config.wandb_mode is WandbMode.offline
        if offline:
            # Otherwise even an offline run sends data at its end. wandb reads the variable at import.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        with _temporary_files_in(run_dir / "wandb" / "tmp"):
            import wandb

        if online and not wandb.login(prompt=False):  # Without this check, wandb prompts and blocks.
            raise RunError("tracking.wandb_mode=online needs WANDB_API_KEY, or `wandb login`")
        known_as = resumed.ids.get("wandb") if resumed else None
        parts = sorted((run_dir / "wandb").glob(f"*run-*-{known_as}")) if known_as else []
        anew = offline and bool(parts) and all(map(_is_local, parts))
        self._run = wandb.init(
            project=config.project,
            name=run_name,
            dir=str(run_dir),
            mode="offline" if offline else "online" if online else None,
            config=dict(resolved_config),
            id=known_as or None,
            resume="allow" if known_as and not anew else None,
            settings=wandb.Settings(
                **_QUIET,
                init_timeout=WANDB_START_TIMEOUT_S,
                finish_timeout=WANDB_FINISH_TIMEOUT_S,
            ),
        )
        self.id = str(self._run.id)
        self.close = self._run.finish
        # W&B's own step never decreases, so it would drop an evaluation that ends after a later step.
        self._run.define_metric("*", step_metric=_STEP)
        if resumed and anew:
            self._replace(parts, resumed.logged)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({**_numbers(metrics), _STEP: step})

    def _replace(self, parts: Sequence[Path], logged: Sequence[LoggedRow]) -> None:
        """Log `logged` again and delete the old `parts`."""
        for row in logged:
            self._run.log({**_numbers(row.metrics), _STEP: row.step, "_timestamp": row.time})
        for part in parts:
            if part != Path(
                self._run.settings.sync_dir
            ):  # The new run's folder may have the same name if created within the same second.
                shutil.rmtree(part)


@contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    """Let the body make temporary files in `folder`, which is emptied first.

    W&B makes temporary folders at its import. A killed driver leaves them, and its next one removes them here.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


class OwnTracker:
    """Calls a tracker from outside of the package, which fails if a call has not returned within its `timeout_s`."""

    def __init__(self, settings: CustomTracker, run_dir: Path) -> None:
        self._own = OwnComponent(settings)
        self._tracker = self._own(run_dir)
        self.id = getattr(self._tracker, "id", "")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._own.run(self._tracker.log, step, metrics)

    def close(self) -> None:
        self._own.run(self._tracker.close)


class OwnMetrics:
    """Metrics from outside of the package. A metric that fails is dropped with one warning."""

    def __init__(self, chosen: Sequence[CustomMetric]) -> None:
        """Raises UserError if two functions have the same name."""
        self._functions = {f"own/{one.kind.rpartition('.')[2]}": OwnComponent(one) for one in chosen}
        if len(self._functions) < len(chosen):
            kinds = ", ".join(one.kind for one in chosen)
            raise UserError(
                f"tracking.metrics={kinds} has two functions of the same name: rename one.",
                code="conflict",
                key="tracking.metrics",
            )

        self.declared = tuple(one for named in self._functions.items() for one in _declared(*named))
        """Units, as `rlsys.components.measured_in` gives them, and the first lines of the docstrings."""

    def of(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return the metrics of a step: `own/<function>`, or `own/<function>/<key>` for each key of a mapping."""
        found: dict[str, float] = {}
        for name, function in list(self._functions.items()):
            try:
                value = function(groups)
                parts = value if isinstance(value, Mapping) else {"": value}
                found |= {f"{name}/{key}".rstrip("/"): float(part) for key, part in parts.items()}
            except Exception as problem:  # noqa: BLE001 - the result is third-party code too
                del self._functions[name]
                logger.warning("The metric %s failed (%s); the run continues without it.", name, first_line(problem))
        return found


def _declared(name: str, own: OwnComponent) -> Iterator[Metric]:
    """Yield a metric for each unit that a metric from outside of the package declares."""
    units, meaning = own.units, next(iter((inspect.getdoc(own.settings.component) or "").splitlines()), "")
    for key, unit in (units if isinstance(units, Mapping) else {"": units}).items():
        yield Metric(f"{name}/{key}".rstrip("/"), unit, meaning)
    yield Metric(f"{name} {name}/...", "", meaning)


class Trackers:
    """Logs a run's metrics to metrics.jsonl and to each external tracker."""

    def __init__(
        self, metrics: LineLog, others: Mapping[str, Callable[[], Tracker]], clock: Callable[[], float] = time.time
    ) -> None:
        """`metrics`: log of metrics.jsonl. `others`: name -> factory of an external tracker."""
        self.metrics, self._clock = metrics, clock
        self.others: dict[str, Tracker] = {}
        """Working external trackers, by name."""
        for name, start in others.items():
            with self._or_without(name, "did not start"):
                self.others[name] = start()
        ids = {name: getattr(tracker, "id", "") for name, tracker in self.others.items()}
        self.ids = {name: found for name, found in ids.items() if isinstance(found, str) and found}
        """Tracker -> `Tracker.id`, if it is a non-empty text; includes trackers that failed later."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record flat `metrics` of `step`; only metrics.jsonl keeps texts. Raises RunError if it cannot be written."""
        self.metrics.append({"step": step, "time": self._clock(), **metrics})
        self._call(lambda tracker: tracker.log(step, metrics))

    def log_evaluation(self, step: int, figures: Mapping[str, Any]) -> None:
        """Log an evaluation after `step` to the external trackers only; `evaluations/` has it with all answers."""
        self._call(lambda tracker: tracker.log(step, figures))

    def close(self) -> None:
        """Close metrics.jsonl and all trackers. Idempotent."""
        self.metrics.close()
        self._call(lambda tracker: tracker.close())

    def _call(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.others.items()):
            with self._or_without(name, "failed"):
                call(tracker)

    @contextmanager
    def _or_without(self, name: str, what: str) -> Iterator[None]:
        """Drop the tracker `name`, with a warning, if the body raises."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - third-party code may raise anything
            self.others.pop(name, None)
            logger.warning("%s %s (%s); the run continues without it.", _NAMES.get(name, name), what, first_line(error))


def open_trackers(
    config: TrackingConfig, run_dir: Path, resolved_config: Mapping[str, Any], resumed: ResumePoint | None = None
) -> Trackers:
    """Open metrics.jsonl and the trackers enabled in `config`; W&B stores `resolved_config` with the run."""
    others: dict[str, Callable[[], Tracker]] = {}
    if config.tensorboard:
        others["tensorboard"] = lambda: TensorBoardTracker(run_dir, resumed.step if resumed else None)
    if config.wandb:
        others["wandb"] = lambda: WandbTracker(run_dir, run_dir.name, config, resolved_config, resumed)
    for number, own in enumerate(config.trackers):
        name = own.kind if own.kind not in others else f"{own.kind}[{number}]"
        others[name] = partial(OwnTracker, own, run_dir)
    return Trackers(LineLog(run_dir / METRICS, resumed.metrics_bytes if resumed else None), others)


def _is_local(part: Path) -> bool:
    """Return True if nothing of a W&B run folder was uploaded."""
    return part.name.startswith("offline-") and not any(part.glob("*.synced"))


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
