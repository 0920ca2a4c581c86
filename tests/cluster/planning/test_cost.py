"""Tests of the estimated seconds of a step that `test_split_table.py` does not work out."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from operator import attrgetter
from typing import Any

import pytest

from rlsys.cluster.planning.cost import StepCost
from rlsys.config.compose import load_config
from rlsys.config.schema import RunConfig
from rlsys.weights.weight_map import read_architecture
from scripts.memory_tables import shape_of

HIDDEN, VOCAB = 2048, 151936
"""Sizes of Qwen2.5-3B."""


@cache
def experiment(name: str) -> RunConfig:
    return load_config(f"searchr1_qwen2.5_{name}")


def cost_of(settings: Mapping[str, Any] = {}, of: str = "3b_1node", device: str = "H100") -> StepCost:
    """Return the costs of an experiment with other settings, by dotted key."""
    config = deepcopy(experiment(of))
    for key, value in settings.items():
        group, _, name = key.rpartition(".")
        held = attrgetter(group)(config)
        if isinstance(held, dict):
            held[name] = value
        else:
            assert hasattr(held, name)
            setattr(held, name, value)
    return StepCost(config, read_architecture(shape_of(config.model.path)), device)


def test_critic_on_the_actors_devices_adds_its_values_and_its_training() -> None:
    """The critic's output layer is one value, so its passes lack the logits."""
    shared = cost_of(of="3b_1node_ppo")
    apart = cost_of({"cluster.placement.critic": "8-11"}, of="3b_1node_ppo")
    assert shared.training_passes() == {"actor": 3, "critic": 4}
    actor, critic = shared.calls_s("actor"), shared.calls_s("critic") + shared.calls_s("values")
    assert shared.training_s() == actor + critic
    assert apart.training_s() == max(actor, critic)
    assert shared.pass_flops(350) - shared.pass_flops(0) == 512 * 350 * 2 * HIDDEN * VOCAB


@pytest.mark.parametrize(
    ("settings", "requests"),
    [
        ({}, 512),
        ({"rollout.max_episodes": 300}, 300),
        ({"rollout.engine.max_running": 200}, 200),
        ({"trainer.prompts_per_step": 100}, 250),
        ({"rollout.engine.kv_cache_tokens": 80000}, 100),
    ],
)
def test_requests_are_limited_by_settings_episodes_and_cache(settings: dict[str, int], requests: int) -> None:
    assert cost_of(settings).requests == requests


def test_engine_without_room_for_an_episode_never_finishes() -> None:
    assert cost_of({"rollout.engine.memory_fraction": 0.07}).rollout_s() == float("inf")
