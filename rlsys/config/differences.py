"""Whether a run may go on with another config than it began with. Pure.

A run is what it learns from and how: the model, the questions, the episodes, the algorithm, the optimiser. Those keys
stay. Where and how fast it runs (devices, parallel sizes, budgets, servers), what is watched, saved and evaluated may
be another machine's and another day's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlsys.config.compose import as_dict
from rlsys.config.schema import LrDecay, OptimizerConfig, RunConfig

_LEARNS = (
    "model.",
    "actor.optimizer.",
    "critic.optimizer.",
    "critic.value_clip",
    "critic.warmup_steps",
    "rollout.sampling.",
    "task.",
    "search.enabled",
    "search.topk",
    "reward.",
    "algorithm.",
    "compat.",
    "trainer.",
)
"""What a run learns by: keys, or beginnings of them."""
_FREE = ("model.layers", "model.recompute", "task.train_path", "task.eval_path")
"""Of those, what changes nothing but where things are; that the questions are the same is seen by their content."""
_STEPS = "trainer.steps"


@dataclass(frozen=True, slots=True)
class Difference:
    """A key with another value than before."""

    key: str
    before: Any
    now: Any


def differences(before: Mapping[str, Any], config: RunConfig) -> list[Difference]:
    """What `config` has otherwise than the resolved config `before` where a run that goes on must not.

    A key that `before` does not know, being older, had then what is now its default.
    """
    defaults = dict(_flat(as_dict(RunConfig())))
    saved, current = defaults | dict(_flat(before)), dict(_flat(as_dict(config)))
    found = [Difference(key, saved.get(key), current.get(key)) for key in sorted({*saved, *current})]
    return [one for one in found if one.before != one.now and _binds(one.key, config)]


def _binds(key: str, config: RunConfig) -> bool:
    if key == _STEPS:
        # With a rate that knows the end, another end is another rate from the first step on.
        return any(map(_knows_the_end, (config.actor.optimizer, config.critic.optimizer)))
    return key.startswith(_LEARNS) and key not in _FREE


def _knows_the_end(optimizer: OptimizerConfig) -> bool:
    return optimizer.decay is not LrDecay.constant or optimizer.warmup_fraction > 0


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
