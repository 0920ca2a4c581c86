"""RLinf's dialect means what it says, or is refused with a sentence that names the key."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlsys.cluster.planning.placement import parse_ranks
from rlsys.config.compose import as_dict, load_config
from rlsys.config.rlinf import rules
from rlsys.config.schema import Device, Dtype, Mode, RunConfig, SyncMode, free_maps, schema_keys
from rlsys.errors import UserError
from tests.support.paths import PROJECT

FOLDER = PROJECT / "examples" / "searchr1" / "config"
TRAIN, EVAL = FOLDER / "qwen2.5-3b-tool-1node.yaml", FOLDER / "qwen2.5-3b-tool-1node-eval.yaml"
Edited = Callable[..., Path]


def load(file: Path, *overrides: str) -> RunConfig:
    return load_config(str(file), overrides)


def complaints(file: Path, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        load(file, *overrides)
    lines = str(caught.value).splitlines()
    assert all(line.endswith((".", "?")) for line in lines)
    return lines


def part(config: RunConfig, key: str) -> Any:
    value: Any = as_dict(config)
    for name in key.split("."):
        value = value[name]
    return value


@pytest.fixture
def edited(tmp_path: Path) -> Edited:
    """The example with other values: dotted key -> value, `...` takes the key out."""

    def edit(original: Path = TRAIN, **changes: Any) -> Path:
        tree = yaml.safe_load(original.read_text())
        for dotted, value in changes.items():
            *path, last = dotted.split(".")
            branch = tree
            for name in path:
                branch = branch.setdefault(name, {})
            if value is ...:
                del branch[last]
            else:
                branch[last] = value
        file = tmp_path / "edited.yaml"
        file.write_text(yaml.safe_dump(tree))
        return file

    return edit


PUBLISHED = {
    "cluster.nodes": 1,
    "cluster.devices_per_node": 8,
    "cluster.mode": "collocated",
    "cluster.placement": {"actor": "0-7", "inference": "0-7", "rollout": "0-7"},
    "trainer.schedule.kind": "sequential",
    "trainer.prompts_per_step": 512,
    "trainer.mini_batches": 2,
    "trainer.seed": 1234,
    "algorithm.n_samples": 4,
    "algorithm.baseline": "group",
    "algorithm.aggregation": "token-mean",
    "algorithm.kl_coef": 0.001,
    "algorithm.kl_estimator": "k3",
    "algorithm.clip_low": 0.2,
    "algorithm.clip_high": 0.2,
    "algorithm.dual_clip": None,
    "algorithm.recompute_logprobs": True,
    "rollout.sampling.temperature": 1.0,
    "rollout.sampling.top_k": -1,
    "rollout.sampling.stop": ["</search>", "</answer>"],
    "rollout.engine.memory_fraction": 0.75,
    "rollout.engine.attention_backend": "triton",
    "rollout.engine.max_running": 128,
    "rollout.engine.cuda_graphs": True,
    "rollout.engine.dtype": "bfloat16",
    "model.dtype": "bfloat16",
    "model.recompute": True,
    "model.path": "/path/to/model/Qwen2.5-3B-Instruct",
    "task.max_total_tokens": 7096,
    "task.max_prompt_tokens": 4096,
    "task.max_turn_tokens": 3000,
    "task.max_turns": 1,
    "task.max_observation_tokens": 500,
    "task.train_path": "/path/to/train.jsonl",
    "search.url": "http://127.0.0.1:8000",
    "search.topk": 3,
    "actor.micro_batch_tokens": 11008,
    "inference.micro_batch_tokens": 11008,
    "actor.optimizer.lr": 1e-6,
    "actor.optimizer.beta2": 0.95,
    "actor.optimizer.eps": 1e-5,
    "actor.optimizer.clip_grad": 0.8,
    "actor.optimizer.warmup_fraction": 0.285,
    "actor.optimizer.decay": "constant",
    "eval.interval": 25,
    "checkpoint.interval": 25,
    "cluster.call_timeout_s": 1800.0,
    "reward.terms": {"exact_match": 1.0},
    "reward.max_answer_tags": 10,
    "reward.many_answers_score": 0.25,
    "tracking.tensorboard": True,
    "tracking.wandb": False,
    "name": "searchr1-grpo-qwen2.5-3b-ins",
}
"""What RLinf's published file says, in our words, by hand."""


def test_the_published_settings_arrive() -> None:
    config = load(TRAIN)
    assert {key: part(config, key) for key in PUBLISHED} == PUBLISHED


def test_an_evaluation_is_drawn_as_its_file_says() -> None:
    config = load(EVAL)
    assert (config.eval.samples, config.eval.temperature, config.eval.limit) == (1, 1.0, 1000)
    assert config.task.eval_path == "/path/to/eval.jsonl"
    assert config.cluster.placement["rollout"] == "0-7"
    assert load(EVAL, "algorithm.sampling_params.do_sample=False").eval.temperature == 0.0
    assert load(EVAL, "data.data_size=-1").eval.limit is None


def test_the_paths_are_the_ones_to_fill_in() -> None:
    for file, count in ((TRAIN, 3), (EVAL, 2)):
        lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
        assert sum("/path/to/" in line for line in lines) == count


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("rollout.model.precision", "fp16", "write bf16"),
        ("actor.optim.fp16", True, "write False"),
        ("algorithm.early_stop_imp_ratio", 5.0, "write null"),
        ("algorithm.shuffle_rollout", True, "write False"),
        ("algorithm.adv_type", "reinpp", "algorithm=NAME"),
        ("algorithm.kl_penalty_type", "kl", "low_var_kl"),
        ("algorithm.sampling_params.min_new_tokens", 5, "write 1"),
        ("algorithm.sampling_params.do_sample", False, "write True"),
        ("algorithm.normalize_advantages", True, "advantage_scale=whiten"),
        ("agentloop.maxturn", 0, "at least once"),
        ("agentloop.tool_response_truncate_side", "left", "write right"),
        ("rollout.detokenize", False, "write True"),
        ("rollout.rollout_backend", "vllm", "write sglang"),
        ("rollout.cuda_graph_max_bs", 64, "128 or more"),
        ("rollout.pipeline_parallel_size", 2, "write 1"),
        ("runner.enable_dynamic_batch_size", False, "max_tokens_per_mbs"),
        ("runner.logger.logger_backends", ["swanlab"], "tensorboard, wandb"),
        ("runner.task_type", "embodied", "write reasoning"),
        ("data.train_data_paths", ["a.jsonl", "b.jsonl"], "rlsys data prepare merge"),
        ("data.shuffle", False, "write True"),
        ("data.answer_key", "answers", "solutions"),
        ("tools.search.server_addr", "nowhere", "HOST:PORT"),
        ("actor.training_backend", "fsdp", "write megatron"),
        ("actor.model.recompute_granularity", "selective", "write full"),
        ("actor.megatron.use_profiler", True, "trace.json"),
        ("critic.use_critic_model", True, "algorithm=ppo"),
        ("reward.use_reward_model", True, "reward.terms.judge"),
        ("cluster.component_placement", {"actor,rollout": "0-1:0-3"}, "ranks alone"),
        ("cluster.component_placement", {"actor": "0-3", "rollout": "4-7"}, "inference"),
        ("cluster.component_placement", {"actor,rollout,critic": "all"}, "critic is no group"),
        ("cluster.component_placement", {"actor": "all"}, "rollout"),
        ("cluster.component_placement", "all", "such as"),
        ("defaults", ["model/qwen"], "one file"),
    ],
)
def test_what_cannot_be_honoured_is_refused(edited: Edited, key: str, value: Any, named: str) -> None:
    (line,) = complaints(edited(**{key: value}))
    assert f"{key}=" in line
    assert named in line


def test_an_unknown_key_is_named_with_the_one_that_was_meant(edited: Edited) -> None:
    (line,) = complaints(edited(**{"rollout.gpu_memory_utilisation": 0.5}))
    assert "rollout.gpu_memory_utilisation is not a key" in line
    assert "did you mean rollout.gpu_memory_utilization?" in line
    (line,) = complaints(TRAIN, "runner.max_stepz=3")
    assert "did you mean runner.max_steps?" in line


def test_everything_wrong_is_said_at_once(edited: Edited) -> None:
    file = edited(**{"rollout.detokenize": False, "actor.seed": 7, "data.val_data_paths": ..., "data.colour": "red"})
    lines = complaints(file)
    assert len(lines) == 4
    assert all(line.startswith(f"{file}: ") for line in lines)
    said = "\n".join(lines)
    assert "data.val_data_paths has no value" in said
    assert "actor.seed and data.seed say different things" in said


def test_a_reference_to_nothing_is_a_sentence(edited: Edited) -> None:
    (line,) = complaints(edited(**{"runner.seq_length": "${nowhere}"}))
    assert "nowhere" in line


@pytest.mark.parametrize(
    ("place", "mode", "placement"),
    [
        ({"actor,rollout,reward": "all"}, Mode.collocated, ("0-7", "0-7", "0-7")),
        ({"actor,inference,rollout": "0-3"}, Mode.collocated, ("0-3", "0-3", "0-3")),
        (
            {"actor": "0-3", "inference": 4, "rollout": "5-7", "reward": "0-1"},
            Mode.disaggregated,
            ("0-3", "4", "5-7"),
        ),
    ],
)
def test_placements(edited: Edited, place: dict[str, Any], mode: Mode, placement: tuple[str, ...]) -> None:
    config = load(edited(**{"cluster.component_placement": place}))
    assert config.cluster.mode is mode
    assert tuple(config.cluster.placement[name] for name in ("actor", "inference", "rollout")) == placement
    expected = "sequential" if mode is Mode.collocated else "pipelined"
    assert config.trainer.schedule.kind == expected


@pytest.mark.parametrize("key", ["actor.offload_optimizer", "actor.offload_weight", "actor.offload_grad"])
def test_what_stays_on_a_device_of_its_own_need_not_be_offloaded(edited: Edited, key: str) -> None:
    apart = {"cluster.component_placement": {"actor": "0-3", "inference": 4, "rollout": "5-7"}}
    assert load(edited(**{key: False}, **apart)).cluster.mode is Mode.disaggregated
    (line,) = complaints(edited(**{key: False}))
    assert f"{key}=false cannot be honoured" in line
    assert "write True" in line


def test_all_of_two_nodes_are_sixteen_devices(edited: Edited) -> None:
    changes = {"cluster.num_nodes": 2}
    shared = load(edited(**changes)).cluster
    assert len(parse_ranks(shared.placement["actor"], "actor")) == 16
    assert shared.sync_mode is SyncMode.disk, "all that works for groups that share devices of several machines"
    apart = {"actor": "0-7", "inference": "8", "rollout": "9-15"}
    config = load(edited(**changes, **{"cluster.component_placement": apart}))
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
def test_steps_are_those_of_the_epochs_and_no_more_than_said(
    tmp_path: Path, settings: Sequence[str], steps: int
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": "Who?", "solutions": ["I"]}) + "\n\n" for _ in range(100)))
    config = load(TRAIN, f"data.train_data_paths=[{data}]", "data.rollout_batch_size=16", *settings)
    assert config.trainer.steps == steps


def test_fewer_rows_than_a_batch_are_refused(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "Who?", "solutions": ["I"]}\n')
    (line,) = complaints(TRAIN, f"data.train_data_paths={data}")
    assert f"{data} has 1 rows" in line


def test_the_rate_rises_over_as_many_optimiser_steps_as_in_rlinf() -> None:
    """Megatron's warm-up: lr_warmup_fraction * lr_decay_iters optimiser steps."""
    given = ("runner.max_epochs=null", "runner.max_steps=200", "actor.lr_sched.lr_decay_iters=662")
    config = load(TRAIN, *given)
    optimiser_steps = config.trainer.steps * config.trainer.mini_batches
    assert config.actor.optimizer.warmup_fraction * optimiser_steps == pytest.approx(0.285 * 662)
    (line,) = complaints(TRAIN, *given, "runner.max_steps=20")
    assert "actor.lr_sched.lr_decay_iters=662" in line
    (line,) = complaints(TRAIN, *given, "actor.lr_sched.lr_decay_style=linear")
    assert "400 optimiser steps" in line


def test_overrides_speak_either_language_and_go_before_the_file() -> None:
    config = load(
        TRAIN,
        "profile=cpu",
        "rollout.model.model_path=a model",
        "algorithm.group_size=8",
        "cluster.component_placement={actor: 0, inference: 1, rollout: 2}",
        "trainer.seed=5",
        "algorithm.kl_estimator=k2",
        "reward.terms={exact_match: 2.0}",
    )
    assert (config.model.path, config.algorithm.n_samples, config.trainer.seed) == ("a model", 8, 5)
    assert config.cluster.placement == {"actor": "0", "inference": "1", "rollout": "2"}
    assert (part(config, "algorithm.kl_estimator"), config.reward.terms) == ("k2", {"exact_match": 2.0})
    assert config.cluster.device is Device.cpu  # The profile, and what the file says too.
    assert (config.model.dtype, config.rollout.engine.memory_fraction) == (Dtype.float32, 0.5)
    assert load(TRAIN).cluster.device is Device.gpu  # Nothing of it reaches the next.


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("trainer.stepz=5", "did you mean trainer.steps?"),
        ("profile=tpu", "profile=tpu is not a choice of profile"),
    ],
)
def test_a_bad_override_in_our_words_is_named(override: str, named: str) -> None:
    (line,) = complaints(TRAIN, override)
    assert named in line


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("0.0.0.0:8000", "http://127.0.0.1:8000"),
        ("10.0.0.7:9000", "http://10.0.0.7:9000"),
        ("http://node3:8000/retrieve", "http://node3:8000"),
    ],
)
def test_addresses_of_servers(address: str, url: str) -> None:
    assert load(TRAIN, f"tools.search.server_addr={address}").search.url == url


def test_every_rule_leads_to_a_key_of_ours() -> None:
    known = {*schema_keys(), *free_maps(), "tracking"}
    assert {ours for rule in rules().values() if rule for ours in rule.ours} <= known


def test_a_config_of_ones_own_builds_on_the_projects_from_anywhere(tmp_path: Path) -> None:
    file = tmp_path / "my configs" / "mine.v2.yaml"
    file.parent.mkdir()
    file.write_text("defaults: [searchr1_tiny_cpu, override algorithm: rloo, _self_]\nname: mine\n")
    config = load_config(str(file), ["trainer.steps=3"])
    assert (config.name, config.trainer.steps, config.cluster.device) == ("mine", 3, Device.cpu)
    assert part(config, "algorithm.baseline") == "leave_one_out"
    with pytest.raises(UserError, match=r"no such\.yaml does not exist"):
        load_config(str(file.with_name("no such.yaml")))
