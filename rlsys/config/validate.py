"""Whether a config can run, before anything starts: every problem at once, a sentence each.

Pure but for looking whether named files exist. Nothing here imports Ray, Megatron or SGLang.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlsys.config.algorithm_checks import algorithm_problems
from rlsys.config.derived import has_critic, megatron_groups, needs_server, runs_ahead
from rlsys.config.placement import overlaps, parse_placement
from rlsys.config.ranges import out_of_range
from rlsys.config.schema import (
    CassetteMode,
    Device,
    Mode,
    OnUpdate,
    ParallelConfig,
    RunConfig,
    Schedule,
    SyncMode,
    TokenMode,
)
from rlsys.errors import UserError
from rlsys.reward.check import check_terms
from rlsys.search.address import is_url
from rlsys.weights.families import Architecture, read_architecture
from rlsys.weights.sizes import largest_tensor_bytes

Ranks = dict[str, tuple[int, ...]]
_SHAPE = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")


def validate(config: RunConfig) -> None:
    """Raise `UserError` with one line for each problem."""
    problems = list(_problems(config))
    if problems:
        raise UserError("\n".join(problems))


def check_shape(path: str) -> None:
    """Raise UserError unless `path` is a Hugging Face folder whose `config.json` has the sizes of a language model."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise UserError(
            f"model.path={path} is not a Hugging Face model folder: {file} is missing; give a folder that has it."
        )
    try:
        shape = json.loads(file.read_text())
    except json.JSONDecodeError as problem:
        raise UserError(f"model.path={path}: {file} is not valid JSON ({problem}).") from problem
    missing = [key for key in _SHAPE if not (isinstance(shape, dict) and isinstance(shape.get(key), int))]
    if missing:
        raise UserError(
            f"model.path={path}: {file} has no number for {missing[0]}; give a folder of a language model."
        )


def _problems(config: RunConfig) -> Iterator[str]:
    yield from out_of_range(config)
    yield from _batches(config)
    yield from _contradictions(config)
    yield from algorithm_problems(config)
    yield from check_terms(config.reward, config.task)
    yield from _sharing(config)
    yield from _sync(config)
    yield from _paths(config)
    yield from _search(config)
    try:
        ranks = parse_placement(config.cluster.placement, has_critic(config.algorithm))
    except UserError as problem:
        yield str(problem)
        return
    yield from _placement(config, ranks)
    try:
        check_shape(config.model.path)
        architecture = read_architecture(config.model.path)
    except UserError as problem:
        yield str(problem)
        return
    for group, settings in megatron_groups(config).items():
        yield from _parallel(group, settings.parallel, len(ranks[group]), architecture)
    yield from _engine(config, len(ranks["rollout"]), architecture)
    picks = config.algorithm.kl_topk_tokens
    if picks is not None and picks > architecture.vocab:
        yield (
            f"algorithm.kl_topk_tokens={picks} is above the model's {architecture.vocab} tokens: lower it, or set it to null for "
            "the whole vocabulary."
        )
    largest = largest_tensor_bytes(config.model.path, config.model.dtype)
    if config.cluster.sync_bucket_bytes < largest:
        yield (
            f"cluster.sync_bucket_bytes={config.cluster.sync_bucket_bytes} is below the {largest} bytes of the model's "
            "largest tensor: raise it to that at least."
        )


def _batches(config: RunConfig) -> Iterator[str]:
    trainer, task = config.trainer, config.task
    if trainer.mini_batches >= 1 and trainer.prompts_per_step % trainer.mini_batches:
        yield (
            f"trainer.prompts_per_step={trainer.prompts_per_step} does not divide into "
            f"trainer.mini_batches={trainer.mini_batches} equal mini-batches: change one of them."
        )
    if task.max_prompt_tokens + task.max_turn_tokens > task.max_total_tokens:
        yield (
            f"task.max_total_tokens={task.max_total_tokens} has no room for task.max_prompt_tokens="
            f"{task.max_prompt_tokens} and one turn of task.max_turn_tokens={task.max_turn_tokens}: raise it."
        )
    for group, settings in megatron_groups(config).items():
        budget = settings.micro_batch_tokens
        if budget < task.max_total_tokens:
            yield (
                f"{group}.micro_batch_tokens={budget} cannot hold one episode of task.max_total_tokens="
                f"{task.max_total_tokens}: raise it to that at least."
            )


def _contradictions(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if config.task.token_mode is TokenMode.retokenize and not algorithm.recompute_logprobs:
        yield (
            "algorithm.recompute_logprobs=false contradicts task.token_mode=retokenize: re-tokenised text has "
            "no sampled log-probs; set it to true, or use task.token_mode=append."
        )
    if not algorithm.recompute_logprobs and config.task.train_eos:
        yield (
            "algorithm.recompute_logprobs=false contradicts task.train_eos=true: the end-of-sequence token is "
            "appended, not sampled, and has no log-prob; set one of them the other way."
        )
    optimizer, tags = config.actor.optimizer, config.task.tags
    if optimizer.min_lr > optimizer.lr:
        yield f"actor.optimizer.min_lr={optimizer.min_lr} is above actor.optimizer.lr={optimizer.lr}: lower it."
    words = (tags.search, tags.answer, tags.information)
    if not all(words) or len({*words, "think"}) <= len(words):
        yield (
            f"task.tags search={tags.search}, answer={tags.answer}, information={tags.information} must be three "
            "different words, none of them think: rename one."
        )


def _paths(config: RunConfig) -> Iterator[str]:
    for key, path in (("task.train_path", config.task.train_path), ("task.eval_path", config.task.eval_path)):
        if not Path(path).is_file():
            yield f"{key}={path} does not exist: prepare the data first, or give the path of a jsonl or parquet file."
    cassette = config.search.cassette
    if cassette.path is None:
        if cassette.mode is not CassetteMode.replay:
            yield f"search.cassette.mode={cassette.mode} needs a file: give search.cassette.path."
    elif cassette.mode is CassetteMode.replay and not Path(cassette.path).is_file():
        yield f"search.cassette.path={cassette.path} does not exist: record it with search.cassette.mode=record."
    elif cassette.mode is CassetteMode.record and Path(cassette.path).exists():
        yield (
            f"search.cassette.mode=record would mix with what search.cassette.path={cassette.path} holds: delete it, "
            "or use search.cassette.mode=extend."
        )


def _search(config: RunConfig) -> Iterator[str]:
    search = config.search
    if search.url is None and needs_server(search):
        if search.index is None:
            yield "search.url and search.index are both null: give a running server or an index folder."
        elif not (Path(search.index) / "manifest.json").is_file():
            yield (
                f"search.index={search.index} is not an index: make one with `rlsys search index`, or "
                "give search.url of a running server."
            )
    if search.replicas and search.url is None:
        yield f"search.replicas={list(search.replicas)} go beside a first server: give its address as search.url."
    if search.hedge_after_s is not None and not search.replicas:
        yield (
            f"search.hedge_after_s={search.hedge_after_s:g} asks a second server, and there is one: give "
            "search.replicas, or set it to null."
        )
    elif search.hedge_after_s is not None and search.hedge_after_s >= search.timeout_s:
        yield (
            f"search.hedge_after_s={search.hedge_after_s:g} comes after search.timeout_s={search.timeout_s:g}: give "
            "less than that, or null."
        )
    for key, url in (("search.url", search.url), *(("search.replicas", url) for url in search.replicas)):
        if url is not None and not is_url(url):
            yield f"{key}={url} is not an address: write it like http://127.0.0.1:8000."
    twice = [url for url, times in Counter([search.url, *search.replicas]).items() if times > 1]
    if twice:
        yield f"search.replicas={list(search.replicas)} name {twice[0]} once too often: name every server once."
    if search.token_env is not None and not os.environ.get(search.token_env):
        yield (
            f"search.token_env={search.token_env} is not set in the environment: export the servers' token as "
            f"{search.token_env}, or set search.token_env to null."
        )


def _sharing(config: RunConfig) -> Iterator[str]:
    schedule = config.trainer.schedule
    if config.cluster.mode is Mode.collocated and schedule.kind is not Schedule.sequential:
        yield (
            f"trainer.schedule.kind={schedule.kind} lets stages overlap, but with cluster.mode=collocated they take "
            "turns on the same devices: set trainer.schedule.kind=sequential, or place the groups apart."
        )


def _sync(config: RunConfig) -> Iterator[str]:
    cluster, schedule = config.cluster, config.trainer.schedule
    waits = runs_ahead(config) and schedule.on_update is OnUpdate.finish
    if not runs_ahead(config) and schedule.on_update is OnUpdate["continue"]:
        yield (
            f"trainer.schedule.on_update=continue has no use with trainer.schedule.kind={schedule.kind}, where nothing "
            "is in flight when weights change: leave it at finish, or choose async."
        )
    if waits and cluster.call_timeout_s <= config.rollout.episode_timeout_s:
        yield (
            f"cluster.call_timeout_s={cluster.call_timeout_s} must be above rollout.episode_timeout_s="
            f"{config.rollout.episode_timeout_s}, because with trainer.schedule.on_update=finish a switch of weights "
            "waits for episodes: raise it, or use on_update=continue."
        )
    if (
        cluster.sync_mode is SyncMode.broadcast
        and cluster.mode is Mode.collocated
        and cluster.device is Device.gpu
    ):
        yield (
            "cluster.sync_mode=broadcast with cluster.mode=collocated puts two members of an NCCL group on one GPU, "
            "which NCCL refuses: use cluster.sync_mode=tensor."
        )


def _placement(config: RunConfig, ranks: Ranks) -> Iterator[str]:
    shared = overlaps(ranks)
    if config.cluster.mode is Mode.collocated:
        if len({frozenset(held) for held in ranks.values()}) > 1:
            listed = ", ".join(f'{group}="{place}"' for group, place in config.cluster.placement.items())
            yield (
                f"cluster.mode=collocated needs all groups on the same ranks, but cluster.placement is {listed}: "
                "place them alike, or set cluster.mode=disaggregated."
            )
        return
    places = {"critic": config.cluster.placement["actor"], **config.cluster.placement}
    for a, b, both in shared:
        yield (
            f'cluster.placement.{a}="{places[a]}" and cluster.placement.{b}='
            f'"{places[b]}" share rank {both[0]}: give each group ranks of its own, or set '
            "cluster.mode=collocated and trainer.schedule.kind=sequential."
        )


def _parallel(group: str, parallel: ParallelConfig, world: int, model: Architecture) -> Iterator[str]:
    key = f"{group}.parallel"
    if min(parallel.tp, parallel.pp, parallel.cp, parallel.ep) < 1:
        return
    if parallel.cp > 1:
        yield f"{key}.cp={parallel.cp}: context parallelism is not available yet; set it to 1."
    model_ranks = parallel.tp * parallel.pp * parallel.cp
    if world % model_ranks:
        yield (
            f"cluster.placement.{group} has {world} ranks, which {key} tp*pp*cp = {parallel.tp}*{parallel.pp}*"
            f"{parallel.cp} = {model_ranks} does not divide: change the placement or the parallel sizes."
        )
    elif world // parallel.pp % parallel.ep:
        yield (
            f"{key}.ep={parallel.ep} does not divide the {world // parallel.pp} ranks of a pipeline stage: lower it, or "
            "give the group more ranks."
        )
    if parallel.ep > 1 and (not model.experts or model.experts % parallel.ep):
        yield (
            f"{key}.ep={parallel.ep} spreads experts, and the model has {model.experts or 'none'}: set a divisor of "
            "their number, or 1."
        )
    if model.experts and parallel.tp > 1 and not parallel.sequence_parallel:
        yield f"{key}.tp={parallel.tp} of a model with experts needs {key}.sequence_parallel=true: set it."
    if parallel.sequence_parallel and parallel.tp == 1:
        yield f"{key}.sequence_parallel=true needs tp above 1: set it to false, or raise {key}.tp."
    layers = model.layers
    if parallel.pp_layers is not None:
        if len(parallel.pp_layers) != parallel.pp or sum(parallel.pp_layers) != layers:
            yield (
                f"{key}.pp_layers={parallel.pp_layers} must hold {parallel.pp} numbers (pp) that sum to the "
                f"model's {layers} layers."
            )
        elif min(parallel.pp_layers) < 1:
            yield f"{key}.pp_layers={parallel.pp_layers}: every stage needs at least one layer."
    elif layers % parallel.pp:
        yield f"{key}.pp={parallel.pp} does not divide the model's {layers} layers: set {key}.pp_layers."
    if model.heads % parallel.tp:
        yield f"{key}.tp={parallel.tp} does not divide the model's {model.heads} attention heads: choose a divisor."
    if model.kv_heads % parallel.tp and parallel.tp % model.kv_heads:
        yield (
            f"{key}.tp={parallel.tp} neither divides the model's {model.kv_heads} key/value heads nor is a multiple of "
            "them: choose another."
        )


def _engine(config: RunConfig, world: int, model: Architecture) -> Iterator[str]:
    tp, aside = config.rollout.engine.tp, config.eval.engines
    if tp < 1:
        return
    if aside is not None and config.cluster.mode is Mode.collocated:
        yield (
            f"eval.engines={aside} sets engines aside while others work, but with cluster.mode=collocated all take turns: "
            "set eval.engines to null."
        )
    elif aside is not None and aside >= world // tp:
        yield (
            f"eval.engines={aside} leaves none of the {world // tp} engines for rollouts: lower it, add engines, or set it "
            "to null to evaluate between steps."
        )
    if world % tp:
        yield (
            f"cluster.placement.rollout has {world} ranks, which rollout.engine.tp={tp} does not divide: "
            "change one of them."
        )
    elif model.heads % tp:
        yield f"rollout.engine.tp={tp} does not divide the model's {model.heads} heads."
    if config.cluster.device is Device.cpu and tp > 1:
        yield f"rollout.engine.tp={tp}: an engine on a CPU runs with tp=1; add ranks for more engines instead."
    if config.task.max_total_tokens > model.max_positions:
        yield (
            f"task.max_total_tokens={config.task.max_total_tokens} is above the model's {model.max_positions} positions: "
            "lower it."
        )
