"""Bytes of activations of one transformer layer on one rank: what it keeps for its backward pass, and what works beside.

A layer is a list of steps in the order of its forward pass. Each `keeps` some bytes from there to its own backward pass,
and has others alive only while that runs (`backward`) or, without gradients, while it itself runs (`forward`). They
follow from which tensors each operation saves for its gradient: a storage counts once, however many operations save views
of it, and for as long as one of them does. Seen with torch 2.13 and megatron-core 0.16 for Megatron's own layers
(tests/megatron/test_memory.py); derived, not seen, for the layers of Transformer Engine (`Kernels.engine`).

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
    foreach: bool
    """The optimiser's step takes all parameters at once."""

    def norm_keeps_input(self, work: Work) -> bool:
        """Whether a norm keeps the residual stream itself, and not a float32 copy of it."""
        return self.fused_norm or work.item == 4


CPU = Kernels(
    fused_norm=False, fused_swiglu=False, fused_rope=False, engine=False, chunk_bytes=MIB, foreach=False
)
LOCAL = Kernels(
    fused_norm=True, fused_swiglu=False, fused_rope=False, engine=False, chunk_bytes=128 * MIB, foreach=True
)


class Step(NamedTuple):
    """One operation, or a few; bytes."""

    keeps: float
    backward: float
    forward: float


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
    routed: int
    """Tokens that its experts get, each counted as often as it is sent, when all experts get equally many."""
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
    """RMSNorm of the residual stream: the norm keeps its input, what comes behind keeps its output."""
    stream = work.stream
    if kernels.fused_norm:
        rstd = 4 * work.normed
        # The gradients of output, input and of the residual connection past it.
        return Step(2 * stream + rstd, 3 * stream, stream)
    # Input and its product with 1/rms, in float32, and the output. Backward, four terms of the gradient and the residual's.
    float32 = 4 * work.normed * work.hidden
    return Step(2 * float32 + stream, 4 * float32 + stream, 2 * float32)


def _column(work: Work, width: int) -> float:
    """Bytes alive in the backward pass of a linear layer from the residual stream to a `width` that TP cuts.

    Gradients of its output, weight and input and of the residual stream. With sequence parallelism the input is
    gathered once more, into a buffer that lives on, and its gradient is scattered.
    """
    gradients = work.tokens * (width + work.hidden) + width * work.hidden
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
    query, key, mixed = token * work.query, token * work.key, token * (work.query + 2 * work.key)
    # Queries and keys are turned into new tensors; values remain a view of the projection's output and keep all of it. Under
    # context parallelism local layers gather keys and values of all ranks, and keep those.
    gathers = work.cp > 1 and not kernels.engine
    inputs = query + 2 * key * work.cp if gathers else mixed + query + key
    log_sums = 4 * work.tokens * work.heads
    # Packed, local layers attend sequence by sequence, and join what comes out.
    joined = query if work.packed and not kernels.engine else 0
    tables = 0 if kernels.fused_rope else 4 * work.width * work.head_dim * work.item
    return [
        Step(0, _column(work, work.query + 2 * work.key), 2 * mixed),
        *([_qk_norm(work, kernels)] if work.qk_norm else []),
        # Four terms of the gradient of the rotation, with those of keys and values that wait.
        Step(tables, 4 * query + 2 * key, mixed + 4 * query),
        # Gradients: of the output, and of what goes in, once for the sequences and once joined.
        Step(
            inputs + query + log_sums,
            query + (2 if joined else 1) * mixed + work.stream,
            mixed + 3 * query + key,
        ),
        Step(
            joined,
            _row(work, work.query),
            joined + token * work.hidden,
        ),
    ]


def _qk_norm(work: Work, kernels: Kernels) -> Step:
    """Norms of queries, which are copied for it, and of keys, per head."""
    query, key = work.tokens * work.query, work.tokens * work.key
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
        Step(0, _column(work, 2 * work.ffn), token * work.hidden + 2 * ffn),
        # Two gradients come of one. Fused, the gradient of gate and up comes of one.
        Step(2 * ffn + apart, 3 * ffn + work.stream, 3 * ffn + apart),
        Step(ffn, _row(work, work.ffn), token * work.hidden + ffn),
    ]


def _experts(work: Work, kernels: Kernels) -> list[Step]:
    """Router, tokens on their way to experts, these, and the way back."""
    sent = work.routed * work.hidden * work.item
    ffn = work.routed * work.expert_ffn * work.item
    # Probabilities in float32, their scattered shares and who is chosen, for every expert.
    router = work.normed * work.experts * (4 + 1 + 2 * work.item)
    # As in `_mlp`; a token's product is kept before and after its share weighs it.
    apart = 0 if kernels.fused_swiglu else 3 * ffn
    return [
        Step(router, 2 * router + 2 * work.stream, router),
        Step(sent + 8 * work.routed, 2 * sent + work.stream, 2 * sent),
        # What comes out expert by expert, joined and in another order; without gradients also what went in.
        Step(3 * ffn + apart, 3 * sent + work.stream, 4 * sent),
    ]
