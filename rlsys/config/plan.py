"""The resolved plan of a run: groups, ranks, worlds and an estimate of memory. Pure.

The memory of a Megatron process counts weights, gradients (4 bytes a parameter), the optimiser
(float32 master where weights are not, and two moments) cut by what shards it, and the logits of one
micro-batch; activations beyond those are not counted.
"""

from __future__ import annotations

from typing import Any

from rlsys.config.derived import max_staleness, needs_server, runs_ahead
from rlsys.config.placement import parse_placement
from rlsys.config.schema import (
    AdvantageScale,
    Device,
    Dtype,
    Mode,
    ParallelConfig,
    RunConfig,
    Schedule,
    SearchConfig,
)
from rlsys.config.validate import model_shape

BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2}
GIB = 1024**3


def parameter_count(shape: dict[str, Any]) -> int:
    """Parameters of a decoder with grouped-query attention and a gated MLP, from its `config.json`."""
    hidden, layers = int(shape["hidden_size"]), int(shape["num_hidden_layers"])
    heads = int(shape["num_attention_heads"])
    head = int(shape.get("head_dim") or hidden // heads)
    kv_width = int(shape.get("num_key_value_heads", heads)) * head
    biases = heads * head + 2 * kv_width if shape.get("model_type") == "qwen2" else 0
    attention = 2 * hidden * heads * head + 2 * hidden * kv_width + biases
    mlp = 3 * hidden * int(shape["intermediate_size"])
    embeddings = int(shape["vocab_size"]) * hidden * (1 if shape.get("tie_word_embeddings") else 2)
    return layers * (attention + mlp + 2 * hidden) + hidden + embeddings


def make_plan(config: RunConfig) -> dict[str, Any]:
    """Everything that the config settles, as plain data."""
    ranks = parse_placement(config.cluster.placement)
    shape = model_shape(config.model.path)
    parameters = parameter_count(shape)
    trainer, algorithm = config.trainer, config.algorithm
    episodes = trainer.prompts_per_step * algorithm.n_samples
    groups: dict[str, Any] = {}
    for name, parallel, trains in (
        ("actor", config.actor.parallel, True),
        ("inference", config.inference.parallel, False),
    ):
        groups[name] = _megatron_group(config, shape, parameters, ranks[name], parallel, trains)
    engines = len(ranks["rollout"]) // config.rollout.engine.tp
    groups["rollout"] = {
        "ranks": list(ranks["rollout"]),
        "engines": engines,
        "tp": config.rollout.engine.tp,
        "memory_gib_per_rank": _gib(
            parameters * BYTES[config.rollout.engine.dtype] / config.rollout.engine.tp
            + _kv_bytes(config, shape) / config.rollout.engine.tp
        ),
    }
    return {
        "name": config.name,
        "device": str(config.cluster.device),
        "world_size": len({rank for held in ranks.values() for rank in held}),
        "groups": groups,
        "model": {"path": config.model.path, "parameters": parameters, "dtype": str(config.model.dtype)},
        "batch": {
            "prompts_per_step": trainer.prompts_per_step,
            "episodes_per_step": episodes,
            "episodes_per_update": episodes // trainer.mini_batches,
            "updates": trainer.steps * trainer.mini_batches,
        },
        "schedule": {
            "kind": str(trainer.schedule.kind),
            "max_staleness": max_staleness(config),
            "overlap": overlap(config),
        },
        "token_mode": str(config.task.token_mode),
        "search": _search(config.search),
    }


def render_plan(plan: dict[str, Any]) -> str:
    """The plan as lines of text."""
    model, batch = plan["model"], plan["batch"]
    lines = [
        f"{plan['name']}: {plan['world_size']} {plan['device']} ranks",
        f"  model      {model['path']}, {model['parameters']:,} parameters, {model['dtype']}",
        f"  step       {batch['prompts_per_step']} prompts, {batch['episodes_per_step']} episodes, "
        f"{batch['episodes_per_update']} to an optimiser step",
        f"  schedule   {plan['schedule']['kind']}, staleness at most {plan['schedule']['max_staleness']}: "
        f"{plan['schedule']['overlap']}",
        f"  tokens     {plan['token_mode']}",
        f"  search     {plan['search']}",
    ]
    for name, group in plan["groups"].items():
        sizes = ", ".join(f"{key} {value}" for key, value in group.items() if key in _SIZES)
        ranks = ",".join(map(str, group["ranks"]))
        lines.append(f"  {name:10} ranks {ranks}: {sizes}, about {group['memory_gib_per_rank']:.3g} GiB each")
    return "\n".join(lines)


def overlap(config: RunConfig) -> str:
    """Which stages run at the same time."""
    kind, whole = config.trainer.schedule.kind, config.algorithm.advantage_scale is AdvantageScale.batch
    if config.cluster.mode is Mode.collocated:
        frees = (
            ""
            if config.cluster.device is Device.gpu
            else "; an engine on a CPU frees nothing while it sleeps"
        )
        return f"stages take turns on the same devices{frees}"
    if kind is Schedule.sequential:
        return "no stages overlap"
    within = "within a step" if not runs_ahead(config) else "across steps"
    if whole:
        waits = "; training waits for whole mini-batches, because algorithm.advantage_scale=batch"
        return f"rollout, log-probs and training overlap {within}{waits}"
    return f"rollout, log-probs and training overlap {within}"


def _search(search: SearchConfig) -> str:
    if not needs_server(search):
        return f"played from {search.cassette.path}"
    if search.url is None:
        return f"started by the run on {search.index}"
    return ", ".join([search.url, *search.replicas])


_SIZES = ("tp", "pp", "cp", "dp", "engines")


def _megatron_group(
    config: RunConfig,
    shape: dict[str, Any],
    parameters: int,
    ranks: tuple[int, ...],
    parallel: ParallelConfig,
    trains: bool,
) -> dict[str, Any]:
    dp = len(ranks) // (parallel.tp * parallel.pp * parallel.cp)
    own = parameters / (parallel.tp * parallel.pp)
    weight = BYTES[config.model.dtype]
    if trains:
        budget = config.actor.micro_batch_tokens
        state = 8 if config.model.dtype is Dtype.float32 else 12
        shards = dp if config.actor.optimizer.distributed else 1
        memory = own * (weight + 4 + state / shards)
    else:
        budget = config.inference.micro_batch_tokens
        memory = own * weight * (2 if config.algorithm.kl_coef > 0 else 1)
    memory += budget * int(shape["vocab_size"]) / parallel.tp * 4
    return {
        "ranks": list(ranks),
        "tp": parallel.tp,
        "pp": parallel.pp,
        "cp": parallel.cp,
        "dp": dp,
        "memory_gib_per_rank": _gib(memory),
    }


def _kv_bytes(config: RunConfig, shape: dict[str, Any]) -> float:
    """Of the KV cache where its size is set; where SGLang fills the device, of one full episode."""
    heads = int(shape["num_attention_heads"])
    head = int(shape.get("head_dim") or int(shape["hidden_size"]) // heads)
    width = 2 * int(shape.get("num_key_value_heads", heads)) * head
    tokens = config.rollout.engine.kv_cache_tokens or config.task.max_total_tokens
    return int(shape["num_hidden_layers"]) * width * tokens * BYTES[config.rollout.engine.dtype]


def _gib(size: float) -> float:
    return round(size / GIB, 4)
