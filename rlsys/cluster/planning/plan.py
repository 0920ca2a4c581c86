"""Resolves the plan of a run: groups, ranks, worlds, and an estimate of the memory that a rank takes, part by part. Pure.

Counted are the bytes of tensors at the fullest moment of a step. Parameters, gradients, the optimiser's state and the
reference are always there; of the rest the fullest of three moments counts, which do not come together: a micro-batch's
pass (what all layers keep, and the larger of the logits and what the backward pass works with), the optimiser's step,
and handing weights on.

A layer is a list of steps in the order of its forward pass. Each `keeps` some bytes from there to its own backward pass,
and has others alive only while that runs (`backward`) or, without gradients, while it itself runs (`forward`). They
follow from which tensors each operation saves for its gradient: a storage counts once, however many operations save views
of it, and for as long as one of them does. Seen with torch 2.13 and megatron-core 0.16 for Megatron's own layers
(tests/trainer/test_memory.py); read in Transformer Engine 2.20 and not seen for its layers (`StageRank.engine`).

Not counted: the CUDA context, workspaces of libraries and kernels, communication buffers, fragmentation, and tensors that
have neither a layer's width nor a weight's size. Experts are taken to get equally many tokens, every token of a
micro-batch to be a target.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

from rlsys.cluster.planning.placement import parse_placement
from rlsys.config import derived
from rlsys.config.algorithm import AdvantageBaseline
from rlsys.config.derived import has_critic, has_reference, megatron_groups, sums_over_vocabulary
from rlsys.config.problems import algorithm_notes
from rlsys.config.schema import (
    Device,
    Dtype,
    InferenceConfig,
    Layers,
    Mode,
    Packing,
    RunConfig,
    SyncMode,
)
from rlsys.weights.weight_map import Architecture, Cut, Rule, read_architecture, rules_of, stage_layers

_SIZES = ("tp", "pp", "cp", "ep", "dp", "engines")
MIB, GIB = 1024**2, 1024**3
BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2}
_CHUNKS = 4  # Float32 pieces of logits alive at a time: two that are worked on, and two of the piece before.


def make_plan(config: RunConfig) -> dict[str, Any]:
    """Everything that the config settles, as plain data."""
    ranks = parse_placement(config.cluster.placement, has_critic(config.algorithm))
    model = read_architecture(config.model.path)
    trainer, algorithm = config.trainer, config.algorithm
    sizes = derived.mini_batch_sizes(trainer.prompts_per_step, trainer.mini_batches)
    order = ("actor", "inference", "critic", "rollout")
    groups = {name: _group(config, model, name, ranks[name]) for name in order if name in ranks}
    return {
        "name": config.name,
        "device": str(config.cluster.device),
        "world_size": len({rank for held in ranks.values() for rank in held}),
        "groups": groups,
        "model": {"path": config.model.path, "parameters": count_parameters(model), "dtype": str(config.model.dtype)},
        "batch": {
            "prompts_per_step": trainer.prompts_per_step,
            "episodes_per_step": trainer.prompts_per_step * algorithm.n_samples,
            "episodes_per_update": sorted({size * algorithm.n_samples for size in sizes}),
            "updates": trainer.steps * trainer.mini_batches,
        },
        "schedule": {
            "kind": trainer.schedule.kind,
            "max_staleness": derived.max_staleness(config),
            "overlap": overlap(config),
        },
        "token_mode": str(config.task.token_mode),
        "search": _search(config),
        "notes": list(algorithm_notes(config)),
    }


def render_plan(plan: dict[str, Any]) -> str:
    """The plan as lines of text."""
    model, batch = plan["model"], plan["batch"]
    lines = [
        f"{plan['name']}: {plan['world_size']} {plan['device']} ranks",
        f"  model      {model['path']}, {model['parameters']:,} parameters, {model['dtype']}",
        f"  step       {batch['prompts_per_step']} prompts, {batch['episodes_per_step']} episodes, "
        f"{' or '.join(map(str, batch['episodes_per_update']))} to an optimiser step",
        f"  schedule   {plan['schedule']['kind']}, staleness at most {plan['schedule']['max_staleness']}: "
        f"{plan['schedule']['overlap']}",
        f"  tokens     {plan['token_mode']}",
        f"  search     {plan['search']}",
    ]
    for name, group in plan["groups"].items():
        sizes = ", ".join(f"{key} {value}" for key, value in group.items() if key in _SIZES)
        ranks = ",".join(map(str, group["ranks"]))
        lines.append(f"  {name:10} ranks {ranks}: {sizes}, about {group['memory_gib_per_rank']:.3g} GiB each")
        parts = (f"{part} {size:.3g}" for part, size in group["memory_gib"].items())
        lines.append(f"  {'':10} of GiB at their fullest: {', '.join(parts)}")
    return "\n".join([*lines, *(f"  note       {note}" for note in plan["notes"])])


def overlap(config: RunConfig) -> str:
    """Which stages run at the same time."""
    algorithm = config.algorithm
    if config.cluster.mode is Mode.collocated:
        frees = "" if config.cluster.device is Device.gpu else "; an engine on a CPU frees nothing while it sleeps"
        return f"stages take turns on the same devices{frees}"
    if config.trainer.schedule.kind == "sequential":
        return "no stages overlap"
    across = "across steps" if config.trainer.schedule.kind == "async" else "within a step"
    overlapping = f"rollout, log-probs and training overlap {across}"
    if not derived.needs_whole_mini_batch(algorithm):
        return overlapping
    batch = algorithm.baseline is AdvantageBaseline.batch
    because = "algorithm.baseline=batch" if batch else f"algorithm.advantage_scale={algorithm.advantage_scale}"
    return f"{overlapping}; training waits for whole mini-batches, because {because}"


def _search(config: RunConfig) -> str:
    search = config.search
    if not search.enabled:
        return "none"
    if not derived.needs_server(search):
        return f"played from {search.cassette.path}"
    if search.url is None:
        return f"started by the run on {search.index}"
    return ", ".join([search.url, *search.replicas])


def _group(config: RunConfig, model: Architecture, name: str, ranks: tuple[int, ...]) -> dict[str, Any]:
    """Ranks, sizes, and memory of one rank: at its fullest, and by parts, which are not all there at once."""
    if name == "rollout":
        tp = config.rollout.engine.tp
        sizes = {"engines": len(ranks) // tp, "tp": tp}
    else:
        parallel = megatron_groups(config)[name].parallel
        sizes = {size: getattr(parallel, size) for size in ("tp", "pp", "cp", "ep")}
        sizes["dp"] = len(ranks) // (parallel.tp * parallel.pp * parallel.cp)
    memory = group_memory(config, model, name)
    parts = {part: round(size / GIB, 4) for part, size in memory.parts.items()}
    return {"ranks": list(ranks), **sizes, "memory_gib_per_rank": round(memory.total / GIB, 4), "memory_gib": parts}


@dataclass(frozen=True, slots=True)
class MicroBatchLoad:
    """Micro-batches of one size, whole: of all context-parallel ranks."""

    tokens: int  # Of one, padding included.
    targets: int
    width: int  # Of its rows, or of the longest sequence of a packed one.
    micro_batches: int | None = None
    """Of a call, no more of which are in a pipeline at a time; None: enough to fill it."""
    routed: int | None = None
    """Tokens that a rank's experts get of one, each counted as often as it is sent; None: all equally many."""


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """Bytes of one rank."""

    parts: dict[str, float]  # Each part that there is, at its own fullest moment.
    total: float  # At the fullest moment of all: no more than the parts together.


class Step(NamedTuple):
    """Bytes of one operation, or a few."""

    keeps: float
    backward: float
    forward: float
    ahead: float = 0.0  # Alive in a forward pass with gradients, besides what it keeps.


def group_memory(
    config: RunConfig, architecture: Architecture, group: str, load: MicroBatchLoad | None = None
) -> GroupMemory:
    """Estimate one rank of `group` (actor, inference, critic or rollout), of its fullest pipeline stage.

    `load` are the micro-batches of a Megatron group; without it, the largest that the config allows: a longer episode
    than the budget is one by itself.
    """
    if group == "rollout":
        return _engine(config, architecture)
    settings, longest = megatron_groups(config)[group], config.task.max_total_tokens
    tokens = max(settings.micro_batch_tokens, longest)
    load = load or MicroBatchLoad(tokens, targets=tokens, width=min(tokens, longest))
    ranks = (StageRank(config, architecture, group, stage, load) for stage in range(settings.parallel.pp))
    return max(map(stage_memory, ranks), key=lambda memory: memory.total)


def count_parameters(model: Architecture) -> int:
    """Count a model's parameters, a tied tensor once."""
    return sum(
        sum(map(prod, rule.shapes))
        * (model.layers if rule.per_layer else 1)
        * (model.experts if rule.per_expert else 1)
        * rule.exported
        for rule in rules_of(model)
    )


class StageRank:
    """A rank of pipeline stage `stage` of a Megatron group, which gets `load`; sizes are numbers of elements."""

    def __init__(self, config: RunConfig, model: Architecture, group: str, stage: int, load: MicroBatchLoad) -> None:
        settings = megatron_groups(config)[group]
        self.config, self.model, self.group, self.stage = config, model, group, stage
        self.parallel = parallel = settings.parallel
        tp, cp = parallel.tp, parallel.cp
        self.optimizer = None if isinstance(settings, InferenceConfig) else settings.optimizer
        self.is_critic = group == "critic"  # Whether values take the place of logits.
        self.item = BYTES[config.model.dtype]  # Bytes of an element.
        self.last = stage == parallel.pp - 1
        placed = parse_placement(config.cluster.placement, has_critic(config.algorithm))[group]
        self.stage_size = len(placed) // parallel.pp  # Ranks of a pipeline stage.
        self.layers = len(stage_layers(model.layers, parallel.pp, parallel.pp_layers)[stage])
        self.columns = model.padded_vocab(tp) // tp  # Of the vocabulary, padding included.
        # Whether one matrix embeds and reads out: with more stages, the last has a copy.
        self.tied_here = model.tied and parallel.pp == 1 and not self.is_critic
        # Micro-batches whose activations it keeps at a time: one forward, one backward (Narayanan et al. 2021).
        self.in_flight = min(parallel.pp - stage, load.micro_batches or parallel.pp)
        self.targets = -(-load.targets // cp)  # That it reads out itself.
        self.tokens = -(-load.tokens // cp)  # Of its part of a micro-batch, in attention and MLP.
        # Tokens that it norms: with sequence parallelism, its share of `tokens`.
        self.normed = -(-self.tokens // tp) if parallel.sequence_parallel else self.tokens
        self.packed = settings.packing is Packing.packed
        self.width = self.tokens if self.packed else load.width  # Positions of a packed row, or of a rectangle.
        self.longest = load.width  # Tokens of the longest sequence, of all context-parallel ranks.
        self.query = model.heads * model.head_dim // tp
        # Where there are more ranks than key heads, several have the same one.
        self.key = max(1, model.kv_heads // tp) * model.head_dim
        self.heads, self.ffn = model.heads // tp, model.ffn // tp
        # Tokens that its experts get, each counted as often as it is sent.
        self.routed = self.normed * model.experts_per_token if load.routed is None else load.routed
        self.stream = self.normed * model.hidden * self.item  # Bytes of the residual stream.
        self.gathers = self.normed < self.tokens  # Before attention and MLP, behind which they are scattered.
        self.gathered = self.tokens * model.hidden * self.item if self.gathers else 0  # Bytes of a gathered sequence.
        # Which kernels compute, as far as memory depends on it.
        on_gpu, fusions = config.cluster.device is Device.gpu, config.model.fusions
        self.engine = on_gpu and config.model.layers is not Layers.local  # The layers are Transformer Engine's.
        self.fused_norm = on_gpu  # One kernel for RMSNorm, which keeps its input alone. torch has none for a CPU.
        self.fused_swiglu = on_gpu and fusions  # One kernel for SwiGLU, which keeps its input alone.
        self.fused_rope = self.engine and fusions  # One kernel for rotary positions, which keeps no tables.
        # Attention needs a mask where a chunk's queries see keys before it: torch has that in one kernel on a GPU alone.
        self.masks = not on_gpu
        self.chunks = _CHUNKS * min(128 * MIB if on_gpu else MIB, self.targets * self.columns * 4)  # Of the logits.
        self.norm_keeps_input = self.fused_norm or self.item == 4  # The residual stream, and no float32 copy of it.
        self._count_parameters()

    def _count_parameters(self) -> None:
        """Count those that it holds, as TP, PP and EP cut them."""
        self.shared = self.experts = self.largest = 0.0
        for rule, count in self._rules():
            size = self._cut(rule)
            if rule.per_expert:
                self.experts += size * count * self.model.experts / self.parallel.ep
            else:
                self.shared += size * count
            self.largest = max(self.largest, size if count else 0.0)
        self.parameters = self.shard = self.shared + self.experts
        if self.optimizer is not None and self.optimizer.distributed:
            # Whose optimiser state it keeps: an equal share with the ranks that hold the same ones.
            self.shard = (self.shared * self.parallel.tp + self.experts * self.parallel.ep) / self.stage_size

    def _rules(self) -> Iterator[tuple[Rule, int]]:
        """Each tensor of the model, and how many of its kind the stage has; an expert's count as one."""
        seen_layer = False
        for rule in rules_of(self.model, values=self.is_critic):
            if rule.per_layer:
                seen_layer = True
                yield rule, self.layers
            elif not seen_layer:
                yield rule, int(self.stage == 0)
            else:
                yield rule, int(self.last and (rule.exported or not self.tied_here))

    def _cut(self, rule: Rule) -> float:
        """Numbers of one tensor that a TP rank holds; experts are not cut."""
        if rule.cut is Cut.VOCAB:
            return self.columns * self.model.hidden
        whole = sum(map(prod, rule.shapes))
        return whole if rule.cut is Cut.WHOLE or rule.per_expert else whole / self.parallel.tp


def stage_memory(rank: StageRank) -> GroupMemory:
    """Estimate one rank of one pipeline stage."""
    # Parts that are there at every moment. Float32 weights are their own master; Adam's two moments have 8 bytes.
    master = 0 if rank.config.model.dtype is Dtype.float32 else 4
    always = {"parameters": rank.parameters * rank.item}
    if rank.optimizer is not None:
        always |= {"gradients": rank.parameters * 4, "optimizer": rank.shard * (8 + master)}
    if holds_reference(rank.config, rank.group):
        average = master if rank.config.algorithm.ref_policy_ema_tau < 1 else 0
        always["reference"] = rank.parameters * (rank.item + average)
    passing, peak = _scoring(rank) if rank.optimizer is None else _training(rank)
    later = {"step": _optimizer_step(rank), "weight_sync": _weight_sync(rank)}
    total = sum(always.values()) + max(peak, _left(rank) + max(later.values()))
    return GroupMemory({name: size for name, size in (always | passing | later).items() if size}, total)


def holds_reference(config: RunConfig, group: str) -> bool:
    """Whether the group's processes keep the reference: the actor's for a KL over the whole vocabulary."""
    algorithm = config.algorithm
    if group == "inference":
        return has_reference(algorithm)
    return group == "actor" and sums_over_vocabulary(algorithm) and algorithm.kl_topk_tokens is None


def _training(rank: StageRank) -> tuple[dict[str, float], float]:
    """Parts of forward and backward passes, and their fullest moment together."""
    steps, last_norm = _layer_steps(rank), _norm(rank)
    recompute = rank.config.model.recompute
    kept = list(accumulate(step.keeps for step in steps))  # Up to each step, itself included.
    backward_peak = max(below + step.backward for below, step in zip(kept, steps, strict=True))
    of_layer = rank.stream if recompute else kept[-1]
    # A stage's output waits for its gradient, and what came from the stage before for that of the first layer.
    ends = rank.stream * ((not rank.last) + (rank.stage > 0 and not rank.norm_keeps_input))
    # The buffer in which Megatron's own layers gather a sequence where weights are trained stays.
    buffer = 0 if rank.engine else rank.gathered
    waiting = rank.in_flight * (rank.layers * of_layer + ends) + buffer
    # The head's input is not the norm's output, of which it takes targets alone.
    activations = waiting + (last_norm.keeps - rank.stream if rank.last else 0.0)
    # A tied matrix gets its gradient from both of its ends, and the one from the head waits for the other.
    matrix = rank.columns * rank.model.hidden * rank.item
    tied = matrix if rank.tied_here else 0
    arriving = 0 if rank.last else rank.stream
    layer = backward_peak - of_layer
    if recompute:
        # The gradient of its output is there while a layer runs forward again.
        forward_peak = max(below + step.ahead for below, step in zip(kept, steps, strict=True))
        layer = max(backward_peak, forward_peak + rank.stream)
        # A norm that keeps a copy does so beside the sum behind attention.
        layer += 0 if rank.norm_keeps_input else rank.stream
    left = _left(rank)
    moments = [waiting + layer + tied + arriving + max(left / 2 - rank.stream, 0)]
    if rank.last:
        moments.append(activations + last_norm.backward + tied)
    if rank.stage == 0:
        below = waiting - rank.layers * of_layer + left
        moments.append(below + matrix + tied + rank.stream)
    backward = max(max(moments) - activations, 0.0)
    logits = _read_out_and_back(rank) if rank.last else 0.0
    reference = 0.0
    if rank.last and holds_reference(rank.config, rank.group):
        # Of the micro-batches that go through the pipeline together, till the last has run backward (`Actor._loss_for`).
        reference = float(rank.parallel.pp * rank.targets * rank.columns * rank.item)
    parts = {"activations": activations, "logits": logits + reference, "backward": backward}
    return parts, activations + reference + max(logits, backward)


def _left(rank: StageRank) -> float:
    """Inputs, and their gradients, that recomputed layers with experts hold till they next run.

    Megatron's token dispatcher keeps the shares of a token's experts, whose graph ends in the layer's input.
    """
    stays = rank.config.model.recompute and rank.model.experts and rank.optimizer is not None
    return 2.0 * rank.layers * rank.stream if stays else 0.0


def _read_out_and_back(rank: StageRank) -> float:
    """Bytes of the output layer's pass and the loss, forward and backward."""
    hidden = rank.targets * rank.model.hidden
    if rank.is_critic:
        # In float32, for the product and for its gradient.
        return hidden * (rank.item + 4 + 4)
    logits = rank.targets * rank.columns * rank.item
    # A KL between distributions has a gradient of its own.
    extra = logits if rank.group == "actor" and sums_over_vocabulary(rank.config.algorithm) else 0
    at_loss = 2 * logits + extra + rank.chunks
    weight = rank.columns * rank.model.hidden * rank.item
    return hidden * rank.item + max(at_loss, logits + weight + hidden * rank.item)


def _scoring(rank: StageRank) -> tuple[dict[str, float], float]:
    """As `_training`, of forward passes without gradients."""
    received = rank.stream if rank.parallel.pp > 1 else 0
    # Callers hold four residual streams: the embedding, the layer's input, the sum behind attention, and a norm of it.
    activations = 4 * rank.stream + max(step.forward for step in _layer_steps(rank)) + received
    if not rank.last:
        return {"activations": activations}, activations
    hidden = rank.model.hidden * rank.item
    logits = rank.targets * (hidden + rank.columns * rank.item) + rank.chunks
    return {"activations": activations, "logits": logits}, max(activations, logits + rank.tokens * hidden)


def _optimizer_step(rank: StageRank) -> float:
    """Bytes that an optimiser's step takes besides its state."""
    if rank.optimizer is None:
        return 0.0
    if rank.config.cluster.device is Device.cpu:
        # gloo copies a buffer of gradients, then Adam takes one parameter at a time.
        return 4 * max(rank.shared, rank.experts) if rank.optimizer.distributed else 4 * 2 * rank.largest
    # Adam of local layers takes all parameters at once.
    return 0.0 if rank.engine else 4 * rank.shard


def _weight_sync(rank: StageRank) -> float:
    """Bytes on a device that handing weights on takes; buckets in host memory are not counted."""
    cluster = rank.config.cluster
    if cluster.device is Device.cpu or rank.group == "critic":
        return 0.0
    bucket = {SyncMode.broadcast: 1, SyncMode.ipc: 2 if rank.group == "actor" else 0}
    buckets = bucket.get(cluster.sync_mode, 0) * cluster.sync_bucket_bytes
    # The largest parameter is gathered from its pieces, and put together.
    gathers = rank.group == "actor" and rank.parallel.tp > 1
    return buckets + (2 * rank.largest * rank.parallel.tp * rank.item if gathers else 0)


def _engine(config: RunConfig, model: Architecture) -> GroupMemory:
    """Estimate the first rank of an SGLang engine: its weights, and its KV cache or what it may fill with it.

    With sync_mode=ipc it keeps a whole model of weights that came, beside what `memory_fraction` gives the engine.
    """
    engine, cluster = config.rollout.engine, config.cluster
    item = BYTES[engine.dtype]
    parameters = count_parameters(model) * item / engine.tp
    token = 2 * model.layers * max(1, model.kv_heads // engine.tp) * model.head_dim * item
    cache = float(token * (engine.kv_cache_tokens or config.task.max_total_tokens))
    if engine.kv_cache_tokens is None and cluster.device_memory_gib is not None:
        cache = max(0.0, engine.memory_fraction * cluster.device_memory_gib * GIB - parameters)
    staged = parameters * engine.tp if cluster.sync_mode is SyncMode.ipc else 0.0
    parts = {"parameters": parameters, "kv_cache": cache, "weight_sync": staged}
    return GroupMemory({name: size for name, size in parts.items() if size}, sum(parts.values()))


def _layer_steps(rank: StageRank) -> list[Step]:
    """A layer's steps: norm, attention, norm, and MLP or experts."""
    return [_norm(rank), *_attention(rank), _norm(rank), *(_experts if rank.model.experts else _mlp)(rank)]


def _norm(rank: StageRank) -> Step:
    """RMSNorm of the residual stream: the norm keeps its input, what comes behind keeps its output.

    Transformer Engine's `_LayerNormLinear` saves input, output (a rank's own share with sequence parallelism) and 1/rms,
    as do its RMSNorm and the layer behind it; torch's `rms_norm` is one kernel, `_fused_rms_norm`, on a GPU alone.
    """
    stream = rank.stream
    if rank.fused_norm:
        # Backward, the gradients of output, input and of the residual connection past it.
        return Step(2 * stream + 4 * rank.normed, 3 * stream, stream)
    # Input and its product with 1/rms, in float32, and the output. Backward, four terms of the gradient and the residual's.
    float32 = 4 * rank.normed * rank.model.hidden
    return Step(2 * float32 + stream, 4 * float32 + stream, 2 * float32)


def _column(rank: StageRank, width: int) -> float:
    """Bytes alive in the backward pass of a linear layer from the residual stream to a `width` that TP cuts.

    Gradients of its output, weight and input and of the residual stream. With sequence parallelism the gradient of the
    input is scattered, and the input gathered once more: by Megatron into a buffer that lives on, by Transformer Engine
    into a new tensor (`_LayerNormLinear.backward`).
    """
    hidden = rank.model.hidden
    gradients = (rank.tokens * (width + hidden) + width * hidden) * rank.item
    return gradients + (rank.gathered if rank.engine else 0) + rank.stream * (2 if rank.gathers else 1)


def _row(rank: StageRank, width: int) -> float:
    """As `_column`, of a layer from a `width` that TP cuts back to the stream.

    Without sequence parallelism the gradient of its output is that of the stream; with it, that is gathered.
    """
    return (rank.tokens * width + width * rank.model.hidden) * rank.item + rank.gathered + rank.stream


def _attention(rank: StageRank) -> list[Step]:
    """From the normed input to the sum with the residual stream, which the next norm keeps."""
    query, key = rank.tokens * rank.item * rank.query, rank.tokens * rank.item * rank.key
    return [
        Step(0, _column(rank, rank.query + 2 * rank.key), 2 * (query + 2 * key)),
        *([_qk_norm(rank)] if rank.model.qk_norm else []),
        _rotate(rank, query, key),
        *(_attend_engine if rank.engine else _attend)(rank, query, key),
    ]


def _rotate(rank: StageRank, query: int, key: int) -> Step:
    """Rotary positions; `query` and `key` in bytes.

    Megatron keeps tables of sines and cosines, and has four terms of the gradient alive with those of keys and values.
    Transformer Engine's `FusedRoPEFunc` saves angles that all layers share; then gradients of queries, keys and values
    are joined (`SplitAlongDim.backward`).
    """
    mixed = query + 2 * key
    if rank.fused_rope:
        return Step(0, 2 * mixed + rank.stream, mixed + 2 * query + key)
    return Step(4 * rank.width * rank.model.head_dim * rank.item, 4 * query + 2 * key, mixed + 4 * query)


def _attend(rank: StageRank, query: int, key: int) -> list[Step]:
    """Attention of local layers, by torch's kernels, and the projection behind; `query` and `key` in bytes.

    Queries and keys are turned into new tensors; values remain a view of the projection's output and keep all of it.
    Packed, sequences are attended one by one, and what comes out is joined.
    """
    mixed, sums = query + 2 * key, 4 * rank.tokens * rank.heads
    joined = query if rank.packed else 0
    project = Step(joined, _row(rank, rank.query), joined + rank.tokens * rank.model.hidden * rank.item)
    if rank.parallel.cp > 1:
        return [_attend_gathered(rank, query, key), project]
    # Gradients: of the output, and of what goes in, once for the sequences and once joined.
    gradients = query + (2 if joined else 1) * mixed + rank.stream
    return [Step(mixed + query + key + query + sums, gradients, mixed + 3 * query + key), project]


def _attend_gathered(rank: StageRank, query: int, key: int) -> Step:
    """As `_attend`, of context parallelism: keys and values of all ranks are gathered.

    Of n = 2 cp chunks of a sequence, ranks but the first have masks of chunks r and n - 1 - r, which see (r + 1) / n and
    (n - r) / n of it: (n + 1) / n^2 of its length squared, for which the row's length times the longest is a bound.
    """
    cp = rank.parallel.cp
    whole, chunks = 2 * key * cp, 2 * cp
    pairs = rank.tokens * cp * rank.longest * (chunks + 1) / chunks**2 if rank.masks else 0
    keeps = query + whole + query + 4 * rank.tokens * rank.heads + pairs * rank.item
    return Step(keeps, query + 2 * whole, 2 * whole + 3 * query)


def _attend_engine(rank: StageRank, query: int, key: int) -> list[Step]:
    """Attention of Transformer Engine, and the projection behind, which saves the same output; bytes as in `_attend`.

    `get_qkv_layout` copies values, being strided, so that of the projection's output nothing is kept; FusedAttnFunc and
    FlashAttention save queries, keys, values, the output, and a float32 of each row's softmax. With context parallelism
    `AttnFuncWithCPAndKVP2P` saves the same of a rank's own tokens, keys and values as one tensor, and works backward
    with two buffers for keys and values and for their gradients, and one for queries'.
    """
    mixed = query + 2 * key
    ring = query + 8 * key if rank.parallel.cp > 1 else 0
    keeps = mixed + query + 4 * rank.tokens * rank.heads
    return [
        Step(keeps, query + mixed + rank.stream + ring, 2 * mixed + query),
        Step(0, _row(rank, rank.query), rank.tokens * rank.model.hidden * rank.item),
    ]


def _qk_norm(rank: StageRank) -> Step:
    """Norms of queries, which are copied for it, and of keys, per head."""
    query, key = rank.tokens * rank.query, rank.tokens * rank.key
    if not rank.fused_norm:
        # As `_norm`: what is copied to float32 is new where the model's dtype is another.
        copies = 4 * (query + key) if rank.item < 4 else query * rank.item
        return Step(copies + 4 * (query + key), 16 * query, 8 * query + query * rank.item)
    # Transformer Engine's `ops.RMSNorm` copies keys as well, which are strided; of each head 1/rms.
    keys = key * rank.item + 4 * (query + key) / rank.model.head_dim if rank.engine else 0
    return Step(query * rank.item + keys, 3 * query * rank.item, 3 * query * rank.item)


def _mlp(rank: StageRank) -> list[Step]:
    out = rank.tokens * rank.model.hidden * rank.item
    ffn = rank.tokens * rank.ffn * rank.item
    # Gate and up projection, then, unless fused, silu(gate) and a copy of up, each kept for their product; the product.
    apart = 0 if rank.fused_swiglu else 2 * ffn
    return [
        Step(0, _column(rank, 2 * rank.ffn), out + 2 * ffn),
        # Two gradients come of one. Fused, the gradient of gate and up comes of one.
        Step(2 * ffn + apart, 3 * ffn + rank.stream, 3 * ffn + apart),
        Step(ffn, _row(rank, rank.ffn), out + ffn),
    ]


def _experts(rank: StageRank) -> list[Step]:
    """Router, tokens on their way to experts, these, and the way back.

    Of Megatron-core's MoELayer: a token's product is kept before and after its share weighs it, unless `fused_swiglu`
    (`WeightedSwiGLUFunction` saves gate and up). What is sent stays alive while experts work, once as it was permuted
    and, over `ep` ranks, once as it came; what they make is joined, and sorted back.
    """
    model, ep, stream, engine = rank.model, rank.parallel.ep, rank.stream, rank.engine
    sent = rank.routed * model.hidden * rank.item
    ffn = rank.routed * model.expert_ffn * rank.item
    # Probabilities in float32, their scattered shares and who is chosen, for every expert.
    router = rank.normed * model.experts * (4 + 1 + 2 * rank.item)
    # Which token went where; Transformer Engine's `make_row_id_map` has two int32 of every token and expert.
    places = 4 * rank.normed * (2 * model.experts + 1) if engine else 8 * rank.routed
    apart = 0 if rank.fused_swiglu else 3 * ffn
    passing = sent * (4 if ep > 1 else 3)
    # `_GroupedLinear.backward` has gradients of all experts' weights at once.
    weights = model.experts // ep * 2 * model.expert_ffn * model.hidden * rank.item if engine else 0
    return [
        Step(router, 2 * router + 2 * stream, router),
        Step(sent + places, 2 * sent + stream, 2 * sent),
        Step(3 * ffn + apart, max(2 * sent, sent + 3 * ffn + weights) + stream, passing + sent, passing),
    ]
