"""Whether the model can be cut as the config says: by tensor, pipeline, context and expert parallelism, and by engines. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rlsys.config.derived import megatron_groups
from rlsys.config.problems import Problem
from rlsys.config.schema import Device, Mode, Packing, ParallelConfig, RunConfig
from rlsys.weights.families import Architecture


def parallel_problems(group: str, parallel: ParallelConfig, world: int, model: Architecture) -> Iterator[Problem]:
    """What a Megatron group of `world` ranks cannot be, for this model."""
    key = f"{group}.parallel"
    if min(parallel.tp, parallel.pp, parallel.cp, parallel.ep) < 1:
        return
    model_ranks = parallel.tp * parallel.pp * parallel.cp
    if world % model_ranks:
        yield Problem(
            f"cluster.placement.{group}",
            f"cluster.placement.{group} has {world} ranks, which {key} tp*pp*cp = {parallel.tp}*{parallel.pp}*"
            f"{parallel.cp} = {model_ranks} does not divide: change the placement or the parallel sizes.",
        )
    elif world // parallel.pp % parallel.ep:
        yield Problem(
            f"{key}.ep",
            f"{key}.ep={parallel.ep} does not divide the {world // parallel.pp} ranks of a pipeline stage: lower it, or "
            "give the group more ranks.",
        )
    if parallel.ep > 1 and (not model.experts or model.experts % parallel.ep):
        yield Problem(
            f"{key}.ep",
            f"{key}.ep={parallel.ep} spreads experts, and the model has {model.experts or 'none'}: set a divisor of "
            "their number, or 1.",
        )
    if model.experts and parallel.tp > 1 and not parallel.sequence_parallel:
        yield Problem(
            f"{key}.tp",
            f"{key}.tp={parallel.tp} of a model with experts needs {key}.sequence_parallel=true: set it.",
        )
    if parallel.sequence_parallel and parallel.tp == 1:
        yield Problem(
            f"{key}.sequence_parallel",
            f"{key}.sequence_parallel=true needs tp above 1: set it to false, or raise {key}.tp.",
        )
    yield from _stages(f"{key}.pp", parallel, model.layers)
    if model.heads % parallel.tp:
        yield Problem(
            f"{key}.tp",
            f"{key}.tp={parallel.tp} does not divide the model's {model.heads} attention heads: choose a divisor.",
        )
    if model.kv_heads % parallel.tp and parallel.tp % model.kv_heads:
        yield Problem(
            f"{key}.tp",
            f"{key}.tp={parallel.tp} neither divides the model's {model.kv_heads} key/value heads nor is a multiple of "
            "them: choose another.",
        )


def context_problems(config: RunConfig, group: str) -> Iterator[Problem]:
    """What a sequence that is cut over several ranks needs."""
    settings = megatron_groups(config)[group]
    cp, tp = settings.parallel.cp, settings.parallel.tp
    if cp == 1:
        return
    if settings.packing is Packing.padded:
        yield Problem(
            f"{group}.packing",
            f"{group}.parallel.cp={cp} cuts packed sequences alone, and {group}.packing is padded: set it to packed.",
        )
    multiple = 2 * cp * (tp if settings.parallel.sequence_parallel else 1)
    needed = -(-config.task.max_total_tokens // multiple) * multiple
    if settings.micro_batch_tokens < needed:
        yield Problem(
            f"{group}.micro_batch_tokens",
            f"{group}.micro_batch_tokens={settings.micro_batch_tokens} cannot hold one episode, which "
            f"{group}.parallel.cp={cp} rounds up to {needed} tokens: raise it to that at least.",
        )


def _stages(key: str, parallel: ParallelConfig, layers: int) -> Iterator[Problem]:
    if parallel.pp_layers is not None:
        if len(parallel.pp_layers) != parallel.pp or sum(parallel.pp_layers) != layers:
            yield Problem(
                f"{key}_layers",
                f"{key}_layers={parallel.pp_layers} must hold {parallel.pp} numbers (pp) that sum to the "
                f"model's {layers} layers.",
            )
        elif min(parallel.pp_layers) < 1:
            yield Problem(
                f"{key}_layers",
                f"{key}_layers={parallel.pp_layers}: every stage needs at least one layer.",
            )
    elif layers % parallel.pp:
        yield Problem(
            key,
            f"{key}={parallel.pp} does not divide the model's {layers} layers: set {key}_layers.",
        )


def engine_problems(config: RunConfig, world: int, model: Architecture) -> Iterator[Problem]:
    """What engines on `world` ranks cannot be, for this model."""
    tp, aside = config.rollout.engine.tp, config.eval.engines
    if tp < 1:
        return
    if aside is not None and config.cluster.mode is Mode.collocated:
        yield Problem(
            "eval.engines",
            f"eval.engines={aside} sets engines aside while others work, but with cluster.mode=collocated all take turns: "
            "set eval.engines to null.",
        )
    elif aside is not None and aside >= world // tp:
        yield Problem(
            "eval.engines",
            f"eval.engines={aside} leaves none of the {world // tp} engines for rollouts: lower it, add engines, or set it "
            "to null to evaluate between steps.",
        )
    if world % tp:
        yield Problem(
            "cluster.placement.rollout",
            f"cluster.placement.rollout has {world} ranks, which rollout.engine.tp={tp} does not divide: "
            "change one of them.",
        )
    elif model.heads % tp:
        yield Problem("rollout.engine.tp", f"rollout.engine.tp={tp} does not divide the model's {model.heads} heads.")
    if config.cluster.device is Device.cpu and tp > 1:
        yield Problem(
            "rollout.engine.tp",
            f"rollout.engine.tp={tp}: an engine on a CPU runs with tp=1; add ranks for more engines instead.",
        )
    if config.task.max_total_tokens > model.max_positions:
        yield Problem(
            "task.max_total_tokens",
            f"task.max_total_tokens={config.task.max_total_tokens} is above the model's {model.max_positions} positions: "
            "lower it.",
        )
