"""The trackers of a run's figures: its metrics.jsonl, TensorBoard and Weights & Biases.

Contract: a tracker of others never ends a run; one that fails is left out from there on, with one warning. metrics.jsonl
is always there, for a resumed run relies on it. Curves of a resumed run go on where they were, and show each step once, but
in a W&B run that has been uploaded: that cannot be taken back, and what was done before a kill and is done again is drawn
twice. (W&B can wind back to a row, which is in beta, not for every server, and counts other rows than steps.)
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlsys.config.schema import TrackingConfig, WandbMode
from rlsys.errors import RunError
from rlsys.observe.records import METRICS, LineLog

logger = logging.getLogger(__name__)

_NAMES = {"tensorboard": "TensorBoard", "wandb": "Weights & Biases"}
_STEP = "trainer/step"
_QUIET: Any = {"silent": True, "console": "off", "disable_git": True, "disable_code": True, "x_disable_stats": True}
WANDB_START_TIMEOUT_S = 30.0
WANDB_FINISH_TIMEOUT_S = 120.0
"""For the last upload; what is not sent by then stays on disk for `wandb sync`."""


@dataclass(frozen=True, slots=True)
class Told:
    """Figures that trackers were given before, at `time` in seconds since the epoch."""

    step: int
    metrics: Mapping[str, Any]
    time: float


@dataclass(frozen=True, slots=True)
class Resumed:
    """The point from which curves go on."""

    step: int
    """The last that was shown and counts."""
    ids: Mapping[str, str]
    """Tracker -> its `id` in the run that goes on."""
    metrics_bytes: int
    """Of metrics.jsonl, that count."""
    told: Sequence[Told]
    """All that counts, by step."""


class Tracker(Protocol):
    """Takes the figures of steps and of evaluations, which may come after those of later steps."""

    id: str
    """What the run is known as there, by which a resumed run goes on; empty where nothing is needed."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record flat `metrics` of `step`; values that are not numbers are left out."""

    def close(self) -> None:
        """Write what is pending. Nothing may be logged afterwards."""


class TensorBoardTracker:
    """Writes scalars as TensorBoard event files under `<run_dir>/tensorboard`."""

    id = ""

    def __init__(self, run_dir: Path, after: int | None) -> None:
        """`after`: the step that the run is resumed after; what was shown of later ones is hidden."""
        from torch.utils.tensorboard import SummaryWriter  # a second to import: only where it is wanted

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=None if after is None else after + 1)
        self.close = self._writer.close

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """See `Tracker.log`."""
        for name, value in _numbers(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()


class WandbTracker:
    """A Weights & Biases run with its files under `<run_dir>/wandb`; its figures are drawn over `trainer/step`.

    Offline means that nothing is sent and nobody is asked to log in: `wandb sync` uploads the run later.

    A resumed run goes on under its id. While all of it is on this disk alone, it is written anew, with what counts of it,
    and the parts before are deleted; what has been uploaded stays, and is gone on from.
    """

    def __init__(
        self,
        run_dir: Path,
        run_name: str,
        config: TrackingConfig,
        resolved_config: Mapping[str, Any],
        resumed: Resumed | None = None,
    ) -> None:
        """Raises RunError if W&B is to be online and has no key."""
        online = config.wandb_mode is WandbMode.online
        no_account = not os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") == "offline"
        offline = no_account if config.wandb_mode is WandbMode.auto else config.wandb_mode is WandbMode.offline
        if offline:
            # Even an offline run would otherwise call home when it ends. Read by wandb at import.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        if online and not wandb.login(prompt=False):  # Else it would ask, and wait.
            raise RunError("tracking.wandb_mode=online needs WANDB_API_KEY, or `wandb login`")
        run_dir.mkdir(parents=True, exist_ok=True)  # wandb falls back to a temporary folder without it
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
        # W&B's own count of rows never goes back, and would leave out an evaluation that ends after a later step.
        self._run.define_metric("*", step_metric=_STEP)
        if resumed and anew:
            self._replace(parts, resumed.told)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """See `Tracker.log`."""
        self._run.log({**_numbers(metrics), _STEP: step})

    def _replace(self, parts: Sequence[Path], told: Sequence[Told]) -> None:
        """Log what counts, in place of the `parts` that had it."""
        for row in told:
            self._run.log({**_numbers(row.metrics), _STEP: row.step, "_timestamp": row.time})
        for part in parts:
            if part != Path(self._run.settings.sync_dir):  # It may be of the same second.
                shutil.rmtree(part)


class Trackers:
    """Gives a run's figures to metrics.jsonl and to each tracker."""

    def __init__(
        self, metrics: LineLog, others: Mapping[str, Callable[[], Tracker]], clock: Callable[[], float] = time.time
    ) -> None:
        """`metrics` is metrics.jsonl; `others`: by name, what starts each."""
        self.metrics, self._clock = metrics, clock
        self.others: dict[str, Tracker] = {}
        """Those that work, by name."""
        for name, start in others.items():
            with self._or_without(name, "did not start"):
                self.others[name] = start()
        self.ids = {name: tracker.id for name, tracker in self.others.items() if tracker.id}
        """Tracker -> what the run is known as there, where it is needed to go on; also of one that has failed since."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record flat `metrics` of `step`. Raises RunError where metrics.jsonl, which keeps texts too, cannot be written."""
        self.metrics.append({"step": step, "time": self._clock(), **metrics})
        self._call(lambda tracker: tracker.log(step, metrics))

    def log_evaluation(self, step: int, figures: Mapping[str, Any]) -> None:
        """Show the figures of an evaluation after `step`; the run's `evaluations` have them beside every answer."""
        self._call(lambda tracker: tracker.log(step, figures))

    def close(self) -> None:
        """Close all of them. Idempotent."""
        self.metrics.close()
        self._call(lambda tracker: tracker.close())

    def _call(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.others.items()):
            with self._or_without(name, "failed"):
                call(tracker)

    @contextmanager
    def _or_without(self, name: str, what: str) -> Iterator[None]:
        """Whatever the tracker `name` raises in the body, the run goes on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - of a third party, it may be anything
            self.others.pop(name, None)
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            logger.warning("%s %s (%s); the run goes on without it.", _NAMES[name], what, reason)


def open_trackers(
    config: TrackingConfig, run_dir: Path, resolved_config: Mapping[str, Any], resumed: Resumed | None = None
) -> Trackers:
    """Open metrics.jsonl, and the trackers that `config` asks for; W&B shows `resolved_config` beside the run."""
    others: dict[str, Callable[[], Tracker]] = {}
    if config.tensorboard:
        others["tensorboard"] = lambda: TensorBoardTracker(run_dir, resumed.step if resumed else None)
    if config.wandb:
        others["wandb"] = lambda: WandbTracker(run_dir, run_dir.name, config, resolved_config, resumed)
    return Trackers(LineLog(run_dir / METRICS, resumed.metrics_bytes if resumed else None), others)


def _is_local(part: Path) -> bool:
    """Whether nothing of a part of a W&B run was uploaded."""
    return part.name.startswith("offline-") and not any(part.glob("*.synced"))


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
