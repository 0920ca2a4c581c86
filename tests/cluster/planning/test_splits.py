"""Tests of the fastest split: against brute force over whole configs, and of every experiment."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from itertools import product
from math import prod

import pytest

from rlsys.cluster.planning.cost import StepCost
from rlsys.cluster.planning.hardware import REACHED
from rlsys.cluster.planning.placement import fullest_device, memory_problems, parse_placement
from rlsys.cluster.planning.resolve import make_plan, notes_on
from rlsys.cluster.planning.splits import NEAR, faster_split, fastest_split
from rlsys.config.algorithm import OldLogprobs
from rlsys.config.compose import PROJECT_CONFIGS
from rlsys.config.schema import Mode, ParallelConfig, RunConfig
from rlsys.orchestrator.validate import find_problems
from rlsys.weights.weight_map import read_architecture
from scripts import memory_tables
from scripts.memory_tables import gpu_experiments
from scripts.split_tables import PAGE, with_table

NAMES = sorted({path.stem for path in PROJECT_CONFIGS.glob("*.yaml")} - {"searchr1_tiny_cpu"})
MOST_EPISODES, MULTIPLE = 512, 64


def experiment(name: str) -> RunConfig:
    return deepcopy(next(config for config in gpu_experiments() if config.name == name))


def step_s(config: RunConfig) -> float:
    return StepCost(config, read_architecture(config.model.path)).stages().of_step(config.cluster.mode)


@pytest.mark.parametrize("name", NAMES)
def test_no_legal_split_of_an_experiments_devices_is_faster_beyond_a_near_tie(name: str) -> None:
    config = experiment(name)
    model = read_architecture(config.model.path)
    best = fastest_split(config, model)
    assert best is not None
    assert step_s(best) <= step_s(config) <= step_s(best) * (1 + NEAR)


@pytest.mark.parametrize("name", NAMES)
def test_experiment_recomputes_activations_only_if_they_do_not_fit(name: str) -> None:
    config = experiment(name)
    assert list(memory_problems(config, make_plan(config))) == []
    if config.model.recompute:
        config.model.recompute = False
        assert list(memory_problems(config, make_plan(config))) != []


@pytest.mark.parametrize("name", NAMES)
def test_episodes_in_flight_fill_the_kv_cache(name: str) -> None:
    config = experiment(name)
    room = StepCost(config, read_architecture(config.model.path)).room
    expected = min(MOST_EPISODES, int(room) // MULTIPLE * MULTIPLE)
    assert config.rollout.max_episodes == config.rollout.engine.max_running == expected


def test_memory_tables_page_is_up_to_date() -> None:
    page = memory_tables.PAGE.read_text()
    assert memory_tables.with_tables(page) == page, "run python scripts/memory_tables.py"


def test_table_of_splits_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert with_table(page) == page, "run python -m scripts.split_tables"


def test_arithmetic_of_the_page_is_that_of_the_model() -> None:
    """The page explains the row of Qwen2.5-3B: each figure that it derives, in the order of the text."""
    config = experiment("searchr1_qwen2.5_3b_1node")
    cost = StepCost(config, read_architecture(config.model.path))
    inference, one_gpu = cost.inference_s(), deepcopy(config)
    one_gpu.cluster.placement["inference"] = "4"
    alone = StepCost(one_gpu, cost.model).inference_s()
    episode, requests, forward = cost.episode, cost.requests, cost.pass_flops(cost.episode.generated)
    peak, bandwidth = 989e12 * REACHED.compute, 3.35e12 * REACHED.memory
    tokens = cost.episodes * episode.total
    products = 3 * forward / (4 * peak)
    moved = 3 * tokens / 4 * REACHED.activation_reads * 36 * 2048 * 2 / bandwidth
    batches = tokens / 4 / 8192
    launched = batches * 3 * 36 * REACHED.layer_s
    training = cost.training_s()
    updated = training - products - moved - launched
    matrices = requests * (cost.flops.per_token + cost.flops.per_target) / peak
    cache = requests * (200 + (850 + 350) / 2) * 36 * 2 * 256 * 2  # Keys and values of 36 layers, 256 of 2 bytes each.
    layers, sampled = 36 * REACHED.decode_layer_s, requests * REACHED.request_s
    assert cost.decode_s(requests) == pytest.approx(layers + matrices + cache / bandwidth + sampled)
    decoding = cost.episodes / 2 * episode.generated / requests * cost.decode_s(requests)
    last = (3 * 500 - episode.generated) * cost.decode_s(1)
    recomputed = deepcopy(config)
    recomputed.model.recompute = True
    again = StepCost(recomputed, cost.model).training_s()
    figures = [
        f"512 x 5 = {cost.episodes:,} episodes",
        f"{episode.total:,} tokens",
        f"{cost.episodes * episode.total / 1e6:.1f} million tokens",
        f"{forward / 1e15:.1f} PFLOP",
        f"{forward / cost.episodes / episode.total / 1e9:.1f} GFLOP",
        f"{REACHED.compute:.0%}",
        f"= {products:.0f} s",
        f"takes {moved:.0f} s",
        f"{batches:.0f} micro-batches",
        f"{launched:.0f} s",
        f"two optimiser steps {updated:.1f} s: {training:.0f} s",
        f"adds a pass: {again:.0f} s",
        f"takes {inference:.0f} s",
        f"it would be {alone:.0f} s",
        f"{requests} episodes at a time",
        f"{1000 * layers:.1f} ms for the launches of 36 layers",
        f"{1000 * matrices:.1f} ms for matrix products",
        f"{1000 * cache / bandwidth:.1f} ms to read {cache / 1e9:.0f} GB",
        f"{1000 * sampled:.1f} ms for sampling",
        f"{round(requests / cost.decode_s(requests), -2):,.0f} tokens/s",
        f"decoding takes {decoding:.0f} s, prefill {cost.rollout_s() - decoding - last:.0f} s",
        f"episode {last:.0f} s: {cost.rollout_s():.0f} s",
    ]
    text = " ".join(PAGE.read_text().partition("### The arithmetic")[2].partition("###")[0].split())
    for figure in figures:
        _, found, text = text.partition(figure)
        assert found, f"{figure} is missing or out of order"


def all_splits(config: RunConfig) -> Iterator[RunConfig]:
    """Yield every split of five devices, with two engines or more, that passes all checks of a run."""
    for actors, scorers in ((1, 1), (1, 2), (2, 1)):
        engines = 5 - actors - scorers
        for tp, *degrees, recompute in product((1, 2), *[(1, 2)] * 6, (False, True)):
            if actors % prod(degrees[:3]) or scorers % prod(degrees[3:]):
                continue  # A group has a whole number of copies; to ask `find_problems` would take seconds.
            one = deepcopy(config)
            one.cluster.placement = {
                "actor": f"0-{actors - 1}",
                "inference": f"{actors}-{actors + scorers - 1}",
                "rollout": f"{actors + scorers}-4",
            }
            one.model.recompute, one.rollout.engine.tp = recompute, tp
            for group, sizes in ((one.actor, degrees[:3]), (one.inference, degrees[3:])):
                group.parallel = ParallelConfig(*sizes, sequence_parallel=sizes[0] > 1)
            aligned = (actors + scorers) % tp == 0
            if engines // tp >= 2 and aligned and not any(find_problems(one)):
                yield one


@pytest.mark.parametrize(("gib", "kl_coef"), [(70, 0.001), (70, 0.0), (50, 0.001)])
def test_fastest_split_is_that_of_brute_force(gib: float, kl_coef: float) -> None:
    """A 3B model on five GPUs, whose memory rules out some splits."""
    config = experiment("searchr1_qwen2.5_3b_1node")
    config.task.train_path = config.task.eval_path = "README.md"
    config.cluster.devices_per_node, config.cluster.device_memory_gib = 5, gib
    config.rollout.engine.memory_fraction, config.algorithm.kl_coef = 0.6, kl_coef
    legal = list(all_splits(config))
    assert legal
    found = fastest_split(config, read_architecture(config.model.path))
    assert found is not None
    assert not any(find_problems(found))
    assert step_s(found) == pytest.approx(min(map(step_s, legal)))


def test_placement_that_scores_on_one_gpu_is_told_the_settings_of_a_faster_split() -> None:
    config = experiment("searchr1_qwen2.5_3b_1node")
    assert faster_split(config, read_architecture(config.model.path)) is None
    config.cluster.placement = {"actor": "0-3", "inference": "4", "rollout": "5-7"}
    config.model.recompute = True
    told = faster_split(config, read_architecture(config.model.path))
    assert told is not None
    assert "cluster.placement=\"{actor: '0-3', inference: '4-5', rollout: '6-7'}\" model.recompute=false" in told
    config.cluster.devices_per_node = None
    assert faster_split(config, read_architecture(config.model.path)) is None, "the number of devices is not known"


def test_model_that_fits_nowhere_has_no_split() -> None:
    config = experiment("searchr1_qwen2.5_32b_4node")
    config.cluster.device_memory_gib = 24
    assert fastest_split(config, read_architecture(config.model.path)) is None


def test_colocated_groups_have_all_devices() -> None:
    config = experiment("searchr1_qwen2.5_7b_1node_colocated")
    best = fastest_split(config, read_architecture(config.model.path))
    assert best is not None
    assert {*best.cluster.placement.values()} == {"0-7"}
    assert config.cluster.mode is Mode.colocated
    assert fullest_device(best, make_plan(best))[1] < 72


@pytest.mark.parametrize("name", ["searchr1_qwen2.5_3b_1node", "searchr1_qwen2.5_3b_1node_colocated"])
def test_a_run_without_an_inference_group_gives_its_devices_to_the_others(name: str) -> None:
    config = experiment(name)
    config.algorithm.kl_coef, config.algorithm.old_logprobs = 0.0, OldLogprobs.actor
    config.trainer.mini_batches = 1
    best = fastest_split(config, read_architecture(config.model.path))
    assert best is not None
    ranks = parse_placement(best.cluster.placement)
    assert {*ranks["actor"], *ranks["rollout"]} == set(range(8))
    assert step_s(best) < step_s(config) or config.cluster.mode is Mode.colocated
    assert not list(notes_on(best))
    assert config.cluster.mode is Mode.colocated or list(notes_on(config))
    placed = {"cluster.placement.actor", "cluster.placement.inference", "cluster.placement.rollout"}
    assert not placed & {problem.key for problem in find_problems(best)}
