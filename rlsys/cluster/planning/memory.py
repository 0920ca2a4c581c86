"""How much memory one rank of each group takes on its device, part by part. Pure.

Counted are the bytes of tensors at the fullest moment of a step. Parameters, gradients, the optimiser's state and the
reference are always there; of the rest the fullest of three moments counts, which do not come together: a micro-batch's
pass (what all layers keep, and the larger of the logits and what the backward pass works with), the optimiser's step,
and handing weights on. `rlsys.cluster.planning.activations` says what a layer keeps, `rlsys.cluster.planning.rank` what a rank holds.

Not counted: the CUDA context, workspaces of libraries and kernels, communication buffers, fragmentation, and tensors that
have neither a layer's width nor a weight's size. Experts are taken to get equally many tokens, every token of a
micro-batch to be a target.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlsys.cluster.planning.activations import (
    backward_peak,
    forward_peak,
    kept,
    layer_steps,
    norm,
    recompute_peak,
)
from rlsys.cluster.planning.parameters import count_parameters
from rlsys.cluster.planning.rank import BYTES, Load, Rank
from rlsys.config.derived import has_reference, megatron_groups, sums_over_vocabulary
from rlsys.config.schema import Device, Dtype, RunConfig, SyncMode
from rlsys.weights.families import Architecture

GIB = 1024**3
_CHUNKS = 4
"""Float32 pieces of logits alive at a time: two that are worked on, and two of the piece before."""
_MOMENTS = 8
"""Bytes of Adam's two moments of a parameter."""


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """Of one rank; bytes."""

    parts: dict[str, float]
    """Each part that there is, at its own fullest moment."""
    total: float
    """At the fullest moment of all: no more than the parts together."""
    stage: int = 0
    """The pipeline stage that it is of."""


def group_memory(config: RunConfig, architecture: Architecture, group: str, load: Load | None = None) -> GroupMemory:
    """Of one rank of `group` (actor, inference, critic or rollout), of its fullest pipeline stage.

    `load` are the micro-batches of a Megatron group; without it, the largest that the config allows.
    """
    if group == "rollout":
        return _engine(config, architecture)
    load = load or largest_load(config, group)
    stages = range(megatron_groups(config)[group].parallel.pp)
    each = [stage_memory(Rank(config, architecture, group, stage, load)) for stage in stages]
    return max(each, key=lambda memory: memory.total)


def largest_load(config: RunConfig, group: str) -> Load:
    """Micro-batches as large as they get: a longer episode than the budget is one by itself."""
    tokens = max(megatron_groups(config)[group].micro_batch_tokens, config.task.max_total_tokens)
    return Load(tokens, targets=tokens, width=min(tokens, config.task.max_total_tokens))


def stage_memory(rank: Rank) -> GroupMemory:
    """Of `rank`."""
    always = _always(rank)
    passing, peak = _scoring(rank) if rank.optimizer is None else _training(rank)
    later = {"step": _step(rank), "weight_sync": _weight_sync(rank)}
    parts = {**always, **passing, **later}
    total = sum(always.values()) + max(peak, _left(rank) + max(later.values()))
    return GroupMemory({name: size for name, size in parts.items() if size}, total, rank.stage)


def holds_reference(config: RunConfig, group: str) -> bool:
    """Whether the group's processes keep the reference: the actor's for a KL over the whole vocabulary."""
    algorithm = config.algorithm
    if group == "inference":
        return has_reference(algorithm)
    return group == "actor" and sums_over_vocabulary(algorithm) and algorithm.kl_topk_tokens is None


def _always(rank: Rank) -> dict[str, float]:
    """What is there at every moment."""
    held, config = rank.held, rank.config
    # Float32 weights are their own master.
    master = 0 if config.model.dtype is Dtype.float32 else 4
    parts = {"parameters": held.all * rank.item}
    if rank.optimizer is not None:
        parts["gradients"] = held.all * 4
        parts["optimizer"] = _shard(rank) * (_MOMENTS + master)
    if holds_reference(config, rank.group):
        average = master if config.algorithm.ref_policy_ema_tau < 1 else 0
        parts["reference"] = held.all * (rank.item + average)
    return parts


def _shard(rank: Rank) -> float:
    """Parameters whose optimiser state the rank keeps: an equal share with the ranks that hold the same ones."""
    if rank.optimizer is None or not rank.optimizer.distributed:
        return rank.held.all
    copies, copies_of_experts = rank.stage_size / rank.parallel.tp, rank.stage_size / rank.parallel.ep
    return rank.held.shared / copies + rank.held.experts / copies_of_experts


def _training(rank: Rank) -> tuple[dict[str, float], float]:
    """Parts of forward and backward passes, and their fullest moment together."""
    work, kernels = rank.work, rank.kernels
    steps, last_norm = layer_steps(work, kernels), norm(work, kernels)
    recompute = rank.config.model.recompute
    of_layer = work.stream if recompute else kept(steps)
    # A stage's output waits for its gradient, and what came from the stage before for that of the first layer.
    ends = work.stream * ((not rank.last) + (rank.stage > 0 and not kernels.norm_keeps_input(work)))
    waiting = rank.in_flight * (rank.layers * of_layer + ends) + _gathered(rank)
    # The head's input is not the norm's output, of which it takes targets alone.
    head = last_norm.keeps - work.stream if rank.last else 0.0
    activations = waiting + head
    # A tied matrix gets its gradient from both of its ends, and the one from the head waits for the other.
    matrix = rank.columns * work.hidden * work.item
    tied = matrix if rank.tied_here else 0
    arriving = work.stream if not rank.last else 0
    layer = backward_peak(steps) - of_layer
    if recompute:
        # The gradient of its output is there while a layer runs forward again.
        layer = max(backward_peak(steps), recompute_peak(steps) + work.stream)
        # A norm that keeps a copy does so beside the sum behind attention.
        layer += 0 if kernels.norm_keeps_input(work) else work.stream
    left = _left(rank)
    moments = [waiting + layer + tied + arriving + max(left / 2 - work.stream, 0)]
    if rank.last:
        moments.append(activations + last_norm.backward + tied)
    if rank.stage == 0:
        below = waiting - rank.layers * of_layer + left
        moments.append(below + matrix + tied + work.stream)
    logits = _read_out_and_back(rank) if rank.last else 0.0
    backward = max(max(moments) - activations, 0.0)
    reference = _reference_logits(rank)
    parts = {"activations": activations, "logits": logits + reference, "backward": backward}
    return parts, activations + reference + max(logits, backward)


def _reference_logits(rank: Rank) -> float:
    """Of the micro-batches that go through the pipeline together, till the last has run backward (`Actor._loss_for`)."""
    if not (rank.last and holds_reference(rank.config, rank.group)):
        return 0.0
    return float(rank.parallel.pp * rank.targets * rank.columns * rank.item)


def _left(rank: Rank) -> float:
    """What stays of layers with experts that were recomputed, till they next run: their inputs, and the gradients of these.

    Megatron's token dispatcher keeps the shares of a token's experts, whose graph ends in the layer's input.
    """
    stays = rank.config.model.recompute and rank.work.experts and rank.optimizer is not None
    return 2.0 * rank.layers * rank.work.stream if stays else 0.0


def _read_out_and_back(rank: Rank) -> float:
    """Bytes of the output layer's pass and the loss, forward and backward."""
    hidden = rank.targets * rank.work.hidden
    if rank.is_critic:
        # In float32, for the product and for its gradient.
        return hidden * (rank.item + 4 + 4)
    logits = rank.targets * rank.columns * rank.item
    algorithm = rank.config.algorithm
    # A KL between distributions has a gradient of its own.
    extra = logits if rank.group == "actor" and sums_over_vocabulary(algorithm) else 0
    at_loss = 2 * logits + extra + _chunks(rank)
    weight = rank.columns * rank.work.hidden * rank.item
    return hidden * rank.item + max(at_loss, logits + weight + hidden * rank.item)


def _scoring(rank: Rank) -> tuple[dict[str, float], float]:
    """As `_training`, of forward passes without gradients."""
    received = rank.work.stream if rank.parallel.pp > 1 else 0
    activations = forward_peak(layer_steps(rank.work, rank.kernels), rank.work.stream) + received
    parts = {"activations": activations}
    if rank.last:
        hidden = rank.targets * rank.work.hidden * rank.item
        parts["logits"] = hidden + rank.targets * rank.columns * rank.item + _chunks(rank)
        whole = rank.work.tokens * rank.work.hidden * rank.item
        return parts, max(activations, parts["logits"] + whole)
    return parts, activations


def _chunks(rank: Rank) -> float:
    return _CHUNKS * min(rank.kernels.chunk_bytes, rank.targets * rank.columns * 4)


def _gathered(rank: Rank) -> float:
    """The buffer in which Megatron's own layers gather a sequence where weights are trained; it stays."""
    work = rank.work
    return work.tokens * work.hidden * work.item if work.sequence_parallel and not rank.kernels.engine else 0


def _step(rank: Rank) -> float:
    """What an optimiser's step takes besides its state."""
    if rank.optimizer is None:
        return 0.0
    shard = 4 * _shard(rank)
    if rank.config.cluster.device is Device.cpu:
        # gloo copies a buffer of gradients, then Adam takes one parameter at a time.
        copied = 4 * max(rank.held.shared, rank.held.experts)
        return copied if rank.optimizer.distributed else 4 * 2 * rank.held.largest
    return shard if rank.kernels.foreach else 0.0


def _weight_sync(rank: Rank) -> float:
    """On a device, what handing weights on takes; buckets in host memory are not counted."""
    cluster = rank.config.cluster
    if cluster.device is Device.cpu or rank.group == "critic":
        return 0.0
    bucket = {SyncMode.broadcast: 1, SyncMode.ipc: 2 if rank.group == "actor" else 0}
    buckets = bucket.get(cluster.sync_mode, 0) * cluster.sync_bucket_bytes
    # The largest parameter is gathered from its pieces, and put together.
    gathers = rank.group == "actor" and rank.parallel.tp > 1
    return buckets + (2 * rank.held.largest * rank.parallel.tp * rank.item if gathers else 0)


def _engine(config: RunConfig, model: Architecture) -> GroupMemory:
    """Of the first rank of an SGLang engine: its weights, and its KV cache or what it may fill with it.

    With sync_mode=ipc it keeps a whole model of weights that came, beside what `memory_fraction` gives the engine.
    """
    engine, cluster = config.rollout.engine, config.cluster
    item = BYTES[engine.dtype]
    parameters = count_parameters(model).all * item / engine.tp
    token = 2 * model.layers * max(1, model.kv_heads // engine.tp) * model.head_dim * item
    if engine.kv_cache_tokens is not None:
        cache = float(token * engine.kv_cache_tokens)
    elif cluster.device_memory_gib is not None:
        cache = max(0.0, engine.memory_fraction * cluster.device_memory_gib * GIB - parameters)
    else:
        cache = float(token * config.task.max_total_tokens)
    staged = parameters * engine.tp if cluster.sync_mode is SyncMode.ipc else 0.0
    parts = {"parameters": parameters, "kv_cache": cache, "weight_sync": staged}
    return GroupMemory({name: size for name, size in parts.items() if size}, sum(parts.values()))
