"""How much disk and memory a run will want. Pure.

A checkpoint has, for every parameter, its weight and three numbers in float32: the optimiser's copy of it and both
moments (16.2 bytes a parameter were measured for float32 weights); a reference that moves is saved with its weights and
their copy in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsys.cluster.planning.plan import make_plan
from rlsys.config.derived import has_critic, has_reference, moves_reference
from rlsys.config.schema import CheckpointConfig, Dtype, RunConfig, SyncMode
from rlsys.errors import UserError

GIB = 1024**3
_BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2}
_OPTIMIZER_BYTES = 12
BUCKET_FILES = 3
"""Most files of weights that cluster.sync_mode=disk has at a time."""


def plan_of(config: RunConfig) -> dict[str, Any] | None:
    """As `make_plan`; None where the config is too wrong for one, which its own problems say."""
    try:
        return make_plan(config)
    except (UserError, ValueError, ArithmeticError, LookupError):
        return None


def checkpoint_gib(config: RunConfig, parameters: int) -> float:
    """Of one checkpoint, with all its parts."""
    weight = _BYTES[config.model.dtype]
    trained = 1 + has_critic(config.algorithm)
    moved = has_reference(config.algorithm) and moves_reference(config.algorithm)
    return parameters * (trained * (weight + _OPTIMIZER_BYTES) + moved * (weight + 4)) / GIB


def checkpoints_at_once(config: RunConfig) -> int:
    """Most that are on disk at the same time: those that are kept, and the one that is being written."""
    settings, steps = config.checkpoint, config.trainer.steps
    saved = _saves(settings.interval, steps)
    if settings.keep_last is None:
        return saved
    kept = settings.keep_last + settings.keep_best + _landmarks(settings, steps)
    return min(saved, kept + 1)


def run_folder_gib(config: RunConfig, parameters: int) -> float:
    """Of all that a run writes below its output_dir but logs and figures."""
    files = BUCKET_FILES * config.cluster.sync_bucket_bytes / GIB
    weights = files if config.cluster.sync_mode is SyncMode.disk else 0.0
    return checkpoints_at_once(config) * checkpoint_gib(config, parameters) + weights


def spoken(gib: float) -> str:
    """A size as people read it."""
    return f"{gib:.1f} GiB" if gib >= 1 else f"{gib * 1024:.1f} MiB"


def host_memory_gib(plan: Mapping[str, Any]) -> float:
    """Of all processes of a run whose devices are CPUs of one machine."""
    groups = plan["groups"].values()
    return float(sum(len(group["ranks"]) * group["memory_gib_per_rank"] for group in groups))


def _saves(interval: int, steps: int) -> int:
    if interval < 1:
        return 1
    return steps // interval + (steps % interval > 0)


def _landmarks(settings: CheckpointConfig, steps: int) -> int:
    """Checkpoints that keep_every holds: those of steps that it and the interval divide, at most."""
    if settings.keep_every is None:
        return 0
    saved = {step for step in range(1, steps + 1) if settings.interval and step % settings.interval == 0} | {steps}
    return sum(step % settings.keep_every == 0 for step in saved)
