"""Configs that cannot run are refused before anything starts; every problem names its key."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from types import UnionType
from typing import get_args, get_origin, get_type_hints

import pytest

from rlsys.cluster.planning.placement import parse_ranks
from rlsys.cluster.planning.plan import make_plan
from rlsys.config.bounds import limits_of, out_of_range
from rlsys.config.derived import needs_server
from rlsys.config.schema import RunConfig, leaf_types, schema_groups, schema_keys
from rlsys.errors import Code, UserError
from rlsys.orchestrator.validate import find_problems, validate
from tests.config.conftest import SHAPE
from tests.support.refusals import refused

TinyRun = Callable[..., RunConfig]
APART = "cluster.placement={actor: 0-1, inference: 2, rollout: 3}"
THREE_ACTORS = "cluster.placement={actor: 0-2, inference: 3, rollout: 4}"
THREE_ENGINES = "cluster.placement={actor: 0, inference: 1, rollout: 2-4}"
APPEND = ("algorithm.recompute_logprobs=false", "task.token_mode=append", "task.train_eos=false")
SERVER = "search.url=http://a:8000"


def keys_of(config: RunConfig) -> set[str]:
    """Keys of its problems."""
    return {problem.key for problem in find_problems(config)}


def complaints(config: RunConfig) -> list[str]:
    with pytest.raises(UserError) as caught:
        validate(config)
    return str(caught.value).splitlines()


def test_the_config_that_the_others_spoil_is_valid(tiny_run: TinyRun) -> None:
    validate(tiny_run())
    validate(tiny_run("trainer.mini_batches=5"))


@pytest.mark.parametrize(
    ("code", "key", "overrides"),
    [
        ("out_of_range", "trainer.schedule.max_staleness", ["trainer.schedule={kind: async, max_staleness: -1}"]),
        ("out_of_range", "algorithm.curation.oversample", ["algorithm.curation.oversample=0.5"]),
        ("conflict", "trainer.mini_batches", ["trainer.mini_batches=33"]),
        ("conflict", "task.max_total_tokens", ["task.max_total_tokens=100"]),
        ("conflict", "actor.micro_batch_tokens", ["actor.micro_batch_tokens=512"]),
        ("conflict", "inference.micro_batch_tokens", ["inference.micro_batch_tokens=512"]),
        ("conflict", "algorithm.recompute_logprobs", ["algorithm.recompute_logprobs=false", "algorithm.kl_coef=0"]),
        ("conflict", "eval.temperature", ["eval.temperature=1", "compat.sampled_validation=true"]),
        ("conflict", "eval.samples", ["eval.samples=4"]),
        ("conflict", "actor.optimizer.min_lr", ["actor.optimizer.min_lr=1"]),
        ("conflict", "task.tags", ["task.tags.answer=search"]),
        ("unknown", "checkpoint.may_differ", ["checkpoint.may_differ=[trainer.stepz]"]),
        ("unknown", "reward.terms.no_term", ["+reward.terms.no_term=1"]),
        ("mismatch", "cluster.sync_bucket_bytes", ["cluster.sync_bucket_bytes=1000"]),
        ("mismatch", "algorithm.kl_topk_tokens", ["algorithm.kl_topk_tokens=321"]),
        ("not_found", "model.path", ["model.path=nowhere"]),
        ("not_found", "task.train_path", ["task.train_path=no.jsonl"]),
        ("not_found", "search.index", ["search.index=no"]),
        ("missing", "search.url", ["search.index=null"]),
        ("conflict", "search.replicas", ["search.replicas=[http://b:8000]"]),
        ("conflict", "search.replicas", [SERVER, "search.replicas=[http://a:8000]"]),
        ("conflict", "search.hedge_after_s", [SERVER, "search.hedge_after_s=0.5"]),
        ("malformed", "search.url", ["search.url=localhost:8000"]),
        ("malformed", "search.replicas", [SERVER, "search.replicas=[ftp://b]"]),
        ("missing", "search.token_env", ["search.token_env=NOT_EXPORTED"]),
        ("not_found", "search.cassette.path", ["search.cassette.path=none.jsonl"]),
        ("exists", "search.cassette.mode", ["search.cassette={mode: record, path: pyproject.toml}"]),
        ("missing", "search.cassette.mode", ["search.cassette.mode=record"]),
        ("conflict", "task.invalid_message", ["search.enabled=false"]),
        (
            "conflict",
            "cluster.call_timeout_s",
            ["trainer.schedule.kind=async", "cluster.call_timeout_s=500", "rollout.episode_timeout_s=600"],
        ),
    ],
)
def test_a_setting_that_cannot_run_is_refused_by_its_key(
    tiny_run: TinyRun, code: Code, key: str, overrides: list[str]
) -> None:
    with refused(code, key):
        validate(tiny_run(*overrides))


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("cluster.placement.actor", ["cluster.placement.actor=0-1"]),
        ("cluster.placement", ["cluster.placement.actor='3-5,4'"]),
        ("cluster.placement", ["cluster.placement.actor=5-3"]),
        ("cluster.placement", ["cluster.placement.actor=gpu0"]),
        ("cluster.placement", ["cluster.placement.judge=3"]),
        ("cluster.mode", ["cluster.mode=collocated"]),
        ("trainer.schedule.kind", ["cluster.mode=collocated"]),
        ("cluster.sync_mode", ["cluster.device=gpu", "cluster.mode=collocated", "cluster.sync_mode=broadcast"]),
        ("algorithm", ["algorithm.correction={kind: mask, low: 3}"]),
        ("algorithm", ["algorithm.correction.kind=truncate", *APPEND]),
        ("algorithm", APPEND),
        ("algorithm", ["rollout.sampling.top_k=20"]),
        ("cluster.placement.actor", [THREE_ACTORS, "actor.parallel.tp=2"]),
        ("actor.parallel.pp", [THREE_ACTORS, "actor.parallel.pp=3"]),
        ("actor.parallel.pp_layers", [APART, "actor.parallel={pp: 2, pp_layers: [1, 2]}"]),
        ("actor.parallel.tp", [THREE_ACTORS, "actor.parallel.tp=3"]),
        ("actor.parallel.ep", [APART, "actor.parallel.ep=2"]),
        ("eval.engines", [APART, "eval.engines=1"]),
        ("actor.parallel.cp", [APART, "actor.parallel.cp=2", "actor.packing=padded"]),
        ("actor.parallel.sequence_parallel", ["actor.parallel.sequence_parallel=true"]),
        ("task.max_total_tokens", ["task.max_total_tokens=4096"]),
        ("task.tools", ["task.tools=[no_such.Tool]"]),
        ("cluster.placement.rollout", [THREE_ENGINES, "rollout.engine.tp=2"]),
        ("rollout.engine.tp", [THREE_ENGINES, "rollout.engine.tp=3"]),
    ],
)
def test_a_layout_or_an_algorithm_that_cannot_run_names_its_key(
    tiny_run: TinyRun, key: str, overrides: list[str]
) -> None:
    found = keys_of(tiny_run(*overrides))
    assert key in found
    groups = {key[: len(".".join(key.split(".")[:depth]))] for key in schema_keys() for depth in range(1, 6)}
    assert all(one in groups or one.startswith(("cluster.placement.", "reward.terms.")) for one in found)


def test_every_problem_is_listed_at_once(tiny_run: TinyRun) -> None:
    spoilt = {
        "trainer.steps": "trainer.steps=0",
        "algorithm.n_samples": "algorithm.n_samples=1",
        "task.train_path": "task.train_path=no.jsonl",
        "cluster.placement.actor": "cluster.placement.actor=0-1",
        "actor.parallel.pp": "actor.parallel.pp=3",
        "rollout.engine.tp": "rollout.engine.tp=2",
    }
    config = tiny_run(*spoilt.values())
    assert spoilt.keys() <= keys_of(config)
    sentences = complaints(config)
    assert len(sentences) == len(set(sentences)) >= len(spoilt)


def test_contradictions_disappear_with_either_way_out(tiny_run: TinyRun) -> None:
    validate(tiny_run(*APPEND, "algorithm.kl_coef=0", "rollout.sampling.top_p=0.9"))
    validate(tiny_run(APART, "actor.parallel.pp=2", "actor.parallel.pp_layers=[1,3]"))
    validate(tiny_run("eval.samples=4", "eval.temperature=0.5"))
    validate(tiny_run("eval.samples=4", "compat.sampled_validation=true"))


def numeric_keys() -> dict[str, bool]:
    """Every key of the schema that is a number -> whether it is an integer."""
    kinds = {
        key: {*(get_args(hint) or [hint])}
        for key, hint in leaf_types().items()
        if get_origin(hint) in (None, UnionType)
    }
    return {key: int in kind for key, kind in kinds.items() if kind & {int, float}}


def test_every_number_has_a_bound() -> None:
    """By the type beside the field, which `get_type_hints` alone leaves out."""
    bounded = {
        f"{path}.{name}"
        for path, group in schema_groups(RunConfig())
        for name, hint in get_type_hints(type(group), include_extras=True).items()
        if limits_of(hint).bounds
    }
    assert numeric_keys().keys() <= bounded


def test_no_number_may_be_far_below_zero_or_infinite(tiny_run: TinyRun) -> None:
    """All of them at once, as each must be named all the same."""
    valid = tiny_run("trainer.schedule.kind=async")
    for bad in (-7, math.nan, math.inf):
        config, spoilt = copy.deepcopy(valid), set()
        for key, is_integer in numeric_keys().items():
            if not is_integer or bad == -7:
                *path, leaf = key.split(".")
                setattr(reduce(getattr, path, config), leaf, bad if is_integer else float(bad))
                spoilt.add(key)
        assert {key for key, _ in out_of_range(config)} >= spoilt


@pytest.mark.parametrize("setting", ["rollout.sampling.top_k=0", "actor.optimizer.beta1=1.0", "trainer.steps=0"])
def test_a_number_just_beyond_its_bound_is_refused(tiny_run: TinyRun, setting: str) -> None:
    with refused("out_of_range", setting.partition("=")[0]):
        validate(tiny_run(setting))


def test_a_number_at_its_bound_is_taken(tiny_run: TinyRun) -> None:
    edges = ("search.retries=0", "task.max_turns=0", "actor.optimizer.warmup_fraction=1.0", "eval.limit=null")
    validate(tiny_run(*edges, "eval.interval=0", "algorithm.kl_coef=0.0"))


@pytest.mark.parametrize("content", ["{not json", "[]", json.dumps({**SHAPE, "vocab_size": None}), "[" * 100_000])
def test_a_model_folder_with_another_config_is_refused(tiny_run: TinyRun, tmp_path: Path, content: str) -> None:
    config = tiny_run()
    (tmp_path / "model" / "config.json").write_text(content)
    with refused("malformed" if content in ("{not json", "[" * 100_000) else "unsupported", "model.path"):
        validate(config)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("0", (0,)), ("0-3", (0, 1, 2, 3)), ("4, 0-1", (4, 0, 1)), ("7-7", (7,)), ("10-11,2", (10, 11, 2))],
)
def test_ranks_are_read_in_their_order(text: str, ranks: tuple[int, ...]) -> None:
    assert parse_ranks(text, "key") == ranks


MIXTURE = {
    **SHAPE,
    "model_type": "qwen3_moe",
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("actor.parallel.ep", ["actor.parallel.ep=4"]),
        ("actor.parallel.ep", ["actor.parallel.pp=2", "actor.parallel.ep=3"]),
        ("actor.parallel.tp", ["actor.parallel.tp=2"]),
        ("actor.parallel.tp", ["actor.parallel.tp=4", "actor.parallel.sequence_parallel=true"]),
    ],
)
def test_a_layout_that_a_mixture_cannot_have_names_its_key(
    tiny_run: TinyRun, tmp_path: Path, key: str, settings: list[str]
) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps(MIXTURE))
    place = "cluster.placement={actor: 0-3, inference: 4, rollout: 5}"
    assert key in keys_of(tiny_run(place, *settings))


def test_without_a_search_neither_server_nor_index_is_needed(tiny_run: TinyRun) -> None:
    tools = "task.tools=[rlsys.rollout.tools.calculator.Calculator]"
    config = tiny_run(tools, "search.enabled=false", "search.index=null", "task.invalid_message=Answer.")
    validate(config)
    assert not needs_server(config.search)
    assert make_plan(config)["search"] == "none"
