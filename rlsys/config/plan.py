"""The resolved plan of a run: groups, ranks, worlds and an estimate of memory. Pure.

The memory of a Megatron process counts weights, gradients (4 bytes a parameter), the optimiser
(float32 master where weights are not, and two moments) cut by what shards it, and the logits of one
micro-batch (of a critic, none; where the reference is in the actor, its own for a full pipeline); a reference that
moves has a float32 master too; activations beyond those are not
counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from rlsys.config.algorithm import Baseline
from rlsys.config.algorithm_checks import algorithm_notes
from rlsys.config.derived import (
    has_critic,
    has_reference,
    max_staleness,
    megatron_groups,
    moves_reference,
    needs_server,
    needs_whole_mini_batch,
    runs_ahead,
    sums_over_vocabulary,
)
from rlsys.config.placement import parse_placement
from rlsys.config.schema import (
    Device,
    Dtype,
    Mode,
    RunConfig,
    Schedule,
    SearchConfig,
)
from rlsys.weights.families import Architecture, read_architecture, rules_of

BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2}
GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Parameters:
    """How many a model has."""

    shared: int
    """All but the experts'."""
    experts: int

    @property
    def all(self) -> int:
        """Of the whole model."""
        return self.shared + self.experts


def count_parameters(model: Architecture) -> Parameters:
    """Of the model's tensors, a tied one once."""
    shared = experts = 0
    for rule in rules_of(model):
        numbers = sum(map(prod, rule.shapes)) * (model.layers if rule.per_layer else 1) * rule.exported
        if rule.per_expert:
            experts += numbers * model.experts
        else:
            shared += numbers
    return Parameters(shared, experts)


def make_plan(config: RunConfig) -> dict[str, Any]:
    """Everything that the config settles, as plain data."""
    ranks = parse_placement(config.cluster.placement, has_critic(config.algorithm))
    model = read_architecture(config.model.path)
    parameters = count_parameters(model)
    trainer, algorithm = config.trainer, config.algorithm
    episodes = trainer.prompts_per_step * algorithm.n_samples
    groups: dict[str, Any] = {}
    for name in ("actor", "inference", "critic"):
        if name in ranks:
            groups[name] = _megatron_group(config, model, parameters, ranks[name], name)
    engines = len(ranks["rollout"]) // config.rollout.engine.tp
    groups["rollout"] = {
        "ranks": list(ranks["rollout"]),
        "engines": engines,
        "tp": config.rollout.engine.tp,
        "memory_gib_per_rank": _gib(
            parameters.all * BYTES[config.rollout.engine.dtype] / config.rollout.engine.tp
            + _kv_bytes(config, model) / config.rollout.engine.tp
        ),
    }
    return {
        "name": config.name,
        "device": str(config.cluster.device),
        "world_size": len({rank for held in ranks.values() for rank in held}),
        "groups": groups,
        "model": {"path": config.model.path, "parameters": parameters.all, "dtype": str(config.model.dtype)},
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
        "notes": list(algorithm_notes(config)),
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
    return "\n".join([*lines, *(f"  note       {note}" for note in plan["notes"])])


def overlap(config: RunConfig) -> str:
    """Which stages run at the same time."""
    kind, algorithm = config.trainer.schedule.kind, config.algorithm
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
    if needs_whole_mini_batch(algorithm):
        because = (
            "algorithm.baseline=batch"
            if algorithm.baseline is Baseline.batch
            else f"algorithm.advantage_scale={algorithm.advantage_scale}"
        )
        waits = f"; training waits for whole mini-batches, because {because}"
        return f"rollout, log-probs and training overlap {within}{waits}"
    return f"rollout, log-probs and training overlap {within}"


def _search(search: SearchConfig) -> str:
    if not needs_server(search):
        return f"played from {search.cassette.path}"
    if search.url is None:
        return f"started by the run on {search.index}"
    return ", ".join([search.url, *search.replicas])


_SIZES = ("tp", "pp", "cp", "ep", "dp", "engines")


def _megatron_group(
    config: RunConfig, model: Architecture, parameters: Parameters, ranks: tuple[int, ...], name: str
) -> dict[str, Any]:
    settings = megatron_groups(config)[name]
    parallel = settings.parallel
    dp = len(ranks) // (parallel.tp * parallel.pp * parallel.cp)
    # Experts are spread over ep, and not cut by tp.
    own = (parameters.shared / parallel.tp + parameters.experts / parallel.ep) / parallel.pp
    columns = 1 if name == "critic" else model.vocab / parallel.tp
    logits = columns * (
        4 + (parallel.pp * BYTES[config.model.dtype] if _holds_reference(config, name) else 0)
    )
    memory = own * _bytes_a_parameter(config, name, dp) + settings.micro_batch_tokens * logits
    return {
        "ranks": list(ranks),
        "tp": parallel.tp,
        "pp": parallel.pp,
        "cp": parallel.cp,
        "ep": parallel.ep,
        "dp": dp,
        "memory_gib_per_rank": _gib(memory),
    }


def _bytes_a_parameter(config: RunConfig, name: str, dp: int) -> float:
    """Of all copies that a Megatron group keeps of its parameters, and of what it keeps beside them."""
    algorithm, weight = config.algorithm, BYTES[config.model.dtype]
    master = 0 if config.model.dtype is Dtype.float32 else 4
    reference = weight + (master if moves_reference(algorithm) else 0)
    if name == "inference":
        return weight + (reference if has_reference(algorithm) else 0)
    optimizer = config.critic.optimizer if name == "critic" else config.actor.optimizer
    trained = weight + 4 + (8 + master) / (dp if optimizer.distributed else 1)
    return trained + (reference if _holds_reference(config, name) else 0)


def _holds_reference(config: RunConfig, name: str) -> bool:
    """Whether the actor's processes have the reference too, for a KL over the whole vocabulary."""
    algorithm = config.algorithm
    return name == "actor" and sums_over_vocabulary(algorithm) and algorithm.kl_topk_tokens is None


def _kv_bytes(config: RunConfig, model: Architecture) -> float:
    """Of the KV cache where its size is set; where SGLang fills the device, of one full episode."""
    width = 2 * model.kv_heads * model.head_dim
    tokens = config.rollout.engine.kv_cache_tokens or config.task.max_total_tokens
    return model.layers * width * tokens * BYTES[config.rollout.engine.dtype]


def _gib(size: float) -> float:
    return round(size / GIB, 4)
