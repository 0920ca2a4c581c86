"""Bytes of activations of one transformer layer on one rank: what it keeps for its backward pass, and what works beside.

A layer is a list of steps in the order of its forward pass. Each `keeps` some bytes from there to its own backward pass,
and has others alive only while that runs (`backward`) or, without gradients, while it itself runs (`forward`). They
follow from which tensors each operation saves for its gradient: a storage counts once, however many operations save views
of it, and for as long as one of them does. Seen with torch 2.13 and megatron-core 0.16 for Megatron's own layers
(tests/megatron/test_memory.py); read in Transformer Engine 2.20 and not seen for its layers (`Kernels.engine`).

Sizes are of one micro-batch. What is proportional neither to tokens times a width nor to a weight is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Kernels:
    """What computes, as far as memory depends on it."""

    fused_norm: bool
    """One kernel for RMSNorm, which keeps its input and no product of it. torch has none for a CPU."""
    fused_swiglu: bool
    """One kernel for SwiGLU, which keeps its input alone."""
    fused_rope: bool
    """One kernel for rotary positions, which keeps no tables of its own."""
    engine: bool
    """The layers are Transformer Engine's."""
    chunk_bytes: int
    """Of the float32 pieces in which logits are worked off."""
    masks: bool
    """Attention needs a mask where a chunk's queries see keys before it: torch has that in one kernel on a GPU alone."""
    foreach: bool
    """The optimiser's step takes all parameters at once."""

    def norm_keeps_input(self, work: Work) -> bool:
        """Whether a norm keeps the residual stream itself, and not a float32 copy of it."""
        return self.fused_norm or work.item == 4


CPU = Kernels(
    fused_norm=False,
    fused_swiglu=False,
    fused_rope=False,
    engine=False,
    chunk_bytes=MIB,
    masks=True,
    foreach=False,
)
LOCAL = Kernels(
    fused_norm=True,
    fused_swiglu=True,
    fused_rope=False,
    engine=False,
    chunk_bytes=128 * MIB,
    masks=False,
    foreach=True,
)


class Step(NamedTuple):
    """One operation, or a few; bytes."""

    keeps: float
    backward: float
    forward: float
    ahead: float = 0.0
    """Alive in a forward pass with gradients, besides what it keeps."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one rank does of one layer, in numbers of elements."""

    item: int
    """Bytes of an element."""
    tokens: int
    """Of its part of a micro-batch, in attention and MLP."""
    normed: int
    """Those that it norms: with sequence parallelism, its share of `tokens`."""
    width: int
    """Positions: the tokens of a packed row, or the width of a rectangle."""
    packed: bool
    longest: int
    """Tokens of the longest sequence, of all context-parallel ranks."""
    cp: int
    hidden: int
    head_dim: int
    heads: int
    query: int
    """Width of its query heads, as `key` of its key heads, `ffn` of its part of the MLP."""
    key: int
    ffn: int
    qk_norm: bool
    experts: int
    """Of the layer; 0 is a dense one."""
    ep: int
    routed: int
    """Tokens that its experts get, each counted as often as it is sent."""
    expert_ffn: int

    @property
    def stream(self) -> int:
        """Bytes of the residual stream."""
        return self.normed * self.hidden * self.item

    @property
    def sequence_parallel(self) -> bool:
        """Whether tokens are gathered before and scattered behind attention and MLP."""
        return self.normed < self.tokens


def kept(steps: Sequence[Step]) -> float:
    """Bytes that a forward pass leaves for the backward pass."""
    return sum(step.keeps for step in steps)


def backward_peak(steps: Sequence[Step]) -> float:
    """Most bytes alive in the backward pass, what is kept of `steps` included."""
    held = kept(steps)
    peak = 0.0
    for step in reversed(steps):
        peak = max(peak, held + step.backward)
        held -= step.keeps
    return peak


def recompute_peak(steps: Sequence[Step]) -> float:
    """Most bytes alive in a forward pass with gradients of `steps` alone."""
    held = peak = 0.0
    for step in steps:
        held += step.keeps
        peak = max(peak, held + step.ahead)
    return peak


def forward_peak(steps: Sequence[Step], stream: float) -> float:
    """Most bytes alive in a forward pass without gradients.

    Callers hold four residual streams: the embedding, the layer's input, the sum behind attention, and a norm of it.
    """
    return 4 * stream + max(step.forward for step in steps)


def layer_steps(work: Work, kernels: Kernels) -> list[Step]:
    """A layer's steps: norm, attention, norm, and MLP or experts."""
    mlp = _experts(work, kernels) if work.experts else _mlp(work, kernels)
    return [norm(work, kernels), *_attention(work, kernels), norm(work, kernels), *mlp]


def norm(work: Work, kernels: Kernels) -> Step:
    """RMSNorm of the residual stream: the norm keeps its input, what comes behind keeps its output.

    Transformer Engine's `_LayerNormLinear` saves input, output (a rank's own share with sequence parallelism) and 1/rms,
    as do its RMSNorm and the layer behind it; torch's `rms_norm` is one kernel, `_fused_rms_norm`, on a GPU alone.
    """
    stream = work.stream
    if kernels.fused_norm:
        rstd = 4 * work.normed
        # The gradients of output, input and of the residual connection past it.
        return Step(2 * stream + rstd, 3 * stream, stream)
    # Input and its product with 1/rms, in float32, and the output. Backward, four terms of the gradient and the residual's.
    float32 = 4 * work.normed * work.hidden
    return Step(2 * float32 + stream, 4 * float32 + stream, 2 * float32)


def _column(work: Work, kernels: Kernels, width: int) -> float:
    """Bytes alive in the backward pass of a linear layer from the residual stream to a `width` that TP cuts.

    Gradients of its output, weight and input and of the residual stream. With sequence parallelism the gradient of the
    input is scattered, and the input gathered once more: by Megatron into a buffer that lives on, by Transformer Engine
    into a new tensor (`_LayerNormLinear.backward`).
    """
    gathered = work.tokens * work.hidden if work.sequence_parallel and kernels.engine else 0
    gradients = work.tokens * (width + work.hidden) + width * work.hidden + gathered
    return gradients * work.item + work.stream * (2 if work.sequence_parallel else 1)


def _row(work: Work, width: int) -> float:
    """As `_column`, of a layer from a `width` that TP cuts back to the stream.

    Without sequence parallelism the gradient of its output is that of the stream; with it, that is gathered.
    """
    gathered = work.tokens * work.hidden if work.sequence_parallel else 0
    return (work.tokens * width + width * work.hidden + gathered) * work.item + work.stream


def _attention(work: Work, kernels: Kernels) -> list[Step]:
    """From the normed input to the sum with the residual stream, which the next norm keeps."""
    token = work.tokens * work.item
    query, mixed = token * work.query, token * (work.query + 2 * work.key)
    return [
        Step(0, _column(work, kernels, work.query + 2 * work.key), 2 * mixed),
        *([_qk_norm(work, kernels)] if work.qk_norm else []),
        _rotate(work, kernels, query, token * work.key),
        *(_attend_engine if kernels.engine else _attend)(work, kernels, query, token * work.key),
    ]


def _rotate(work: Work, kernels: Kernels, query: int, key: int) -> Step:
    """Rotary positions; `query` and `key` in bytes.

    Megatron keeps tables of sines and cosines, and has four terms of the gradient alive with those of keys and values.
    Transformer Engine's `FusedRoPEFunc` saves angles that all layers share; then gradients of queries, keys and values
    are joined (`SplitAlongDim.backward`).
    """
    mixed = query + 2 * key
    if kernels.fused_rope:
        return Step(0, 2 * mixed + work.stream, mixed + 2 * query + key)
    return Step(4 * work.width * work.head_dim * work.item, 4 * query + 2 * key, mixed + 4 * query)


def _attend(work: Work, kernels: Kernels, query: int, key: int) -> list[Step]:
    """Attention of local layers, by torch's kernels, and the projection behind; `query` and `key` in bytes.

    Queries and keys are turned into new tensors; values remain a view of the projection's output and keep all of it.
    Packed, sequences are attended one by one, and what comes out is joined.
    """
    mixed = query + 2 * key
    sums = 4 * work.tokens * work.heads
    joined = query if work.packed else 0
    project = Step(joined, _row(work, work.query), joined + work.tokens * work.hidden * work.item)
    if work.cp > 1:
        return [_attend_gathered(work, kernels, query, key), project]
    # Gradients: of the output, and of what goes in, once for the sequences and once joined.
    gradients = query + (2 if joined else 1) * mixed + work.stream
    return [Step(mixed + query + key + query + sums, gradients, mixed + 3 * query + key), project]


def _attend_gathered(work: Work, kernels: Kernels, query: int, key: int) -> Step:
    """As `_attend`, of context parallelism: keys and values of all ranks are gathered.

    Of n = 2 cp chunks of a sequence, ranks but the first have masks of chunks r and n - 1 - r, which see (r + 1) / n and
    (n - r) / n of it: (n + 1) / n^2 of its length squared, for which the row's length times the longest is a bound.
    """
    whole = 2 * key * work.cp
    chunks = 2 * work.cp
    pairs = work.tokens * work.cp * work.longest * (chunks + 1) / chunks**2 if kernels.masks else 0
    keeps = query + whole + query + 4 * work.tokens * work.heads + pairs * work.item
    return Step(keeps, query + 2 * whole, 2 * whole + 3 * query)


def _attend_engine(work: Work, _: Kernels, query: int, key: int) -> list[Step]:
    """Attention of Transformer Engine, and the projection behind, which saves the same output; bytes as in `_attend`.

    `get_qkv_layout` copies values, being strided, so that of the projection's output nothing is kept; FusedAttnFunc and
    FlashAttention save queries, keys, values, the output, and a float32 of each row's softmax. With context parallelism
    `AttnFuncWithCPAndKVP2P` saves the same of a rank's own tokens, keys and values as one tensor, and works backward
    with two buffers for keys and values and for their gradients, and one for queries'.
    """
    mixed = query + 2 * key
    ring = query + 8 * key if work.cp > 1 else 0
    return [
        Step(
            mixed + query + 4 * work.tokens * work.heads,
            query + mixed + work.stream + ring,
            2 * mixed + query,
        ),
        Step(0, _row(work, work.query), work.tokens * work.hidden * work.item),
    ]


def _qk_norm(work: Work, kernels: Kernels) -> Step:
    """Norms of queries, which are copied for it, and of keys, per head."""
    query, key = work.tokens * work.query, work.tokens * work.key
    if kernels.engine:
        # `ops.RMSNorm` copies keys as well, which are strided; of each head 1/rms.
        rstd = 4 * (query + key) / work.head_dim
        return Step((query + key) * work.item + rstd, 3 * query * work.item, 3 * query * work.item)
    if kernels.fused_norm:
        return Step(query * work.item, 3 * query * work.item, 3 * query * work.item)
    # As `norm`: what is copied to float32 is new where the model's dtype is another.
    copies = 4 * (query + key) if work.item < 4 else query * work.item
    return Step(copies + 4 * (query + key), 16 * query, 8 * query + query * work.item)


def _mlp(work: Work, kernels: Kernels) -> list[Step]:
    token = work.tokens * work.item
    ffn = token * work.ffn
    # Gate and up projection, then, unless fused, silu(gate) and a copy of up, each kept for their product; the product.
    apart = 0 if kernels.fused_swiglu else 2 * ffn
    return [
        Step(0, _column(work, kernels, 2 * work.ffn), token * work.hidden + 2 * ffn),
        # Two gradients come of one. Fused, the gradient of gate and up comes of one.
        Step(2 * ffn + apart, 3 * ffn + work.stream, 3 * ffn + apart),
        Step(ffn, _row(work, work.ffn), token * work.hidden + ffn),
    ]


def _experts(work: Work, kernels: Kernels) -> list[Step]:
    """Router, tokens on their way to experts, these, and the way back.

    Of Megatron-core's MoELayer: a token's product is kept before and after its share weighs it, unless `fused_swiglu`
    (`WeightedSwiGLUFunction` saves gate and up). What is sent stays alive while experts work, once as it was permuted
    and, over `ep` ranks, once as it came; what they make is joined, and sorted back.
    """
    sent = work.routed * work.hidden * work.item
    ffn = work.routed * work.expert_ffn * work.item
    # Probabilities in float32, their scattered shares and who is chosen, for every expert.
    router = work.normed * work.experts * (4 + 1 + 2 * work.item)
    # Which token went where; Transformer Engine's `make_row_id_map` has two int32 of every token and expert.
    places = 4 * work.normed * (2 * work.experts + 1) if kernels.engine else 8 * work.routed
    apart = 0 if kernels.fused_swiglu else 3 * ffn
    passing = sent * (4 if work.ep > 1 else 3)
    # `_GroupedLinear.backward` has gradients of all experts' weights at once.
    weights = work.experts // work.ep * 2 * work.expert_ffn * work.hidden * work.item if kernels.engine else 0
    return [
        Step(router, 2 * router + 2 * work.stream, router),
        Step(sent + places, 2 * sent + work.stream, 2 * sent),
        Step(3 * ffn + apart, max(2 * sent, sent + 3 * ffn + weights) + work.stream, passing + sent, passing),
    ]
