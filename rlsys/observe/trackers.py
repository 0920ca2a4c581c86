"""Where a run's figures go: its metrics.jsonl, TensorBoard and Weights & Biases, behind one protocol.

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
from rlsys.observe.lines import LineLog
from rlsys.observe.metrics import METRICS

logger = logging.getLogger(__name__)

_NAMES = {"tensorboard": "TensorBoard", "wandb": "Weights & Biases"}
_STEP = "trainer/step"
WANDB_START_TIMEOUT_S = 30.0
WANDB_FINISH_TIMEOUT_S = 120.0
"""For the last upload; what is not sent by then stays on disk for `wandb sync`."""


@dataclass(frozen=True, slots=True)
class Told:
    """Figures that trackers were given before."""

    step: int
    metrics: Mapping[str, Any]
    time: float
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where curves go on."""

    step: int
    """The last that was shown and counts."""
    ids: Mapping[str, str]
    """Tracker -> its `id` in the run that goes on."""
    metrics_bytes: int
    """Of metrics.jsonl, that count."""
    told: Sequence[Told]
    """All that counts, by step."""


class Tracker(Protocol):
    """Takes the figures of steps and of evaluations."""

    @property
    def id(self) -> str:
        """What the run is known as there, by which a resumed run goes on; empty where nothing is needed."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record flat `metrics` of `step`; values that are not numbers are left out."""

    def log_evaluation(self, step: int, figures: Mapping[str, Any]) -> None:
        """The same of an evaluation after `step`, which may come after later steps."""

    def close(self) -> None:
        """Write what is pending. Nothing may be logged afterwards."""


class JsonlTracker:
    """metrics.jsonl: a row a step, on disk as soon as it is known.

    A row is {"step", "time", flat keys}, "time" in seconds since the epoch. docs/metrics.md lists the keys with their
    units. A figure that is NaN or infinite is written as null. Raises RunError where a row cannot be written.
    """

    id = ""

    def __init__(self, path: Path, position: int | None = None, clock: Callable[[], float] = time.time) -> None:
        """`position`: bytes of the file that count; None counts all."""
        self._clock = clock
        self._lines = LineLog(path, position)

    @property
    def position(self) -> int:
        """Bytes written so far."""
        return self._lines.position

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """See `Tracker.log`; what is no number stays too."""
        self._lines.append({"step": step, "time": self._clock(), **metrics})

    def log_evaluation(self, step: int, figures: Mapping[str, Any]) -> None:
        """Nothing: the run's `evaluations` have the figures beside every answer."""

    def close(self) -> None:
        """See `Tracker.close`; idempotent."""
        self._lines.close()


class TensorBoardTracker:
    """Scalars as TensorBoard event files under `<run_dir>/tensorboard`."""

    id = ""

    def __init__(self, run_dir: Path, after: int | None) -> None:
        """`after`: the step that the run is resumed after; what was shown of later ones is hidden."""
        from torch.utils.tensorboard import SummaryWriter  # a second to import: only where it is wanted

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=None if after is None else after + 1)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """See `Tracker.log`."""
        for name, value in _numbers(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_evaluation(self, step: int, figures: Mapping[str, Any]) -> None:
        """See `Tracker.log_evaluation`."""
        self.log(step, figures)

    def close(self) -> None:
        """See `Tracker.close`."""
        self._writer.close()


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
        offline = _is_offline(config.wandb_mode)
        if offline:
            # Even an offline run would otherwise call home when it ends. Read by wandb at import.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        if config.wandb_mode is WandbMode.online and not wandb.login(prompt=False):  # Else it would ask, and wait.
            raise RunError("tracking.wandb_mode=online needs WANDB_API_KEY, or `wandb login`")
        run_dir.mkdir(parents=True, exist_ok=True)  # wandb falls back to a temporary folder without it
        known_as = resumed.ids.get("wandb") if resumed else None
        parts = sorted((run_dir / "wandb").glob(f"*run-*-{known_as}")) if known_as else []
        anew = offline and bool(parts) and all(map(_is_local, parts))
        self._run = wandb.init(
            project=config.project,
            name=run_name,
            dir=str(run_dir),
            mode="offline" if offline else "online" if config.wandb_mode is WandbMode.online else None,
            config=dict(resolved_config),
            id=known_as or None,
            resume="allow" if known_as and not anew else None,
            settings=_settings(wandb),
        )
        # W&B's own count of rows never goes back, and would leave out an evaluation that ends after a later step.
        self._run.define_metric("*", step_metric=_STEP)
        if resumed and anew:
            self._tell_again(resumed.told, parts)

    @property
    def id(self) -> str:
        """See `Tracker.id`."""
        return str(self._run.id)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """See `Tracker.log`."""
        self._run.log({**_numbers(metrics), _STEP: step})

    def log_evaluation(self, step: int, figures: Mapping[str, Any]) -> None:
        """See `Tracker.log_evaluation`."""
        self.log(step, figures)

    def close(self) -> None:
        """See `Tracker.close`."""
        self._run.finish()

    def _tell_again(self, told: Sequence[Told], parts: Sequence[Path]) -> None:
        """Log what counts, in place of the `parts` that had it."""
        for one in told:
            self._run.log({**_numbers(one.metrics), _STEP: one.step, "_timestamp": one.time})
        for part in parts:
            if part != Path(self._run.settings.sync_dir):  # It may be of the same second.
                shutil.rmtree(part)


class Trackers:
    """All that a run's figures go to, as one tracker."""

    def __init__(self, metrics: JsonlTracker, others: Mapping[str, Callable[[], Tracker]]) -> None:
        """`others`: by name, what starts each."""
        self.metrics = metrics
        self.others: dict[str, Tracker] = {}
        """Those that work, by name."""
        for name, start in others.items():
            with self._or_without(name, "did not start"):
                self.others[name] = start()
        self.ids = {name: one.id for name, one in self.others.items() if one.id}
        """Tracker -> what the run is known as there, where it is needed to go on; also of one that has failed since."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """See `Tracker.log`."""
        self.metrics.log(step, metrics)
        self._tell(lambda one: one.log(step, metrics))

    def log_evaluation(self, step: int, figures: Mapping[str, Any]) -> None:
        """See `Tracker.log_evaluation`."""
        self.metrics.log_evaluation(step, figures)
        self._tell(lambda one: one.log_evaluation(step, figures))

    def close(self) -> None:
        """See `Tracker.close`."""
        self.metrics.close()
        self._tell(lambda one: one.close())

    def _tell(self, tell: Callable[[Tracker], None]) -> None:
        for name, one in list(self.others.items()):
            with self._or_without(name, "failed"):
                tell(one)

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
    """metrics.jsonl, and the trackers that `config` asks for. `resolved_config` is shown beside the run in W&B."""
    others: dict[str, Callable[[], Tracker]] = {}
    if config.tensorboard:
        others["tensorboard"] = lambda: TensorBoardTracker(run_dir, resumed.step if resumed else None)
    if config.wandb:
        others["wandb"] = lambda: WandbTracker(run_dir, run_dir.name, config, resolved_config, resumed)
    return Trackers(JsonlTracker(run_dir / METRICS, resumed.metrics_bytes if resumed else None), others)


def _is_offline(mode: WandbMode) -> bool:
    if mode is WandbMode.auto:
        return not os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") == "offline"
    return mode is WandbMode.offline


def _is_local(part: Path) -> bool:
    """Whether nothing of a part of a W&B run was uploaded."""
    return part.name.startswith("offline-") and not any(part.glob("*.synced"))


def _settings(wandb: Any) -> Any:
    return wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        disable_code=True,
        x_disable_stats=True,
        init_timeout=WANDB_START_TIMEOUT_S,
        finish_timeout=WANDB_FINISH_TIMEOUT_S,
    )


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
