"""Where figures go besides the run's folder: TensorBoard and Weights & Biases, behind one protocol.

Contract: a tracker never ends a run. One that cannot start is left out with a warning.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlsys.config.schema import TrackingConfig

logger = logging.getLogger(__name__)

_STEP = "trainer/step"
WANDB_START_TIMEOUT_S = 30.0
WANDB_FINISH_TIMEOUT_S = 120.0
"""For the last upload; what is not sent by then stays on disk for `wandb sync`."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where curves go on."""

    step: int
    """The last that was shown and counts."""
    ids: Mapping[str, str]
    """Tracker -> its `id` in the run that goes on."""


class Tracker(Protocol):
    """Takes the figures of a step."""

    @property
    def id(self) -> str:
        """What the run is known as there, by which a resumed run goes on; empty where nothing is needed."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record flat `metrics` of `step`; values that are not numbers are left out."""

    def close(self) -> None:
        """Write what is pending. Nothing may be logged afterwards."""


class TensorBoardTracker:
    """Scalars as TensorBoard event files under `<run_dir>/tensorboard`."""

    id = ""

    def __init__(self, run_dir: Path, after: int | None) -> None:
        """`after`: the step that the run is resumed after; what was shown of later ones is hidden."""
        from torch.utils.tensorboard import SummaryWriter  # a second to import: only where it is wanted

        self._writer = SummaryWriter(
            str(run_dir / "tensorboard"), purge_step=None if after is None else after + 1
        )

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """See `Tracker.log`."""
        for name, value in _numbers(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """See `Tracker.close`."""
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run with its files under `<run_dir>/wandb`; its figures are drawn over `trainer/step`.

    A resumed run goes on in it. Steps that were done before a kill and are done again are shown twice.

    Offline unless WANDB_API_KEY is set, also then if WANDB_MODE is "offline". Offline means that nothing
    is sent and nobody is asked to log in: `wandb sync` uploads the run later.
    """

    def __init__(
        self, run_dir: Path, run_name: str, project: str, config: Mapping[str, Any], known_as: str | None
    ) -> None:
        """`known_as`: the run's id where it is resumed."""
        offline = not os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") == "offline"
        if offline:
            # Even an offline run would otherwise call home when it ends. Read by wandb at import.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        run_dir.mkdir(parents=True, exist_ok=True)  # wandb falls back to a temporary folder without it
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
            init_timeout=WANDB_START_TIMEOUT_S,
            finish_timeout=WANDB_FINISH_TIMEOUT_S,
        )
        self._run = wandb.init(
            project=project,
            name=run_name,
            dir=str(run_dir),
            mode="offline" if offline else None,
            config=dict(config),
            id=known_as or None,
            resume="allow" if known_as else None,
            settings=settings,
        )
        # W&B's own count of rows never goes back, and would leave out an evaluation that ends after a later step.
        self._run.define_metric("*", step_metric=_STEP)

    @property
    def id(self) -> str:
        """See `Tracker.id`."""
        return str(self._run.id)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """See `Tracker.log`."""
        self._run.log({**_numbers(metrics), _STEP: step})

    def close(self) -> None:
        """See `Tracker.close`."""
        self._run.finish()


def open_trackers(
    config: TrackingConfig,
    run_dir: Path,
    run_name: str,
    resolved_config: Mapping[str, Any],
    resumed: Resumed | None = None,
) -> dict[str, Tracker]:
    """The trackers that `config` asks for, by name. `resolved_config` is shown beside the run in W&B."""
    trackers: dict[str, Tracker] = {}
    if config.tensorboard:
        trackers["tensorboard"] = TensorBoardTracker(run_dir, resumed.step if resumed else None)
    if config.wandb:
        known_as = resumed.ids.get("wandb") if resumed else None
        try:
            trackers["wandb"] = WandbTracker(run_dir, run_name, config.project, resolved_config, known_as)
        except Exception as error:  # noqa: BLE001 - whatever a third-party service raises, the run goes on
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            logger.warning("Weights & Biases did not start (%s); the run goes on without it.", reason)
    return trackers


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
