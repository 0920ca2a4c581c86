"""Tests of RLinf's config dialect: translated settings, and refused settings with their keys."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlsys.config.compose import as_dict, load_config
from rlsys.config.rlinf import rules, translate
from rlsys.config.schema import Device, Dtype, Mode, RunConfig, SyncMode, free_maps, schema_keys
from rlsys.errors import Code, UserError
from tests.support.paths import PROJECT
from tests.support.refusals import refused

FOLDER = PROJECT / "examples" / "searchr1" / "config"
TRAIN, EVAL = FOLDER / "qwen2.5-3b-tool-1node.yaml", FOLDER / "qwen2.5-3b-tool-1node-eval.yaml"


def load(file: Path, *overrides: str) -> RunConfig:
    return load_config(str(file), overrides)


def part(config: RunConfig, key: str) -> Any:
    value: Any = as_dict(config)
    for name in key.split("."):
        value = value[name]
    return value


def yaml_of(settings: Mapping[str, Any]) -> list[str]:
    """Command-line overrides for `settings`."""
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


PUBLISHED = {
    "cluster.mode": "colocated",
    "cluster.placement": {"actor": "0-7", "inference": "0-7", "rollout": "0-7"},
    "trainer.schedule.kind": "sequential",
    "trainer.mini_batches": 2,
    "algorithm.n_samples": 4,
    "algorithm.kl_coef": 0.001,
    "algorithm.kl_estimator.kind": "k3",
    "rollout.sampling.stop": ["</search>", "</answer>"],
    "rollout.engine.memory_fraction": 0.75,
    "rollout.engine.max_running": 128,
    "model.dtype": "bfloat16",
    "task.max_total_tokens": 7096,
    "task.max_turn_tokens": 3000,
    "task.max_turns": 1,
    "task.max_observation_tokens": 500,
    "task.train_path": "/path/to/train.jsonl",
    "search.url": "http://127.0.0.1:8000",
    "actor.micro_batch_tokens": 11008,
    "actor.optimizer.lr": 1e-6,
    "actor.optimizer.clip_grad": 0.8,
    "actor.optimizer.warmup_fraction": 0.285,
    "reward.max_answer_tags": 10,
}
"""RLinf's published file in rlsys's keys, translated by hand."""


def test_published_settings_are_translated() -> None:
    config = load(TRAIN)
    assert {key: part(config, key) for key in PUBLISHED} == PUBLISHED


def test_evaluation_settings_are_translated() -> None:
    config = load(EVAL)
    assert (config.eval.samples, config.eval.temperature, config.eval.limit) == (1, 1.0, 1000)
    assert config.task.eval_path == "/path/to/eval.jsonl"
    assert config.cluster.placement["rollout"] == "0-7"
    assert load(EVAL, "algorithm.sampling_params.do_sample=False").eval.temperature == 0.0
    assert load(EVAL, "data.data_size=-1").eval.limit is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        # Looked up in the table.
        ("rollout.model.precision", "fp16"),
        ("rollout.detokenize", False),
        ("actor.optim.fp16", True),
        ("actor.offload_weight", False),
        ("actor.offload_grad", False),
        ("algorithm.adv_type", "reinpp"),
        ("algorithm.kl_penalty_type", "kl"),
        ("algorithm.normalize_advantages", True),
        ("algorithm.early_stop_imp_ratio", 5.0),
        ("critic.use_critic_model", True),
        ("reward.use_reward_model", True),
        ("runner.enable_dynamic_batch_size", False),
        # Converted by code.
        ("agentloop.maxturn", 0),
        ("runner.logger.logger_backends", ["swanlab"]),
        ("data.train_data_paths", ["a.jsonl", "b.jsonl"]),
        ("tools.search.server_addr", "nowhere"),
        # Refused together with other keys.
        ("algorithm.sampling_params.do_sample", False),
        ("rollout.cuda_graph_max_bs", 64),
        ("runner.task_type", "embodied"),
        ("data.shuffle", False),
        ("actor.offload_optimizer", False),
        ("cluster.component_placement", {"actor,rollout": "0-1:0-3"}),
        ("cluster.component_placement", {"actor": "0-3", "rollout": "4-7"}),
        ("cluster.component_placement", "all"),
    ],
)
def test_unsupported_values_are_refused_by_their_key(key: str, value: Any) -> None:
    with refused("unsupported", key):
        translate(TRAIN, yaml_of({key: value}))


@pytest.mark.parametrize(
    ("override", "code", "key", "named"),
    [
        ("runner.max_stepz=3", "unknown", "runner.max_stepz", "runner.max_steps"),
        ("runner.seq_length=${nowhere}", "malformed", TRAIN, "nowhere"),
        ("trainer.stepz=5", "unknown", "trainer.stepz", "trainer.steps"),
    ],
)
def test_bad_override_is_refused_in_either_dialect(override: str, code: Code, key: str | None, named: str) -> None:
    with refused(code, key) as caught:
        load(TRAIN, override)
    assert named in str(caught.value)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    tree = yaml.safe_load(TRAIN.read_text()) | {"defaults": ["model/qwen"]}
    del tree["data"]["val_data_paths"]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tree))
    wrong = {"rollout.detokenize": False, "actor.seed": 7, "data.colour": "red"}
    with pytest.raises(UserError) as caught:
        translate(tmp_path / "mine.yaml", yaml_of(wrong))
    lines, keys = str(caught.value).splitlines(), {*wrong, "defaults", "data.val_data_paths"}
    assert len(lines) == len(keys)
    assert all(any(key in line for line in lines) for key in keys)


@pytest.mark.parametrize(
    ("place", "mode", "placement"),
    [
        ({"actor,rollout,reward": "all"}, Mode.colocated, ("0-7", "0-7", "0-7")),
        ({"actor,inference,rollout": "0-3"}, Mode.colocated, ("0-3", "0-3", "0-3")),
        ({"actor": "0-3", "inference": 4, "rollout": "5-7", "reward": "0-1"}, Mode.disaggregated, ("0-3", "4", "5-7")),
    ],
)
def test_groups_are_placed_on_their_devices_in_the_matching_mode(
    place: dict[str, Any], mode: Mode, placement: tuple[str, ...]
) -> None:
    offload = {"actor.offload_optimizer": False} if mode is Mode.disaggregated else {}
    config = load(TRAIN, *yaml_of({"cluster.component_placement": place, **offload}))
    assert config.cluster.mode is mode
    assert tuple(config.cluster.placement[name] for name in ("actor", "inference", "rollout")) == placement
    expected = "sequential" if mode is Mode.colocated else "pipelined"
    assert config.trainer.schedule.kind == expected


def test_two_nodes_have_sixteen_devices_and_a_sync_mode_between_machines() -> None:
    shared = load(TRAIN, "cluster.num_nodes=2").cluster
    assert shared.placement["actor"] == "0-15"
    assert shared.sync_mode is SyncMode.disk, "required for groups that share devices of several machines"
    apart = {"cluster.component_placement": {"actor": "0-7", "inference": "8", "rollout": "9-15"}}
    config = load(TRAIN, "cluster.num_nodes=2", *yaml_of(apart))
    assert (config.cluster.nodes, config.cluster.devices_per_node) == (2, 8)
    assert config.cluster.sync_mode is SyncMode.broadcast


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        (("runner.max_steps=-1", "runner.max_epochs=3"), 3 * (100 // 16)),
        (("runner.max_steps=5", "runner.max_epochs=3"), 5),
        (("runner.max_steps=50", "runner.max_epochs=3"), 18),
        (("runner.max_steps=50", "runner.max_epochs=null"), 50),
    ],
)
def test_steps_follow_the_epochs_up_to_the_given_maximum(tmp_path: Path, settings: Sequence[str], steps: int) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": "Who?", "solutions": ["I"]}) + "\n\n" for _ in range(100)))
    given = [f"data.train_data_paths=[{data}]", *settings]
    found, _ = translate(TRAIN, [*given, "data.rollout_batch_size=16"])
    assert found["trainer"]["steps"] == steps
    with refused("unsupported", "data.rollout_batch_size"):
        translate(TRAIN, [*given, "data.rollout_batch_size=101", "runner.max_epochs=1"])


def test_warm_up_lasts_as_many_optimiser_steps_as_in_rlinf() -> None:
    """Megatron warms up for lr_warmup_fraction * lr_decay_iters optimiser steps."""
    given = ("runner.max_epochs=null", "runner.max_steps=200", "actor.lr_sched.lr_decay_iters=662")
    config = load(TRAIN, *given)
    optimiser_steps = config.trainer.steps * config.trainer.mini_batches
    assert config.actor.optimizer.warmup_fraction * optimiser_steps == pytest.approx(0.285 * 662)
    for other in ("runner.max_steps=20", "actor.lr_sched.lr_decay_style=linear"):
        with refused("unsupported", "actor.lr_sched.lr_decay_iters"):
            translate(TRAIN, [*given, other])


def test_overrides_of_either_dialect_win_over_the_file() -> None:
    config = load(
        TRAIN,
        "profile=cpu",
        "rollout.model.model_path=a model",
        "algorithm.group_size=8",
        "cluster.component_placement={actor: 0, inference: 1, rollout: 2}",
        "tools.search.server_addr=0.0.0.0:8000",
        "trainer.seed=5",
        "algorithm.kl_estimator=k2",
        "reward.terms={exact_match: 2.0}",
    )
    assert (config.model.path, config.algorithm.n_samples, config.trainer.seed) == ("a model", 8, 5)
    assert config.cluster.placement == {"actor": "0", "inference": "1", "rollout": "2"}
    assert (part(config, "algorithm.kl_estimator.kind"), config.reward.terms) == ("k2", {"exact_match": 2.0})
    assert config.search.url == "http://127.0.0.1:8000", "a server on all interfaces is reached by the loopback address"
    assert config.cluster.device is Device.cpu  # The profile overrides the file.
    assert (config.model.dtype, config.rollout.engine.memory_fraction) == (Dtype.float32, 0.5)


def test_every_rule_targets_a_known_key() -> None:
    known = {*schema_keys(), *free_maps(), "tracking"}
    assert {ours for rule in rules().values() if rule for ours in rule.ours} <= known
