"""Estimates the memory of each rank on its device, by part. Pure, but for a teacher's config.json.

The estimate is the peak of tensor bytes in a step. Parameters, gradients, optimiser state and the reference are always
present. The largest of three phases is added to them; the phases never overlap:

- a micro-batch's pass: activations of all layers, plus the larger of the logits and the backward pass's temporaries;
- the optimiser's step;
- the weight sync.

The parts of an engine add up, because it generates while it stages weights.

A layer is a list of `LayerStep`s in forward order. A step `keeps` bytes until its own backward pass, needs `backward`
more during that pass, and `forward` bytes while it runs without gradients. The numbers follow from the tensors that each
operation saves for its gradient. A storage counts once, however many operations save views of it, until the last
operation releases it.

Megatron's own layers are measured with torch 2.13 and megatron-core 0.16 (tests/trainer/test_memory.py). Transformer
Engine's layers (`StageRank.engine`) are derived from its source, version 2.20, and not measured.

On a GPU, `runtime` adds the CUDA contexts of the processes on a device and NCCL's buffers. An engine has CUDA graphs
(`graphs`), and its `activations` include logits. These are estimates from the libraries' sources.

Not counted: workspaces of libraries and kernels, fragmentation, and tensors with neither a layer's width nor a weight's
size. Assumes that experts get equally many tokens, and that every token of a micro-batch is a target.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

from rlsys.cluster.planning.placement import parse_placement
from rlsys.config.derived import (
    chosen_layers,
    full_kl,
    has_critic,
    has_reference,
    megatron_groups,
    moves_reference,
    of_teacher,
    scores_with_policy,
    sums_over_vocabulary,
)
from rlsys.config.schema import (
    AdamwConfig,
    Device,
    Dtype,
    InferenceConfig,
    Layers,
    Mode,
    MuonConfig,
    OptimizerConfig,
    Packing,
    RunConfig,
    SyncMode,
)
from rlsys.rollout.kinds import engine_fact
from rlsys.weights.lora import adapter_rules
from rlsys.weights.weight_map import SINK_DIMS, Architecture, Cut, Rule, read_architecture, rules_of, stage_layers

MIB, GIB = 1024**2, 1024**3
BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2}
_CHUNKS = 4  # Float32 chunks of logits alive at a time: two for the current chunk, two for the previous one.
CONTEXT_BYTES = GIB // 2
"""CUDA context of one process on one GPU, with the kernels that torch loads; an estimate."""
NCCL_BYTES = GIB // 4
"""Buffers of one NCCL communicator: 24 channels, each with 0.5 MiB (LL), 4.7 MiB (LL128) and 4 MiB (simple) for the
connection from its neighbour in the ring. NCCL chooses the number of channels, so this is an estimate."""


@dataclass(frozen=True, slots=True)
class MicroBatchLoad:
    """Size of one micro-batch over all context-parallel ranks, and the number of micro-batches."""

    tokens: int  # Tokens of a micro-batch, padding included.
    targets: int
    width: int  # Row length; if packed, length of the longest sequence.
    micro_batches: int | None = None
    """Number of micro-batches per call, which limits the number in flight in the pipeline; None: enough to fill the
    pipeline."""
    routed: int | None = None
    """Token copies that one rank's experts receive per micro-batch; None: an even share."""


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """Peak memory of one rank, in bytes."""

    parts: dict[str, float]  # Peak of each part by itself.
    total: float  # Peak of all parts together; at most the sum of `parts`.


class LayerStep(NamedTuple):
    """Bytes of one operation or a few consecutive ones; see the module's docstring."""

    keeps: float
    backward: float
    forward: float
    ahead: float = 0.0  # Temporaries of a forward pass with gradients, in addition to `keeps`.


def group_memory(
    config: RunConfig, architecture: Architecture, group: str, load: MicroBatchLoad | None = None
) -> GroupMemory:
    """Estimate one rank of `group` (actor, inference, critic or rollout) in its largest pipeline stage.

    `load` applies to Megatron groups. Its default is the largest micro-batch that the config allows: an episode longer
    than `micro_batch_tokens` gets its own micro-batch.
    """
    if group == "rollout":
        return _engine(config, architecture)
    settings, longest = megatron_groups(config)[group], config.task.max_total_tokens
    tokens = max(settings.micro_batch_tokens, longest)
    load = load or MicroBatchLoad(tokens, targets=tokens, width=min(tokens, longest))
    ranks = (StageRank(config, architecture, group, stage, load) for stage in range(settings.parallel.pp))
    return max(map(stage_memory, ranks), key=lambda memory: memory.total)


@cache
def count_parameters(model: Architecture) -> int:
    """Count a model's parameters; tied tensors count once."""
    return sum(
        sum(map(prod, rule.shapes))
        * (rule.count_in(range(model.layers)) if rule.per_layer else 1)
        * (model.experts if rule.per_expert else 1)
        * rule.exported
        for rule in rules_of(model)
    )


def trained_parameters(config: RunConfig, model: Architecture, group: str = "actor") -> int:
    """Count the parameters that `group` trains: all of the model, or the adapters of an actor with LoRA."""
    lora = config.model.lora
    if not lora.rank or group == "critic":
        return count_parameters(model)
    return model.layers * sum(prod(shape) for rule in adapter_rules(model, lora) for shape in rule.shapes)


def checkpoint_bytes(config: RunConfig, model: Architecture) -> float:
    """Return the bytes of one complete checkpoint."""
    return sum(saved_bytes(config, model, group) for group in megatron_groups(config))


def saved_bytes(config: RunConfig, model: Architecture, group: str) -> float:
    """Return the bytes that all ranks of `group` together write to a checkpoint.

    Each trained parameter has its weight, a float32 copy and the optimiser's state (measured with AdamW: 16.2 bytes
    per parameter for float32 weights). A moving reference has its weights and a float32 copy, and one that the actor holds
    has its weights even if it does not move.
    """
    settings, weight, nbytes = megatron_groups(config)[group], BYTES[config.model.dtype] + 4, 0.0
    if not isinstance(settings, InferenceConfig):
        state = state_bytes(settings.optimizer, matrix_share(model))
        nbytes += trained_parameters(config, model, group) * (weight + state)
    moves = moves_reference(config.algorithm)
    own = holds_reference(config, group) and of_teacher(config) is None and not config.model.lora.rank
    if own and (moves or group == "actor"):
        nbytes += count_parameters(model) * (weight if moves else BYTES[config.model.dtype])
    return nbytes


class StageRank:
    """One rank of pipeline stage `stage` of a Megatron group under `load`. Sizes are in elements unless stated."""

    def __init__(self, config: RunConfig, model: Architecture, group: str, stage: int, load: MicroBatchLoad) -> None:
        settings = megatron_groups(config)[group]
        self.config, self.model, self.group, self.stage, self.load = config, model, group, stage, load
        self.parallel = parallel = settings.parallel
        tp, cp = parallel.tp, parallel.cp
        self.optimizer = None if isinstance(settings, InferenceConfig) else settings.optimizer
        self.is_critic = group == "critic"  # The head returns values instead of logits.
        self.item = BYTES[config.model.dtype]  # Bytes of an element.
        self.last = stage == parallel.pp - 1
        placed = parse_placement(config.cluster.placement, has_critic(config.algorithm))[group]
        self.stage_size = len(placed) // parallel.pp  # Ranks of a pipeline stage.
        self.held = held = stage_layers(model.layers, parallel.pp, parallel.pp_layers)[stage]
        self.layers, self.local = len(held), sum(layer in held for layer in model.local_layers)
        self.mixtures = sum(layer >= model.dense_layers for layer in held) if model.experts else 0
        self.columns = model.padded_vocab(tp) // tp  # Vocabulary entries of this TP rank, padding included.
        # One matrix is both embedding and head; with several stages, the last stage has a copy.
        self.tied_here = model.tied and parallel.pp == 1 and not self.is_critic
        # Micro-batches whose activations are kept at a time under the 1F1B schedule (Narayanan et al. 2021).
        self.in_flight = min(parallel.pp - stage, load.micro_batches or parallel.pp)
        self.targets = -(-load.targets // cp)  # Targets whose logits this rank computes.
        self.tokens = -(-load.tokens // cp)  # Tokens of this rank in attention and MLP.
        # Tokens of this rank in norms and residual stream; a TP share of `tokens` with sequence parallelism.
        self.normed = -(-self.tokens // tp) if parallel.sequence_parallel else self.tokens
        self.packed = settings.packing is Packing.packed
        self.width = self.tokens if self.packed else load.width  # Positions of a packed or padded row.
        self.longest = load.width  # Length of the longest sequence over all context-parallel ranks.
        self.query = model.heads * model.head_dim // tp
        # With more TP ranks than key/value heads, several ranks hold the same head.
        self.key = max(1, model.kv_heads // tp) * model.head_dim
        self.heads, self.ffn = model.heads // tp, model.ffn // tp
        # Token copies that this rank's experts receive.
        self.routed = self.normed * model.experts_per_token if load.routed is None else load.routed
        self.stream = self.normed * model.hidden * self.item  # Bytes of the residual stream.
        self.gathers = (
            self.normed < self.tokens
        )  # Sequence parallelism: gather before attention and MLP, scatter after.
        self.gathered = self.tokens * model.hidden * self.item if self.gathers else 0  # Bytes of a gathered sequence.
        # Kernels that affect memory.
        on_gpu, fusions = config.cluster.device is Device.gpu, config.model.fusions
        self.engine = chosen_layers(config) is Layers.te  # Transformer Engine's layers.
        # Fused RMSNorm, which keeps only its input; torch has none for a CPU. Local layers add 1 to a weight in float32.
        self.fused_norm = on_gpu and (self.engine or not model.norm_plus_one)
        self.fused_swiglu = on_gpu and fusions and model.fuses_activation  # Fused SwiGLU, which keeps only its input.
        # Fused rotary positions, which keep no tables.
        self.fused_rope = self.engine and fusions and model.fuses_positions
        # Attention needs a mask if a chunk's queries see earlier keys; torch fuses that case on GPUs only.
        self.masks = not on_gpu
        self.chunks = _CHUNKS * min(128 * MIB if on_gpu else MIB, self.targets * self.columns * 4)  # Bytes of logits.
        self.norm_keeps_input = self.fused_norm or self.item == 4  # Keeps the residual stream, not a float32 copy.
        self._count_parameters()

    def _count_parameters(self) -> None:
        """Count the parameters of this rank under TP, PP and EP."""
        self.shared = self.experts = self.matrices = self.largest = self.largest_other = 0.0
        for rule, count in self._rules():
            size = self._cut(rule)
            held = size * count
            if rule.per_expert:
                held *= self.model.experts / self.parallel.ep
                self.experts += held
            else:
                self.shared += held
            self.largest = max(self.largest, size if count else 0.0)
            if rule.of_matrices:
                self.matrices += held
            else:
                self.largest_other = max(self.largest_other, size if count else 0.0)
        self.parameters = self.shared + self.experts
        # What the optimiser trains: the adapters alone in a policy that has them.
        trained, of_experts, self.largest_trained = self.shared, self.experts, self.largest
        self.adapters = [(rule, self._cut(rule)) for rule in self._adapter_rules()]
        if self.adapters:
            trained, of_experts = self.layers * sum(size for _, size in self.adapters), 0.0
            self.largest_trained = max(size for _, size in self.adapters)
            self.parameters += trained
        self.trained, self.largest_buffer = trained + of_experts, max(trained, of_experts)
        self.shard = self.trained
        if isinstance(self.optimizer, AdamwConfig) and self.optimizer.distributed:
            # Parameters whose optimiser state this rank keeps: an equal share among ranks with the same parameters.
            self.shard = (trained * self.parallel.tp + of_experts * self.parallel.ep) / self.stage_size

    def _adapter_rules(self) -> tuple[Rule, ...]:
        """Return the rules of a layer's adapters: pairs of A and B."""
        lora = self.config.model.lora
        return adapter_rules(self.model, lora) if lora.rank and not self.is_critic else ()

    def weight_gradient(self, size: float) -> float:
        """Return the `size` of the gradient of a weight of the model; 0 if the weights are frozen."""
        return 0.0 if self.adapters else size

    def _rules(self) -> Iterator[tuple[Rule, int]]:
        """Yield each tensor rule with its number of tensors in this stage; all experts of a layer count as one."""
        seen_layer = False
        for rule in rules_of(self.model, values=self.is_critic):
            if rule.per_layer:
                seen_layer = True
                yield rule, rule.count_in(self.held)
            elif not seen_layer:
                yield rule, int(self.stage == 0)
            else:
                yield rule, int(self.last and (rule.exported or not self.tied_here))

    def _cut(self, rule: Rule) -> float:
        """Return the elements of one tensor on one TP rank; expert tensors are not cut."""
        if rule.cut is Cut.VOCAB:
            return self.columns * self.model.hidden
        whole = sum(map(prod, rule.shapes))
        return whole if rule.cut is Cut.WHOLE or rule.per_expert else whole / self.parallel.tp


def stage_memory(rank: StageRank) -> GroupMemory:
    """Estimate the memory of one rank of one pipeline stage."""
    # Always present. Float32 weights need no master copy.
    master = 0 if rank.config.model.dtype is Dtype.float32 else 4
    reference = _reference(rank)
    # An inference group that only scores with a frozen reference does not hold the policy, unless it is the policy.
    own = bool(rank.adapters) and reference is None
    policy = rank.group != "inference" or own or scores_with_policy(rank.config.algorithm)
    always = {"parameters": rank.parameters * rank.item if policy else 0.0, "runtime": _runtime(rank)}
    if rank.optimizer is not None:
        state = state_bytes(rank.optimizer, rank.matrices / rank.trained)
        always |= {"gradients": rank.trained * 4, "optimizer": rank.shard * (state + master)}
    passing, peak = _scoring(rank) if rank.optimizer is None else _training(rank)
    if reference is not None:
        average = master if rank.config.algorithm.ref_policy_ema_tau < 1 else 0
        always["reference"] = reference.parameters * (rank.item + average)
        if reference is not rank:  # A teacher computes before the policy or after it.
            scoring, most = _scoring(reference)
            passing = {part: max(passing.get(part, 0.0), scoring.get(part, 0.0)) for part in passing | scoring}
            peak = max(peak, most)
    later = {"step": _optimizer_step(rank), "weight_sync": _weight_sync(rank) if policy else 0.0}
    total = sum(always.values()) + max(peak, _left(rank) + max(later.values()))
    return GroupMemory({name: size for name, size in (always | passing | later).items() if size}, total)


def _reference(rank: StageRank) -> StageRank | None:
    """Return the rank of the reference: a teacher's, or `rank` itself; None if the group holds none.

    With adapters, the reference is the policy without them, unless there is a teacher.
    """
    config = rank.config
    if not holds_reference(config, rank.group):
        return None
    if (taught := of_teacher(config)) is not None:
        model = read_architecture(taught.model.path, taught.model.family)
        return StageRank(taught, model, rank.group, rank.stage, rank.load)
    return None if rank.adapters else rank


@cache
def matrix_share(model: Architecture) -> float:
    """Return the share of a model's parameters that are in matrices that Muon steps."""
    rules = [rule for rule in rules_of(model) if rule.of_matrices]
    sizes = ((rule, sum(map(prod, rule.shapes)) * rule.count_in(range(model.layers))) for rule in rules)
    matrices = sum(size * (model.experts if rule.per_expert else 1) for rule, size in sizes)
    return matrices / count_parameters(model)


def state_bytes(optimizer: OptimizerConfig, matrices: float = 0.0) -> float:
    """Return the bytes of an optimiser's state per parameter, without the weight and its float32 copy.

    `matrices` is the share of parameters that Muon steps, if it is the optimiser; 0 gives the most that it may keep.
    """
    if isinstance(optimizer, AdamwConfig):
        return 8.0  # Two float32 moments.
    if isinstance(optimizer, MuonConfig):
        return 8.0 - 4.0 * matrices  # One float32 momentum of a matrix.
    # Imported here, because torch takes seconds to import.
    from rlsys.algorithms import optimizers

    return optimizers.state_bytes(optimizer)


def holds_reference(config: RunConfig, group: str) -> bool:
    """True if the group holds the reference: the inference group, or the actor for a KL over the whole vocabulary."""
    algorithm = config.algorithm
    if group == "inference":
        return has_reference(algorithm)
    return group == "actor" and sums_over_vocabulary(algorithm)


def _training(rank: StageRank) -> tuple[dict[str, float], float]:
    """Return the parts of a training pass, and their combined peak in bytes."""
    kinds, last_norm = _kinds_of_layers(rank), _norm(rank)
    of_layers = sum(
        count * (rank.stream if rank.config.model.recompute else sum(step.keeps for step in steps))
        for count, steps in kinds
    )
    # Kept until their gradients are computed: the stage's output, and the input from the previous stage.
    ends = rank.stream * ((not rank.last) + (rank.stage > 0 and not rank.norm_keeps_input))
    # In training, Megatron's own layers keep the buffer in which they gather a sequence.
    buffer = 0 if rank.engine else rank.gathered
    waiting = rank.in_flight * (of_layers + ends) + buffer
    # The last norm's output is not kept: the head copies the targets' rows.
    activations = waiting + (last_norm.keeps - rank.stream if rank.last else 0.0)
    # A tied matrix gets gradients from head and embedding; the head's gradient is kept until the embedding's gradient
    # is computed.
    matrix = rank.weight_gradient(rank.columns * rank.model.hidden * rank.item)
    tied = matrix if rank.tied_here else 0
    arriving = 0 if rank.last else rank.stream
    layer = max(_layer_backward(rank, steps) for _, steps in kinds)
    left = _left(rank)
    moments = [waiting + layer + tied + arriving + max(left / 2 - rank.stream, 0)]
    if rank.last:
        moments.append(activations + last_norm.backward + tied)
    if rank.stage == 0:
        below = waiting - of_layers + left
        moments.append(below + matrix + tied + rank.stream)
    backward = max(max(moments) - activations, 0.0)
    logits = _read_out_and_back(rank) if rank.last else 0.0
    reference = 0.0
    if rank.last and holds_reference(rank.config, rank.group):
        # Reference logits of all micro-batches in the pipeline, kept until the last backward pass (`Actor._loss_for`).
        reference = float(rank.parallel.pp * rank.targets * rank.columns * rank.item)
    parts = {"activations": activations, "logits": logits + reference, "backward": backward}
    return parts, activations + reference + max(logits, backward)


def _layer_backward(rank: StageRank, steps: list[LayerStep]) -> float:
    """Return the bytes that the backward pass of a layer needs in addition to what waits for it."""
    kept = list(accumulate(step.keeps for step in steps))  # Bytes kept after each step.
    backward_peak = max(below + step.backward for below, step in zip(kept, steps, strict=True))
    if not rank.config.model.recompute:
        return backward_peak - kept[-1]
    # While a layer is recomputed, the gradient of its output is alive.
    forward_peak = max(below + step.ahead for below, step in zip(kept, steps, strict=True))
    # A norm that keeps a float32 copy adds it to the residual sum after attention.
    return max(backward_peak, forward_peak + rank.stream) + (0 if rank.norm_keeps_input else rank.stream)


def _left(rank: StageRank) -> float:
    """Return the bytes that recomputed MoE layers hold until they run again: each layer's input and the gradient of
    this input.

    Megatron's token dispatcher keeps the router probabilities, whose autograd graph references the layer's input.
    """
    stays = rank.config.model.recompute and rank.optimizer is not None
    return 2.0 * rank.mixtures * rank.stream if stays else 0.0


def _read_out_and_back(rank: StageRank) -> float:
    """Return the peak bytes of output layer and loss, forward and backward."""
    hidden = rank.targets * rank.model.hidden
    if rank.is_critic:
        # Two float32 copies, for the product and for its gradient.
        return hidden * (rank.item + 4 + 4)
    logits = rank.targets * rank.columns * rank.item
    # A KL between distributions has a gradient of its own.
    extra = logits if rank.group == "actor" and full_kl(rank.config.algorithm) else 0
    at_loss = 2 * logits + extra + rank.chunks
    weight = rank.weight_gradient(rank.columns * rank.model.hidden * rank.item)
    return hidden * rank.item + max(at_loss, logits + weight + hidden * rank.item)


def _scoring(rank: StageRank) -> tuple[dict[str, float], float]:
    """Return the parts of forward passes without gradients, and their combined peak in bytes."""
    received = rank.stream if rank.parallel.pp > 1 else 0
    # Callers hold four residual streams: the embedding, the layer's input, the sum after attention, and its norm.
    most = max(step.forward for _, steps in _kinds_of_layers(rank) for step in steps)
    activations = 4 * rank.stream + most + received
    if not rank.last:
        return {"activations": activations}, activations
    hidden = rank.model.hidden * rank.item
    logits = rank.targets * (hidden + rank.columns * rank.item) + rank.chunks
    return {"activations": activations, "logits": logits}, max(activations, logits + rank.tokens * hidden)


def _optimizer_step(rank: StageRank) -> float:
    """Return the temporary bytes of an optimiser's step."""
    if rank.optimizer is None:
        return 0.0
    if isinstance(rank.optimizer, MuonConfig):
        one_by_one = rank.config.cluster.device is Device.cpu
        others = 4 * 2 * rank.largest_other if one_by_one else 4 * (rank.trained - rank.matrices)
        return max(others, *(_muon_step(rank, rule) for rule, count in rank._rules() if count and rule.of_matrices))
    if rank.config.cluster.device is Device.cpu:
        # gloo copies a buffer of gradients; then the optimiser updates one parameter at a time.
        sharded = isinstance(rank.optimizer, AdamwConfig) and rank.optimizer.distributed
        return 4 * rank.largest_buffer if sharded else 4 * 2 * rank.largest_trained
    # torch's optimisers update all parameters at once; Transformer Engine's AdamW needs no temporary tensors.
    return 0.0 if rank.engine and isinstance(rank.optimizer, AdamwConfig) else 4 * rank.shard


def _muon_step(rank: StageRank, rule: Rule) -> float:
    """Return the temporary bytes of Muon's step of one parameter: `rlsys.trainer.optimizer` and `algorithms.optimizers`.

    Its direction is kept until the step. The matrices are a copy if TP ranks gather them or their rows are interleaved.
    Each becomes float32 in turn, and at the end they are joined again.
    """
    assert isinstance(rank.optimizer, MuonConfig)
    item, tp = BYTES[rank.optimizer.newton_schulz_dtype], 1 if rule.per_expert else rank.parallel.tp
    whole, gathers, interleaved = sum(map(prod, rule.shapes)), tp > 1 and rule.cut is not Cut.WHOLE, rule.cut is Cut.QKV
    direction = item * rank._cut(rule)
    before = direction + item * whole * (gathers or interleaved)
    peak = before + item * whole * (gathers + (gathers and interleaved))
    done = 0.0
    for rows, columns in rule.shapes:
        size, gram = rows * columns, min(rows, columns) ** 2
        peak = max(peak, before + done + max(2 * item * (size + gram), (4 + item * (item < 4)) * size))
        done += 4 * size
    joined = {Cut.QKV: 4 * whole, Cut.GATE_UP: 4 * rank._cut(rule)}.get(rule.cut, 0.0)
    return max(peak, before + done + joined)


def _runtime(rank: StageRank) -> float:
    """Return the bytes of the process's CUDA context and of NCCL's buffers.

    There is one communicator per kind of parallelism, one over all ranks that train, for the norm of the gradient, one for
    a broadcast of weights, and one between the actor's first pipeline stage, which sends the weights, and each other one.
    """
    cluster, parallel = rank.config.cluster, rank.parallel
    if cluster.device is Device.cpu:
        return 0.0
    dp = rank.stage_size // (parallel.tp * parallel.cp)
    kinds = sum(size > 1 for size in (parallel.tp, parallel.pp, parallel.cp, parallel.ep, dp))
    norm = rank.group != "inference" and rank.stage_size * parallel.pp > 1
    broadcast = not rank.is_critic and cluster.sync_mode is SyncMode.broadcast
    passes_on = rank.group == "actor" and cluster.sync_mode is not SyncMode.ipc
    pairs = (1 if rank.stage else parallel.pp - 1) if passes_on else 0
    return CONTEXT_BYTES + NCCL_BYTES * (kinds + norm + broadcast + pairs)


def _weight_sync(rank: StageRank) -> float:
    """Return the device bytes that the weight sync needs; on a CPU, buckets in host memory do not count."""
    cluster = rank.config.cluster
    if cluster.device is Device.cpu or rank.group == "critic":
        return 0.0
    bucket = cluster.sync_bucket_bytes
    if rank.group == "inference":
        return 0.0 if cluster.sync_mode is SyncMode.ipc else min(bucket, count_parameters(rank.model) * rank.item)
    # While a bucket is sent, the next one is packed; with `tensor` and `disk`, a sent bucket is in host memory.
    buckets = bucket * (2 if cluster.sync_mode in (SyncMode.ipc, SyncMode.broadcast) else 1)
    # The largest parameter is gathered from its shards, then concatenated. The experts of all other ranks come together.
    gathers = 2 * rank.largest * rank.parallel.tp * rank.item if rank.parallel.tp > 1 else 0
    # An adapter is merged in float32: the weight, the product, and their sum.
    pairs = zip(rank.adapters[::2], rank.adapters[1::2], strict=True)
    merged = (sum(rows for rows, _ in b.shapes) * a.shapes[0][1] / rank.parallel.tp for (a, _), (b, _) in pairs)
    gathers += 3 * 4 * max(merged, default=0)
    return buckets + max(gathers, bucket if rank.parallel.ep > 1 else 0)


def _engine(config: RunConfig, model: Architecture) -> GroupMemory:
    """Estimate the first rank of an engine: its weights, its KV cache when full, and what the engine says that it takes
    beside them.

    With sync_mode=ipc the rank also holds a pushed copy of the whole model, unless the engine sleeps during a push. Any
    other copy is in host memory, and a bucket of it is on the device while it is staged or loaded.
    """
    engine, cluster = config.rollout.engine, config.cluster
    parameters = engine_weights_bytes(config, model)
    parts = {"parameters": parameters, "kv_cache": kv_cache_tokens(config, model) * kv_token_bytes(config, model)}
    if cluster.device is Device.gpu:
        contexts = 2  # Of the rank, and of the worker, which copies buckets of weights to every rank's device.
        communicators = (engine.tp > 1) + (cluster.sync_mode is SyncMode.broadcast)
        parts["runtime"] = contexts * CONTEXT_BYTES + communicators * NCCL_BYTES
        parts["graphs"] = engine_fact(config, "graph_memory")
        parts["activations"] = engine_fact(config, "memory_beside_cache", model)
        whole = parameters * engine.tp
        stages_here = cluster.sync_mode is SyncMode.ipc and cluster.mode is Mode.disaggregated
        parts["weight_sync"] = whole if stages_here else min(whole, cluster.sync_bucket_bytes)
    return GroupMemory({name: float(size) for name, size in parts.items() if size}, float(sum(parts.values())))


def engine_weights_bytes(config: RunConfig, model: Architecture) -> float:
    """Return the bytes of an engine's weights on each of its devices."""
    engine = config.rollout.engine
    return count_parameters(model) * BYTES[engine.dtype] / engine.tp


def kv_token_bytes(config: RunConfig, model: Architecture) -> int:
    """Return the bytes of one token in an engine's KV cache, on each of its devices."""
    engine = config.rollout.engine
    if model.kv_lora_rank:  # Every device holds the latents of all heads, and the positions that these share.
        return model.layers * (model.kv_lora_rank + model.qk_rope_head_dim) * BYTES[engine.dtype]
    # With more devices than key/value heads, several devices hold the same head.
    return 2 * model.layers * max(1, model.kv_heads // engine.tp) * model.head_dim * BYTES[engine.dtype]


def kv_cache_tokens(config: RunConfig, model: Architecture) -> float:
    """Return the capacity of an engine's KV cache, as the engine says."""
    return engine_fact(config, "cache_tokens", engine_weights_bytes(config, model), kv_token_bytes(config, model))


def _kinds_of_layers(rank: StageRank) -> list[tuple[int, list[LayerStep]]]:
    """Return the numbers of the stage's layers without and with experts, if any, and the steps of such a layer."""
    kinds = ((rank.layers - rank.mixtures, _mlp(rank, rank.ffn)), (rank.mixtures, _experts(rank)))
    return [(count, _layer_steps(rank, mlp)) for count, mlp in kinds if count]


def _layer_steps(rank: StageRank, mlp: list[LayerStep]) -> list[LayerStep]:
    """Return the steps of one layer: norm, attention, norm, and MLP or experts; norms of the latter's outputs, if any."""
    attention = (_attention_of_latents if rank.model.kv_lora_rank else _attention)(rank)
    after = [_norm(rank, output=False)] if rank.model.post_norms else []
    return [*_adapters(rank), _norm(rank), *attention, *after, _norm(rank), *mlp, *after]


def _adapters(rank: StageRank) -> Iterator[LayerStep]:
    """Yield a step for each adapter of a layer; `rlsys.trainer.model.lora` computes them.

    An adapter keeps its scaled product A x, and B spread over the columns of its parts; others keep its input. The steps
    come before the layer's, so that what they keep counts in all of these.
    """
    for (a, _), (b, _) in zip(rank.adapters[::2], rank.adapters[1::2], strict=True):
        seen = sum(shape[0] for shape in a.shapes)
        rows = sum(shape[0] for shape in b.shapes) // (1 if b.cut is Cut.WHOLE else rank.parallel.tp)
        spread, out = rows * seen * rank.item, rank.tokens * rows * rank.item
        # Forward: the layer's output, the adapter's, and their sum.
        yield LayerStep(rank.tokens * seen * rank.item + spread, spread + out, 3 * out)


def _norm(rank: StageRank, output: bool = True) -> LayerStep:
    """Return the step of an RMSNorm of the residual stream. Counts the input, which the norm keeps, and the output,
    which the next layer keeps; not the `output` of a norm that is added to the residual stream.

    Transformer Engine's `_LayerNormLinear` saves input, output (with sequence parallelism the rank's own share) and
    1/rms, the same tensors as its RMSNorm and the following layer. torch's `rms_norm` is a fused kernel on GPUs only
    (`_fused_rms_norm`).
    """
    stream = rank.stream
    out = stream if output else 0
    if rank.fused_norm:
        # Backward: gradients of the output, the input, and the residual connection around the norm.
        return LayerStep(stream + out + 4 * rank.normed, 3 * stream, stream)
    # Float32 input and its product with 1/rms, and the output. Backward: four gradient terms and the residual's gradient.
    float32 = 4 * rank.normed * rank.model.hidden
    product = rank.weight_gradient(float32)  # Kept for the gradient of the norm's weight alone.
    return LayerStep(float32 + product + out, 4 * float32 + stream, 2 * float32)


def _column(rank: StageRank, width: int) -> float:
    """Return the bytes alive in the backward pass of a column-parallel layer, residual stream -> `width` per TP rank.

    Counts the gradients of its output, weight and input, and of the residual stream. With sequence parallelism the
    input's gradient is scattered and the input gathered again. Megatron gathers into a persistent buffer, Transformer
    Engine into a new tensor (`_LayerNormLinear.backward`).
    """
    hidden = rank.model.hidden
    gradients = (rank.tokens * (width + hidden) + rank.weight_gradient(width * hidden)) * rank.item
    return gradients + (rank.gathered if rank.engine else 0) + rank.stream * (2 if rank.gathers else 1)


def _row(rank: StageRank, width: int) -> float:
    """Return the bytes alive in the backward pass of a row-parallel layer, `width` per TP rank -> residual stream.

    Counts the same tensors as `_column`. The gradient of the layer's output is the gradient of the stream, which
    sequence parallelism first gathers.
    """
    weight = rank.weight_gradient(width * rank.model.hidden)
    return (rank.tokens * width + weight) * rank.item + rank.gathered + rank.stream


def _attention(rank: StageRank) -> list[LayerStep]:
    """Return the steps of attention, from the normed input to the residual sum. The next norm counts that sum."""
    query, key = rank.tokens * rank.item * rank.query, rank.tokens * rank.item * rank.key
    return [
        LayerStep(0, _column(rank, rank.query + 2 * rank.key), 2 * (query + 2 * key)),
        *([_qk_norm(rank)] if rank.model.qk_norm else []),
        _rotate(rank, query, key),
        *(_attend_engine if rank.engine else _attend)(rank, query, key),
    ]


def _attention_of_latents(rank: StageRank) -> list[LayerStep]:
    """Return the steps of multi-head latent attention, whose keys are as large as queries, but not its values.

    The projection of the latents and its norms keep their inputs. The projections to heads keep the normed latents:
    queries, keys and values are new tensors. Megatron's own layers pad values to the size of keys, and attention returns
    as much. Packed sequences are treated as in `_attend`.
    """
    model, item = rank.model, rank.item
    tp, latents = rank.parallel.tp, model.kv_lora_rank + (model.q_lora_rank or 0)
    values, shared = model.heads * model.v_head_dim // tp, model.qk_rope_head_dim
    query, value = rank.tokens * rank.query * item, rank.tokens * values * item
    projected = rank.query + model.heads * (model.qk_nope_head_dim + model.v_head_dim) // tp
    normed = rank.normed * latents * (item + (0 if rank.fused_norm else 4 if item == 4 else 8))
    padded = value if rank.engine else query
    sums, up = 4 * rank.tokens * rank.heads, rank.tokens * projected * item
    gradients = 2 * query + 2 * padded
    return [
        LayerStep(rank.normed * (latents + shared) * item + normed, _column(rank, projected), up),
        LayerStep(4 * rank.width * shared * item, up + 2 * query, up + 3 * query),
        LayerStep(
            2 * query + 2 * padded + sums,
            gradients + (gradients if rank.packed else 0) + rank.stream,
            3 * query + 2 * padded,
        ),
        LayerStep(0 if rank.engine else value, _row(rank, values), value + rank.tokens * model.hidden * item),
    ]


def _rotate(rank: StageRank, query: int, key: int) -> LayerStep:
    """Return the step that applies rotary positions; `query` and `key` are in bytes.

    Megatron keeps sine and cosine tables. Its backward pass holds four terms of the query's gradient and the gradients of
    keys and values. Transformer Engine's `FusedRoPEFunc` saves only angles shared by all layers; its backward pass
    concatenates the gradients of queries, keys and values (`SplitAlongDim.backward`).
    """
    mixed = query + 2 * key
    if rank.fused_rope:
        return LayerStep(0, 2 * mixed + rank.stream, mixed + 2 * query + key)
    return LayerStep(4 * rank.width * rank.model.head_dim * rank.item, 4 * query + 2 * key, mixed + 4 * query)


def _attend(rank: StageRank, query: int, key: int) -> list[LayerStep]:
    """Return the steps of attention in local layers (torch's kernels) and of the output projection; `query` and `key`
    are in bytes.

    Rotated queries and keys are new tensors. Values are a view of the QKV projection's output and keep all of it alive.
    Packed sequences are attended one by one, and their outputs concatenated; so are the blocks of a local layer, which
    also keep the masks of a sequence's first block, of those in between, and of its last one. Sinks make wider copies of
    queries, keys and values, of which each block has its own, and of the output; they need a mask in global layers too.
    """
    mixed, sums = query + 2 * key, 4 * rank.tokens * rank.heads
    joined = query if rank.packed or rank.model.sinks else 0
    project = LayerStep(joined, _row(rank, rank.query), joined + rank.tokens * rank.model.hidden * rank.item)
    if rank.parallel.cp > 1:
        return [_attend_gathered(rank, query, key), project]
    # Gradients of the output and of the inputs; if packed, the inputs' gradients exist both per sequence and
    # concatenated.
    gradients = query + (2 if joined else 1) * mixed + rank.stream
    masks = 0.0
    window = rank.model.window or rank.longest
    if rank.longest > window:
        per_sequence = window * (window + 2 * window + rank.longest % window)
        masks = rank.local / rank.layers * rank.tokens / rank.longest * per_sequence * rank.item
    if rank.model.sinks:
        wider = _wider(rank)
        apart = rank.local / rank.layers * (rank.longest > window)  # Share of layers in blocks.
        masks += (1 - apart) * rank.masks * rank.tokens * rank.longest * rank.item
        copies = wider * (query + 2 * key * (1 + apart))
        keeps = copies + wider * query + sums + masks
        return [LayerStep(keeps, gradients + copies, mixed + copies + wider * query + masks), project]
    return [LayerStep(mixed + query + key + query + sums + masks, gradients, mixed + 3 * query + key + masks), project]


def _attend_gathered(rank: StageRank, query: float, key: int) -> LayerStep:
    """Return the step of attention of `_attend` under context parallelism, which gathers the keys and values of all
    ranks.

    A sequence is cut into n = 2 cp chunks, of which rank r has chunks r and n - 1 - r. Unless r = 0, both need masks:

        queries: 1 / n of the length each; keys: (r + 1) / n and (n - r) / n; masks: (n + 1) / n^2 of the squared length.

    The row's length times the longest sequence bounds the sum of squared lengths.
    """
    cp = rank.parallel.cp
    whole, chunks = 2.0 * key * cp, 2 * cp
    pairs = rank.tokens * cp * rank.longest * (chunks + 1) / chunks**2 if rank.masks else 0
    if rank.model.sinks:  # Wider copies, as in `_attend`: of the keys that each chunk sees.
        query, whole = query * _wider(rank), whole * _wider(rank) * (chunks + 1) / chunks
    keeps = query + whole + query + 4 * rank.tokens * rank.heads + pairs * rank.item
    return LayerStep(keeps, query + 2 * whole, 2 * whole + 3 * query)


def _wider(rank: StageRank) -> float:
    """Return the size of a head with a sink, relative to one without."""
    return 1 + SINK_DIMS / rank.model.head_dim


def _attend_engine(rank: StageRank, query: int, key: int) -> list[LayerStep]:
    """Return the steps of Transformer Engine's attention and of the output projection; `query` and `key` are in bytes.

    It saves queries, keys, values, the output, and one float32 per softmax row (`FusedAttnFunc`, `FlashAttention`). The
    projection saves the same output tensor. `get_qkv_layout` copies the strided values, so nothing of the QKV
    projection's output is kept.

    With context parallelism, `AttnFuncWithCPAndKVP2P` saves the same for the rank's own tokens. Its backward pass adds
    two buffers for keys and values, two for their gradients, and one for the gradient of queries.
    """
    mixed = query + 2 * key
    ring = query + 8 * key if rank.parallel.cp > 1 else 0
    keeps = mixed + query + 4 * rank.tokens * rank.heads
    return [
        LayerStep(keeps, query + mixed + rank.stream + ring, 2 * mixed + query),
        LayerStep(0, _row(rank, rank.query), rank.tokens * rank.model.hidden * rank.item),
    ]


def _qk_norm(rank: StageRank) -> LayerStep:
    """Return the step of the per-head norms of queries and keys; queries are copied first."""
    query, key = rank.tokens * rank.query, rank.tokens * rank.key
    if not rank.fused_norm:
        # Like `_norm`; the float32 conversion copies only if the model's dtype differs.
        copies = 4 * (query + key) if rank.item < 4 else query * rank.item
        return LayerStep(copies + 4 * (query + key), 16 * query, 8 * query + query * rank.item)
    # Transformer Engine's `ops.RMSNorm` also copies the strided keys, and keeps a float32 1/rms per head.
    keys = key * rank.item + 4 * (query + key) / rank.model.head_dim if rank.engine else 0
    return LayerStep(query * rank.item + keys, 3 * query * rank.item, 3 * query * rank.item)


def _mlp(rank: StageRank, width: int) -> list[LayerStep]:
    """Return the steps of a gated MLP of `width` per TP rank."""
    out = rank.tokens * rank.model.hidden * rank.item
    ffn = rank.tokens * width * rank.item
    # Kept: gate and up; unless fused, silu(gate) and a copy of up for their product; the product.
    apart = 0 if rank.fused_swiglu else 2 * ffn
    return [
        LayerStep(0, _column(rank, 2 * width), out + 2 * ffn),
        # Gradients of gate and up, and the gradient of their product, from which they are computed.
        LayerStep(2 * ffn + apart, 3 * ffn + rank.stream, 3 * ffn + apart),
        LayerStep(ffn, _row(rank, width), out + ffn),
    ]


def _experts(rank: StageRank) -> list[LayerStep]:
    """Return the steps of Megatron-core's MoELayer: shared expert, router, dispatch, experts, combine.

    The product of gate and up is kept before and after weighting by the router probability, unless `fused_swiglu`
    (`WeightedSwiGLUFunction` saves gate and up). Dispatched tokens stay alive while the experts run: once as permuted
    and, with `ep` > 1, once as received from other ranks. Expert outputs are concatenated and sorted back.
    """
    model, ep, stream, engine = rank.model, rank.parallel.ep, rank.stream, rank.engine
    sent = rank.routed * model.hidden * rank.item
    ffn = rank.routed * model.expert_ffn * rank.item
    # Per token and expert: float32 probabilities, the routing mask (1 byte), and the scattered probabilities.
    router = rank.normed * model.experts * (4 + 1 + 2 * rank.item)
    # Permutation map; Transformer Engine's `make_row_id_map` has two int32 per token and expert.
    places = 4 * rank.normed * (2 * model.experts + 1) if engine else 8 * rank.routed
    # Unless fused: the activation, a copy of up, and the product. A clamped one also keeps the clamped gate and a factor.
    apart = 0 if rank.fused_swiglu else (5 if model.clamped_swiglu else 3) * ffn
    passing = sent * (4 if ep > 1 else 3)
    # `_GroupedLinear.backward` holds the gradients of all experts' weights at once.
    weights = model.experts // ep * 2 * model.expert_ffn * model.hidden * rank.item if engine else 0
    shared = _mlp(rank, model.shared_experts * model.expert_ffn // rank.parallel.tp) if model.shared_experts else []
    return [
        *shared,
        LayerStep(router, 2 * router + 2 * stream, router),
        LayerStep(sent + places, 2 * sent + stream, 2 * sent),
        LayerStep(3 * ffn + apart, max(2 * sent, sent + 3 * ffn + weights) + stream, passing + sent, passing),
    ]
