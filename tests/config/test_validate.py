"""Configs that cannot run are refused before anything starts, in sentences that say what to change."""

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
from rlsys.config.bounds import limits_of
from rlsys.config.derived import needs_server
from rlsys.config.schema import RunConfig, leaf_types, schema_groups, schema_keys
from rlsys.errors import UserError
from rlsys.orchestrator.validate import find_problems, validate
from tests.config.conftest import SHAPE

TinyRun = Callable[..., RunConfig]
APART = "cluster.placement={actor: 0-1, inference: 2, rollout: 3}"


def complaints(config: RunConfig) -> list[str]:
    with pytest.raises(UserError) as caught:
        validate(config)
    return str(caught.value).splitlines()


def test_the_config_that_the_others_spoil_is_valid(tiny_run: TinyRun) -> None:
    validate(tiny_run())


@pytest.mark.parametrize("count", [1, 5, 32])
def test_mini_batches_may_be_uneven(count: int, tiny_run: TinyRun) -> None:
    """Of 32 questions."""
    validate(tiny_run(f"trainer.mini_batches={count}"))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["cluster.placement.actor=0-1"], ['actor="0-1"', 'inference="1"', "share rank 1"]),
        (["cluster.placement.actor='3,3'"], ['cluster.placement.actor="3,3"', "twice"]),
        (["cluster.placement.actor='3-5,4'"], ['cluster.placement.actor="3-5,4"', "twice"]),
        (["cluster.placement.actor=5-3"], ["5-3", "counts down", 'write "3-5"']),
        (["cluster.placement.actor=gpu0"], ['cluster.placement.actor="gpu0"', "not a list of ranks"]),
        (["cluster.placement.actor=''"], ['cluster.placement.actor=""', "not a list of ranks"]),
        (["cluster.placement.actor=-1"], ['cluster.placement.actor="-1"', "not a list of ranks"]),
        (["cluster.placement.judge=3"], ["cluster.placement.judge", "actor, inference, rollout, critic"]),
        (["cluster.mode=collocated"], ["cluster.mode=collocated", "same ranks", 'actor="0"']),
        (
            ["cluster.mode=collocated"],
            ["trainer.schedule.kind=pipelined", "set trainer.schedule.kind=sequential"],
        ),
        (["trainer.schedule.kind=async", "trainer.schedule.max_staleness=-1"], ["trainer.schedule.max_staleness=-1"]),
        (["algorithm.curation.oversample=0.5"], ["algorithm.curation.oversample=0.5", "at least 1"]),
        (
            ["algorithm.correction.kind=mask", "algorithm.correction.low=3"],
            ["algorithm.correction.low=3", "high=2", "either side of 1"],
        ),
        (
            [
                "algorithm.correction.kind=truncate",
                "algorithm.recompute_logprobs=false",
                "task.token_mode=append",
                "task.train_eos=false",
            ],
            ["algorithm.correction.kind=truncate", "algorithm.recompute_logprobs=true"],
        ),
        (
            ["trainer.schedule.kind=async", "cluster.call_timeout_s=500", "rollout.episode_timeout_s=600"],
            ["cluster.call_timeout_s=500", "rollout.episode_timeout_s=600", "on_update=continue"],
        ),
        (
            ["cluster.device=gpu", "cluster.mode=collocated", "cluster.sync_mode=broadcast"],
            ["cluster.sync_mode=broadcast", "cluster.mode=collocated", "use cluster.sync_mode=tensor"],
        ),
        (
            ["cluster.sync_bucket_bytes=1000"],
            ["cluster.sync_bucket_bytes=1000", "largest tensor", "raise it"],
        ),
        (["search.cassette.path=none.jsonl"], ["search.cassette.path=none.jsonl", "mode=record"]),
        (
            ["search.cassette.mode=record", "search.cassette.path=pyproject.toml"],
            ["search.cassette.path=pyproject.toml", "delete it", "extend"],
        ),
        (["search.cassette.mode=record"], ["search.cassette.mode=record", "search.cassette.path"]),
        (
            ["cluster.placement={actor: 0-2, inference: 3, rollout: 4}", "actor.parallel.tp=2"],
            ["cluster.placement.actor has 3 ranks", "actor.parallel", "2*1*1 = 2"],
        ),
        (
            ["cluster.placement={actor: 0, inference: 1-3, rollout: 4}", "inference.parallel.pp=2"],
            ["cluster.placement.inference has 3 ranks", "inference.parallel", "1*2*1 = 2"],
        ),
        (
            ["cluster.placement={actor: 0-2, inference: 3, rollout: 4}", "actor.parallel.pp=3"],
            ["actor.parallel.pp=3 does not divide", "4 layers", "pp_layers"],
        ),
        (
            [APART, "actor.parallel.pp=2", "actor.parallel.pp_layers=[1,2]"],
            ["actor.parallel.pp_layers=[1, 2]", "sum to the model's 4 layers"],
        ),
        (
            [APART, "actor.parallel.pp=2", "actor.parallel.pp_layers=[4]"],
            ["actor.parallel.pp_layers=[4]", "2 numbers"],
        ),
        (
            [APART, "actor.parallel.pp=2", "actor.parallel.pp_layers=[4,0]"],
            ["actor.parallel.pp_layers=[4, 0]", "at least one layer"],
        ),
        (
            ["cluster.placement={actor: 0-2, inference: 3, rollout: 4}", "actor.parallel.tp=3"],
            ["actor.parallel.tp=3", "4 attention heads"],
        ),
        ([APART, "actor.parallel.ep=2"], ["actor.parallel.ep=2", "the model has none"]),
        (["eval.samples=4"], ["eval.samples=4 greedy answers", "eval.temperature above 0"]),
        (
            ["eval.temperature=1", "compat.sampled_validation=true"],
            ["eval.temperature=1 contradicts compat.sampled_validation=true", "set eval.temperature=0"],
        ),
        ([APART, "eval.engines=1"], ["eval.engines=1", "leaves none"]),
        (
            ["cluster=one_slot", "trainer.schedule.kind=sequential", "eval.engines=1"],
            ["eval.engines=1", "cluster.mode=collocated"],
        ),
        (
            [APART, "actor.parallel.cp=2", "actor.packing=padded"],
            ["actor.parallel.cp=2", "actor.packing is padded"],
        ),
        (
            [APART, "actor.parallel.cp=2", "task.max_total_tokens=1021", "actor.micro_batch_tokens=1023"],
            ["actor.micro_batch_tokens=1023", "rounds up to 1024"],
        ),
        (["actor.parallel.sequence_parallel=true"], ["actor.parallel.sequence_parallel=true", "tp above 1"]),
        (["trainer.mini_batches=33"], ["trainer.mini_batches=33", "trainer.prompts_per_step=32", "lower it"]),
        (["algorithm.n_samples=1"], ["algorithm.n_samples=1", "at least 2"]),
        (
            ["algorithm.recompute_logprobs=false", "algorithm.kl_coef=0", "task.train_eos=false"],
            ["algorithm.recompute_logprobs=false", "task.token_mode=retokenize", "append"],
        ),
        (
            ["algorithm.recompute_logprobs=false", "task.train_eos=false", "task.token_mode=append"],
            ["algorithm.kl_coef=0.001", "algorithm.recompute_logprobs=true"],
        ),
        (
            ["algorithm.recompute_logprobs=false", "algorithm.kl_coef=0", "task.token_mode=append"],
            ["task.train_eos=true", "algorithm.recompute_logprobs=false"],
        ),
        (["rollout.sampling.top_p=0.9"], ["rollout.sampling.top_p=0.9", "top_p=1"]),
        (["rollout.sampling.top_k=20"], ["top_k=20", "top_k=-1"]),
        (["actor.optimizer.min_lr=1"], ["actor.optimizer.min_lr=1.0", "actor.optimizer.lr=0.0001"]),
        (["task.tags.answer=search"], ["answer=search", "different words"]),
        (["task.max_total_tokens=100"], ["task.max_total_tokens=100", "task.max_turn_tokens=64"]),
        (["task.max_total_tokens=4096"], ["task.max_total_tokens=4096", "2048 positions"]),
        (["actor.micro_batch_tokens=512"], ["actor.micro_batch_tokens=512", "task.max_total_tokens=1024"]),
        (["inference.micro_batch_tokens=512"], ["inference.micro_batch_tokens=512", "1024"]),
        (["model.path=nowhere"], ["model.path=nowhere", "config.json"]),
        (["task.train_path=no.jsonl"], ["task.train_path=no.jsonl does not exist"]),
        (["task.eval_path=no.parquet"], ["task.eval_path=no.parquet does not exist"]),
        (["search.index=no"], ["search.index=no is not an index", "rlsys search index"]),
        (["search.index=null"], ["search.url and search.index are both null"]),
        (["search.replicas=[http://b:8000]"], ["search.replicas=['http://b:8000']", "search.url"]),
        (
            ["search.url=http://a:8000", "search.hedge_after_s=0.5"],
            ["search.hedge_after_s=0.5", "search.replicas"],
        ),
        (
            ["search.url=http://a:8000", "search.replicas=[http://b:8000]", "search.hedge_after_s=30"],
            ["search.hedge_after_s=30", "search.timeout_s=30"],
        ),
        (
            ["search.url=http://a:8000", "search.replicas=[http://a:8000]"],
            ["search.replicas=['http://a:8000']", "once"],
        ),
        (["search.url=localhost:8000"], ["search.url=localhost:8000", "http://127.0.0.1:8000"]),
        (["search.url=http://a:8000", "search.replicas=[ftp://b]"], ["search.replicas=ftp://b", "http://"]),
        (["task.tools=[no_such.Tool]"], ["task.tools: no_such cannot be imported"]),
        (
            ["task.tools=[rlsys.rollout.tools.calculator.Calculator]", "task.tags.search=calculator"],
            ["has the tag calculator, which is that of task.tags.search"],
        ),
        (["search.enabled=false"], ["task.invalid_message speaks of <search>", "search.enabled=false"]),
        (
            ["search.enabled=false", "task.invalid_message=no", "search.cassette.path=a.jsonl"],
            ["search.cassette.path=a.jsonl holds searches", "search.enabled=false"],
        ),
        (["search.token_env=NOT_EXPORTED"], ["search.token_env=NOT_EXPORTED", "export"]),
        (
            ["cluster.placement={actor: 0, inference: 1, rollout: 2-4}", "rollout.engine.tp=2"],
            ["cluster.placement.rollout has 3 ranks", "rollout.engine.tp=2"],
        ),
        (
            ["cluster.placement={actor: 0, inference: 1, rollout: 2-4}", "rollout.engine.tp=3"],
            ["rollout.engine.tp=3", "4 heads"],
        ),
        (
            ["cluster.placement={actor: 0, inference: 1, rollout: 2-3}", "rollout.engine.tp=2"],
            ["rollout.engine.tp=2", "CPU"],
        ),
    ],
)
def test_what_cannot_run_is_named(tiny_run: TinyRun, overrides: list[str], named: list[str]) -> None:
    config = tiny_run(*overrides)
    sentences = complaints(config)
    matching = [line for line in sentences if all(words in line for words in named)]
    assert len(matching) == 1, sentences
    assert matching[0].endswith(".")
    groups = {key[: len(".".join(key.split(".")[:depth]))] for key in schema_keys() for depth in range(1, 6)}
    for problem in find_problems(config):
        assert problem.key in groups or problem.key.startswith("cluster.placement."), problem


def test_every_problem_is_listed_at_once(tiny_run: TinyRun) -> None:
    sentences = complaints(
        tiny_run(
            "trainer.steps=0",
            "algorithm.n_samples=1",
            "task.train_path=no.jsonl",
            "cluster.placement.actor=0-1",
            "actor.parallel.pp=3",
            "rollout.engine.tp=2",
        )
    )
    for key in (
        "trainer.steps=0",
        "algorithm.n_samples=1",
        "task.train_path=no.jsonl",
        "share rank 1",
        "cluster.placement.actor has 2 ranks",
        "actor.parallel.pp=3",
        "rollout.engine.tp=2",
    ):
        assert sum(key in line for line in sentences) >= 1, key
    assert len(sentences) == len(set(sentences))


def test_contradictions_disappear_with_either_way_out(tiny_run: TinyRun) -> None:
    append = ["task.token_mode=append", "task.train_eos=false", "algorithm.kl_coef=0"]
    validate(tiny_run("algorithm.recompute_logprobs=false", *append))
    validate(tiny_run("algorithm.recompute_logprobs=false", "rollout.sampling.top_p=0.9", *append))
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
    valid = tiny_run("trainer.schedule.kind=async")
    for key, is_integer in numeric_keys().items():
        for bad in [-7] if is_integer else [-7.0, math.nan, math.inf]:
            config = copy.deepcopy(valid)
            *path, leaf = key.split(".")
            setattr(reduce(getattr, path, config), leaf, bad)
            lines = complaints(config)
            assert any(line.startswith(f"{key}={bad} must ") for line in lines), (key, bad, lines)


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [
        ("rollout.sampling.top_k=0", False),
        ("actor.optimizer.beta1=1.0", False),
        ("actor.optimizer.warmup_fraction=1.5", False),
        ("rollout.engine.memory_fraction=1.0", False),
        ("trainer.steps=0", False),
        ("cluster.threads=0", False),
        ("actor.optimizer.lr=0.0", False),
        ("eval.interval=0", True),
        ("search.retries=0", True),
        ("task.max_turns=0", True),
        ("actor.optimizer.warmup_fraction=1.0", True),
        ("algorithm.kl_coef=0.0", True),
        ("eval.limit=null", True),
    ],
)
def test_the_edges_of_a_bound(tiny_run: TinyRun, setting: str, allowed: bool) -> None:
    if allowed:
        validate(tiny_run(setting))
    else:
        assert any(line.startswith(setting) for line in complaints(tiny_run(setting)))


@pytest.mark.parametrize("content", ["{not json", "[]", json.dumps({**SHAPE, "vocab_size": None}), "{}", "[" * 100_000])
def test_a_model_folder_with_another_config_is_refused(tiny_run: TinyRun, tmp_path: Path, content: str) -> None:
    config = tiny_run()
    (tmp_path / "model" / "config.json").write_text(content)
    (line,) = complaints(config)
    assert line.startswith("model.path=")


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
    ("settings", "named"),
    [
        (["actor.parallel.ep=4"], ["actor.parallel.ep=4", "the model has 6", "a divisor"]),
        (["actor.parallel.pp=2", "actor.parallel.ep=3"], ["ep=3", "the 2 ranks of a pipeline stage"]),
        (["actor.parallel.tp=2"], ["actor.parallel.sequence_parallel=true"]),
        (
            ["actor.parallel.tp=4", "actor.parallel.sequence_parallel=true"],
            ["actor.parallel.tp=4", "6 key/value heads"],
        ),
    ],
)
def test_what_cannot_run_of_a_mixture(tiny_run: TinyRun, tmp_path: Path, settings: list[str], named: list[str]) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps(MIXTURE))
    place = "cluster.placement={actor: 0-3, inference: 4, rollout: 5}"
    found = "\n".join(complaints(tiny_run(place, *settings)))
    for word in named:
        assert word in found


def test_without_a_search_neither_server_nor_index_is_needed(tiny_run: TinyRun) -> None:
    tools = "task.tools=[rlsys.rollout.tools.calculator.Calculator]"
    config = tiny_run(tools, "search.enabled=false", "search.index=null", "task.invalid_message=Answer.")
    validate(config)
    assert not needs_server(config.search)
    assert make_plan(config)["search"] == "none"
