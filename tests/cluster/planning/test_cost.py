"""Tests of the estimated seconds of a step: by hand, and by what must make a stage faster or slower."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cache
from operator import attrgetter
from typing import Any

import pytest

from rlsys.cluster.planning.cost import COMPUTE_SHARE, HOST_S, LINK_SHARE, MEMORY_SHARE, NETWORK, StepCost
from rlsys.config.compose import load_config
from rlsys.config.schema import Mode, RunConfig
from rlsys.weights.weight_map import read_architecture
from scripts.memory_tables import shape_of

PEAK, BANDWIDTH, LINK = 989e12 * COMPUTE_SHARE, 3.35e12 * MEMORY_SHARE, 450e9 * LINK_SHARE
"""Operations and bytes per second that an H100 reaches, by its data sheet."""
EPISODES, TOKENS = 2560, 1400
LAYERS, HIDDEN, KEYS, VOCAB, WEIGHTS = 36, 2048, 256, 151936, 3_085_938_688
"""Sizes of Qwen2.5-3B: layers, widths of the residual stream and of keys, vocabulary, parameters."""
MATRICES = LAYERS * (HIDDEN * (HIDDEN + 2 * KEYS) + HIDDEN * HIDDEN + 3 * HIDDEN * 11008)
FORWARD = EPISODES * (2 * MATRICES * TOKENS + 2 * HIDDEN * VOCAB * 350 + 2 * LAYERS * HIDDEN * TOKENS**2)
"""Operations of one forward pass over the step's episodes, with an output layer at the generated tokens."""


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


def test_training_is_three_forward_passes_and_four_if_recomputed() -> None:
    """Four data-parallel ranks also reduce float32 gradients and gather bfloat16 weights, twice per step."""
    gradients = 2 * 3 / 4 * WEIGHTS * 6 / LINK
    for recompute, passes in ((False, 3), (True, 4)):
        cost = cost_of({"model.recompute": recompute})
        assert cost.training_s() == pytest.approx(passes * FORWARD / (4 * PEAK) + gradients)


@pytest.mark.parametrize(("kl_coef", "forwards"), [(0.001, 2), (0.0, 1)])
def test_inference_runs_the_policy_and_if_there_is_one_the_reference(kl_coef: float, forwards: int) -> None:
    assert cost_of({"algorithm.kl_coef": kl_coef}).inference_s() == pytest.approx(forwards * FORWARD / (2 * PEAK))


def test_critic_on_the_actors_devices_adds_its_values_and_its_training() -> None:
    """The critic's output layer is one value, so its passes lack the logits."""
    shared = cost_of(of="3b_1node_ppo")
    apart = cost_of({"cluster.placement.critic": "8-11"}, of="3b_1node_ppo")
    assert shared.training_passes() == {"actor": 3, "critic": 4}
    actor, critic = (shared.passes_s(*of) for of in (("actor", 3, 2, 350, 2), ("critic", 4, 3, 0, 2)))
    assert shared.training_s() == actor + critic
    assert apart.training_s() == max(actor, critic)
    assert shared.pass_flops(350) - shared.pass_flops(0) == 512 * 350 * 2 * HIDDEN * VOCAB


def test_tensor_parallel_ranks_exchange_the_stream_four_times_per_layer() -> None:
    parallel = {"inference.parallel.tp": 2}
    one, two = cost_of(), cost_of(parallel)
    # Each rank of two receives half of the stream, of 2 bytes per element, in both passes over all tokens.
    exchanged = 2 * EPISODES * TOKENS * LAYERS * 4 * HIDDEN * 2 / 2
    assert two.inference_s() - one.inference_s() == pytest.approx(exchanged / LINK)
    # Ranks 7 and 8 are on two machines.
    alone, inside, apart = (
        cost_of({"cluster.placement.inference": ranks, "inference.parallel.tp": tp}, of="7b_2node").inference_s()
        for ranks, tp in (("7-8", 1), ("8-9", 2), ("7-8", 2))
    )
    assert apart - alone == pytest.approx(LINK / (NETWORK * LINK_SHARE) * (inside - alone))


def test_pipeline_bubble_shrinks_with_the_micro_batches_of_an_update() -> None:
    alone, few, many, tiny = (
        cost_of({"inference.parallel.pp": pp, "inference.micro_batch_tokens": size}).inference_s()
        for pp, size in ((1, 8192), (2, 8192 * 1000), (2, 8192), (2, 8))
    )
    # All tokens pass through both devices: 448,000 micro-batches of 8 tokens, and 437.5 of 8192.
    assert many / alone == pytest.approx(1 + (2 * 1 / 437.5) ** 0.5)
    assert tiny / alone == pytest.approx(1 + (2 * 1 / 448_000) ** 0.5)
    assert few / alone == pytest.approx(1 + 1 / 2), "a call has at least as many micro-batches as stages"


def test_decode_step_reads_the_weights_and_the_cache_of_all_requests() -> None:
    """A cache entry has 800 tokens of 36 layers, with 256 keys and values of 2 bytes."""
    cache = 800 * LAYERS * 2 * KEYS * 2
    cost = cost_of()
    assert cost.decode_s(1) == pytest.approx((2 * WEIGHTS + cache) / BANDWIDTH)
    assert cost.decode_s(512) == pytest.approx(max(512 * HOST_S, compute_of(512) + 512 * cache / BANDWIDTH))
    faster = cost_of(device="H200")
    assert faster.decode_s(1) == pytest.approx(cost.decode_s(1) * 3.35 / 4.8)


def compute_of(requests: int) -> float:
    """Seconds of the matrix products of a decode step, which exceed those of reading the weights."""
    seconds = requests * 2 * (MATRICES + HIDDEN * VOCAB) / PEAK
    assert seconds > 2 * WEIGHTS / BANDWIDTH
    return seconds


def test_rollout_decodes_prefills_and_waits_for_the_longest_episode() -> None:
    cost = cost_of()
    episodes = EPISODES / 2
    decode = episodes * 350 / 512 * cost.decode_s(512)
    # Five episodes of a group share the prompt.
    per_token = 2 * MATRICES + 2 * LAYERS * HIDDEN * TOKENS
    prefill = episodes * (850 + 200 / 5) * per_token / PEAK
    longest = (3 * 500 - 350) * cost.decode_s(1)
    assert cost.rollout_s() == pytest.approx(decode + prefill + longest)


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


@pytest.mark.parametrize(
    ("key", "value", "stage"),
    [
        ("eval.engines", 1, StepCost.rollout_s),
        ("algorithm.n_samples", 8, StepCost.rollout_s),
        ("task.max_turns", 4, StepCost.rollout_s),
        ("trainer.mini_batches", 8, StepCost.training_s),
    ],
)
def test_more_work_takes_longer(key: str, value: Any, stage: Callable[[StepCost], float]) -> None:
    assert stage(cost_of({key: value})) > stage(cost_of())


def test_step_is_the_longest_stage_if_stages_overlap_and_else_their_sum() -> None:
    stages = cost_of().stages()
    each = (stages.rollout, stages.inference, stages.training)
    assert stages.of_step(Mode.disaggregated) == max(each)
    assert stages.of_step(Mode.colocated) == sum(each)
