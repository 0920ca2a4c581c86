"""Tests of validation: configs that cannot run are refused before anything starts, and each problem has its key."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import UnionType
from typing import get_args, get_origin, get_type_hints

import pytest

from rlsys.cluster.planning.placement import engine_problems, parallel_problems, parse_ranks
from rlsys.config.bounds import out_of_range
from rlsys.config.derived import needs_server
from rlsys.config.problems import token_of
from rlsys.config.schema import Layers, ParallelConfig, RunConfig, schema_groups, schema_keys
from rlsys.errors import Code, UserError
from rlsys.orchestrator.validate import find_problems, validate
from rlsys.weights.weight_map import YarnScaling, architecture_of
from tests.support.refusals import refused
from tests.support.tiny_shape import SHAPE

TinyRun = Callable[..., RunConfig]
APART = "cluster.placement={actor: 0-1, inference: 2, rollout: 3}"
APPEND = ("algorithm.old_logprobs=engine", "task.token_mode=append", "task.train_eos=false")


def keys_of(config: RunConfig) -> set[str]:
    return {problem.key for problem in find_problems(config)}


CALL = "cluster.call_timeout_s"
STAGE = "cluster.stage_timeout_s"
SPOILT: dict[str, dict[str, tuple[str, Code]]] = {
    "numbers, batches and sizes": {
        "trainer.schedule={kind: async, max_staleness: -1}": ("trainer.schedule.max_staleness", "out_of_range"),
        "algorithm.curation.oversample=0.5": ("algorithm.curation.oversample", "out_of_range"),
        "model.lora.dropout=1": ("model.lora.dropout", "out_of_range"),
        "model.lora.rank=4|model.lora.targets=[q_proj, w_proj]": ("model.lora.targets", "unknown"),
        "actor.optimizer=muon": ("actor.optimizer.kind", "conflict"),
        "trainer.mini_batches=33": ("trainer.mini_batches", "conflict"),
        "actor.micro_batch_tokens=512": ("actor.micro_batch_tokens", "conflict"),
        "inference.micro_batch_tokens=512": ("inference.micro_batch_tokens", "conflict"),
        "cluster.sync_bucket_bytes=1000": ("cluster.sync_bucket_bytes", "mismatch"),
        "algorithm.kl_estimator={kind: full_reverse, topk_tokens: 321}": (
            "algorithm.kl_estimator.topk_tokens",
            "mismatch",
        ),
    },
    "contradictions": {
        "algorithm.old_logprobs=engine": ("algorithm.old_logprobs", "conflict"),
        "algorithm.kl_estimator=k1": ("algorithm", "conflict"),
        "task.max_total_tokens=100": ("task.max_total_tokens", "conflict"),
        "model.lora.sync=adapters": ("model.lora.sync", "conflict"),
        "task.tags.answer=search": ("task.tags", "conflict"),
        "eval.temperature=1|compat.sampled_validation=true": ("eval.temperature", "conflict"),
        "actor.optimizer.min_lr=1": ("actor.optimizer.min_lr", "conflict"),
        "actor.optimizer.overlap_param_gather=true": ("actor.optimizer.overlap_param_gather", "conflict"),
        "checkpoint.may_differ=[trainer.stepz]": ("checkpoint.may_differ", "unknown"),
        "+reward.terms.no_term=1": ("reward.terms.no_term", "unknown"),
    },
    "missing files": {
        "model.lora.rank=-1": ("model.lora.rank", "out_of_range"),
        "model.path=nowhere": ("model.path", "not_found"),
        "task.train_path=no.jsonl": ("task.train_path", "not_found"),
        "task.eval_path=no.parquet": ("task.eval_path", "not_found"),
        "search.index=no": ("search.index", "not_found"),
        "search.replicas=[http://b:8000]": ("search.replicas", "conflict"),
        "search.token_env=NOT_EXPORTED": ("search.token_env", "missing"),
        "search.cassette={mode: record, path: pyproject.toml}": ("search.cassette.mode", "exists"),
        "eval.samples=4": ("eval.samples", "conflict"),
    },
    "no index": {
        "search.index=null": ("search.url", "missing"),
        "search.cassette.mode=extend": ("search.cassette.mode", "missing"),
    },
    "addresses": {
        "search.url=localhost:8000": ("search.url", "malformed"),
        "search.replicas=[ftp://b]": ("search.replicas", "malformed"),
        "search.hedge_after_s=30": ("search.hedge_after_s", "conflict"),
        "search.cassette.path=none.jsonl": ("search.cassette.path", "not_found"),
    },
    "repeated server": {
        "search.url=http://a:8000|search.replicas=[http://a:8000]": ("search.replicas", "conflict"),
        "search.enabled=false": ("task.agent.invalid_message", "conflict"),
    },
    "groups that share devices": {
        "cluster.mode=colocated": ("cluster.mode", "conflict"),
        "trainer.schedule.kind=pipelined": ("trainer.schedule.kind", "conflict"),
        "cluster.device=gpu|cluster.sync_mode=broadcast": ("cluster.sync_mode", "conflict"),
    },
    "an update that waits for episodes": {
        f"trainer.schedule={{kind: async, on_update: finish}}|{CALL}=500": (CALL, "conflict"),
        f"trainer.schedule={{kind: async, on_update: finish}}|rollout.max_episodes=4|{CALL}=1000": (CALL, "conflict"),
        f"trainer.schedule={{kind: async, on_update: finish}}|rollout.max_episodes=4|{STAGE}.sync=1000": (
            f"{STAGE}.sync",
            "conflict",
        ),
        f"{STAGE}.training=1801": (f"{STAGE}.training", "conflict"),
    },
    "a switch that waits for episodes": {
        f"trainer.schedule={{kind: async, on_update: finish}}|{STAGE}.sync=600": (f"{STAGE}.sync", "conflict"),
    },
}


@pytest.mark.parametrize("spoilt", SPOILT.values(), ids=SPOILT)
def test_every_problem_is_listed_at_once_by_key_and_code(
    tiny_run: TinyRun, spoilt: dict[str, tuple[str, Code]]
) -> None:
    config = tiny_run(*"|".join(spoilt).split("|"))
    found = list(find_problems(config))
    codes = {one.key: one.code for one in found}
    assert codes == codes | dict(spoilt.values())
    assert len({str(one) for one in found}) == len(found)
    with refused(codes[found[0].key], found[0].key) as caught:
        validate(config)
    assert str(caught.value).splitlines() == [*map(str, found)]


THREE_ACTORS = "cluster.placement={actor: 0-2, inference: 3, rollout: 4}"
THREE_ENGINES = "cluster.placement={actor: 0, inference: 1, rollout: 2-4}"


@pytest.mark.parametrize(
    ("keys", "overrides"),
    [
        ("cluster.placement.actor", ["cluster.placement.actor=0-1"]),
        (
            "cluster.placement.actor actor.parallel.pp actor.parallel.tp",
            [THREE_ACTORS, "actor.parallel={pp: 3, tp: 3}"],
        ),
        ("actor.parallel.pp_layers actor.parallel.ep", [APART, "actor.parallel={pp: 2, pp_layers: [1, 2], ep: 2}"]),
        ("actor.packing", [APART, "actor.parallel.cp=2", "actor.packing=padded"]),
        ("actor.parallel.sequence_parallel", ["actor.parallel.sequence_parallel=true"]),
        ("task.max_total_tokens", ["task.max_total_tokens=4096"]),
        ("eval.engines", ["eval.engines=1"]),
        ("cluster.max_engines", [THREE_ENGINES, "cluster.max_engines=2"]),
        ("cluster.max_engines", ["cluster.mode=colocated", "cluster.max_engines=2"]),
        ("cluster.placement.rollout", [THREE_ENGINES, "rollout.engine.tp=2"]),
        ("rollout.engine.tp", [THREE_ENGINES, "rollout.engine.tp=3"]),
        ("cluster.placement.judge", ["cluster.placement.judge=3"]),
    ],
)
def test_impossible_layout_is_refused_by_its_keys(tiny_run: TinyRun, keys: str, overrides: list[str]) -> None:
    assert {*keys.split()} <= keys_of(tiny_run(*overrides))


def test_context_and_kv_cache_hold_one_episode_beside_what_the_engine_reserves(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    key, total = "rollout.engine.kv_cache_tokens", tiny_run().task.max_total_tokens
    assert key in keys_of(tiny_run(f"{key}={total + 5}"))
    assert key not in keys_of(tiny_run(f"{key}={total + 6}")) | keys_of(tiny_run(f"{key}=null"))
    for kind, positions, fits in (("sglang", 5, False), ("sglang", 6, True), ("transformers", 0, True)):
        shape = SHAPE | {"max_position_embeddings": total + positions}
        (tmp_path / "model" / "config.json").write_text(json.dumps(shape))
        assert ("task.max_total_tokens" not in keys_of(tiny_run(f"rollout.engine={{kind: {kind}}}"))) == fits


def test_either_way_out_of_a_contradiction_is_accepted(tiny_run: TinyRun) -> None:
    layout = (APART, "actor.parallel.pp=2", "actor.parallel.pp_layers=[1,3]")
    validate(tiny_run(*APPEND, *layout, "algorithm.kl_coef=0", "eval.samples=4", "eval.temperature=0.5"))
    validate(tiny_run("eval.samples=4", "compat.sampled_validation=true", "trainer.mini_batches=5"))
    validate(tiny_run("trainer.schedule.kind=async", f"{CALL}=500", f"{STAGE}.sync=500"))
    tools = "task.tools=[rlsys.rollout.tools.calculator.Calculator]"
    config = tiny_run(tools, "search.enabled=false", "search.index=null", "task.agent.invalid_message=Answer.")
    validate(config)
    assert not needs_server(config.search)


def test_negative_and_infinite_numbers_are_refused_for_every_key() -> None:
    """All keys of a group are invalid at once, and each must be named, in groups of every kind."""
    for path, valid in schema_groups(RunConfig()):
        kinds = {
            name: {*(get_args(hint) or [hint])} & {int, float}
            for name, hint in get_type_hints(type(valid)).items()
            if get_origin(hint) in (None, UnionType)
        }
        for bad in (-7, math.nan, math.inf):
            group, spoilt = copy.copy(valid), set()
            for name, numbers in kinds.items():
                if float in numbers or (int in numbers and bad == -7):
                    setattr(group, name, float(bad) if float in numbers else bad)
                    spoilt.add(f"{path}.{name}")
            assert {key for key, _ in out_of_range(group, f"{path}.")} >= spoilt


def test_number_may_equal_its_bound_and_not_exceed_it(tiny_run: TinyRun) -> None:
    beyond = {"rollout.sampling.top_k": 0, "actor.optimizer.beta1": 1.0, "trainer.steps": 0, "cluster.threads": 0}
    config = tiny_run(*(f"{key}={value}" for key, value in beyond.items()))
    assert [key for key, _ in out_of_range(config)] == sorted(beyond, key=[*schema_keys()].index)
    edges = ("search.retries=0", "task.max_turns=0", "actor.optimizer.warmup_fraction=1.0", "eval.limit=null")
    validate(tiny_run(*edges, "eval.interval=0", "algorithm.kl_coef=0.0"))


def test_ranks_are_parsed_in_order_and_malformed_ones_are_refused() -> None:
    assert [parse_ranks(text, "key") for text in ("0-3", "4, 0-1", "7-7")] == [(0, 1, 2, 3), (4, 0, 1), (7,)]
    for text in ("3,3", "3-5,4", "5-3", "gpu0", "", "-1"):
        with pytest.raises(UserError):
            parse_ranks(text, "key")


MIXTURE = {**SHAPE, "model_type": "qwen3_moe", "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 16}
MIXTURE |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("key", "parallel"),
    [("ep", "{ep: 4}"), ("ep", "{pp: 2, ep: 3}"), ("tp", "{tp: 4, sequence_parallel: true}"), ("tp", "{tp: 2}")],
)
def test_impossible_layout_of_a_mixture_of_experts_is_refused_by_its_key(
    tiny_run: TinyRun, tmp_path: Path, key: str, parallel: str
) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps(MIXTURE))
    place = "cluster.placement={actor: 0-3, inference: 4, rollout: 5}"
    assert f"actor.parallel.{key}" in keys_of(tiny_run(place, f"actor.parallel={parallel}"))


@pytest.mark.parametrize(
    ("tp", "sizes", "fits"),
    [
        (2, {}, True),
        (14, {}, False),
        (2, {"experts": 4, "ffn": 97}, True),
        (2, {"experts": 4, "ffn": 97, "dense_layers": 1}, False),
        (2, {"experts": 4, "shared_experts": 1, "expert_ffn": 33}, False),
        (2, {"experts": 4, "shared_experts": 2, "expert_ffn": 33}, True),
    ],
)
def test_tensor_parallelism_divides_the_width_of_mlps_and_shared_experts(
    tp: int, sizes: Mapping[str, int], fits: bool
) -> None:
    """A model with Qwen2.5-0.5B's sizes or with a mixture of experts, of which whole ones are distributed."""
    small = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}
    model = replace(architecture_of(SHAPE | small), **sizes)
    found = parallel_problems("actor", ParallelConfig(tp=tp, sequence_parallel=True), tp, model)
    assert [one.key for one in found] == ([] if fits else ["actor.parallel.tp"])


@pytest.mark.parametrize(
    ("sizes", "fits"),
    [
        ({}, True),
        ({"ffn": 97}, False),
        ({"heads": 12, "kv_heads": 3}, False),
        ({"experts": 4, "expert_ffn": 33}, False),
        ({"experts": 4, "ffn": 97, "expert_ffn": 34}, True),
    ],
)
def test_engine_divides_the_width_of_experts_too(tiny_run: TinyRun, sizes: Mapping[str, int], fits: bool) -> None:
    model = replace(architecture_of(SHAPE), **sizes)
    config = tiny_run("cluster.device=gpu", "rollout.engine.tp=2")
    found = [one.key for one in engine_problems(config, 2, model)]
    assert ("rollout.engine.tp" in found) is not fits


def test_sequence_beyond_the_sliding_window_needs_an_engine_that_has_the_window(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    total = tiny_run().task.max_total_tokens
    transformers = "rollout.engine={kind: transformers}"
    for family, window, engine, fits in (
        ("mistral", total, (), True),
        ("mistral", total - 1, (), False),
        ("mistral", total - 1, (transformers,), True),
        ("mistral", None, (), True),
        ("gemma3_text", total - 1, (), True),
    ):
        shape = {**SHAPE, "model_type": family, "sliding_window": window}
        (tmp_path / "model" / "config.json").write_text(json.dumps(shape))
        assert ("task.max_total_tokens" not in keys_of(tiny_run(*engine))) == fits


def test_latent_attention_without_yarn_needs_another_engine_than_sglang_on_a_cpu(tiny_run: TinyRun) -> None:
    latent = replace(architecture_of(SHAPE), kv_lora_rank=24)
    yarn = replace(latent, rope=YarnScaling(4.0, 512, 32.0, 1.0, 0.7, 0.7, True, 1.0))
    for model, settings, fits in (
        (latent, (), False),
        (yarn, (), True),
        (latent, ("cluster.device=gpu",), True),
        (latent, ("rollout.engine={kind: transformers}",), True),
    ):
        found = [one.key for one in engine_problems(tiny_run(*settings), 1, model)]
        assert ("rollout.engine.kind" not in found) is fits


def test_gpt_oss_needs_layers_and_an_engine_that_were_tried(tiny_run: TinyRun, tmp_path: Path) -> None:
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(SHAPE | {"model_type": "gpt_oss", "num_local_experts": 6, "num_experts_per_tok": 2}))
    transformers = tiny_run("rollout.engine={kind: transformers}")
    for run, layers, missing in (
        (transformers, "local", set()),
        (transformers, "te", {"model.layers"}),
        (tiny_run(), "local", {"rollout.engine.kind"}),
    ):
        run.model.layers = Layers(layers)
        assert {"model.layers", "rollout.engine.kind"} & {*keys_of(run)} == missing


def test_layers_of_transformer_engine_attend_within_a_window_without_context_parallelism(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    run = tiny_run(APART, "actor.parallel.cp=2", "actor.packing=packed", "actor.micro_batch_tokens=100000")
    for window, layers, fits in ((500, "te", False), (500, "local", True), (run.task.max_total_tokens, "te", True)):
        shape = {**SHAPE, "model_type": "gemma3_text", "sliding_window": window}
        (tmp_path / "model" / "config.json").write_text(json.dumps(shape))
        run.model.layers = Layers(layers)
        assert ("actor.parallel.cp" not in keys_of(run)) == fits


@pytest.mark.parametrize(("value", "code"), [(" ", "missing"), ("two\nlines", "malformed")])
def test_token_is_read_without_the_white_space_around_it(
    value: str, code: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", " secret\n")
    assert [token_of("search.token_env", name) for name in ("SOME_TOKEN", None)] == ["secret", None]
    monkeypatch.setenv("SOME_TOKEN", value)
    with refused(code, "search.token_env"):
        token_of("search.token_env", "SOME_TOKEN")
