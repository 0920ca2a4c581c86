"""What follows from a model's sizes alone, without torch or weights: the layers of a pipeline stage, the experts of a
rank, the bytes of the largest bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import TypeVar

from rlsys.config.schema import Dtype
from rlsys.errors import UserError
from rlsys.weights.families import FAMILIES, read_architecture, rules_of

ALIGNMENT = 64  # Bytes; every tensor of a bucket starts at a multiple, so that it can be viewed in its own dtype.
T = TypeVar("T")
_ITEM_BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2}


def aligned(nbytes: int) -> int:
    """`nbytes` up to the next multiple of `ALIGNMENT`: what a tensor takes in a bucket."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def largest_tensor_bytes(model_path: str | Path, dtype: Dtype, folder: Path = FAMILIES) -> int:
    """Bytes of the smallest bucket that the weights of the Hugging Face folder `model_path` can travel in.

    Tensors that are one parameter in training (query, key and value; gate and up of an expert) travel together, so they
    count together. `dtype` is the one that is trained in. Raises UserError as `read_architecture` does.
    """
    item = _ITEM_BYTES[dtype]
    rules = rules_of(read_architecture(model_path, folder), folder=folder)
    return max(sum(aligned(prod(shape) * item) for shape in rule.shapes) for rule in rules)


def stage_layers(layers: int, pp: int, pp_layers: Sequence[int] | None = None) -> list[range]:
    """The global layer numbers of each of `pp` stages, in order.

    `pp_layers` gives uneven stages; without it the layers must divide evenly. Raises UserError.
    """
    if pp_layers is None:
        if layers % pp:
            raise UserError(
                f"pp is {pp}, which does not divide the model's {layers} layers; set pp_layers to {pp} counts."
            )
        pp_layers = [layers // pp] * pp
    if len(pp_layers) != pp or sum(pp_layers) != layers or min(pp_layers) < 1:
        raise UserError(
            f"pp_layers is {list(pp_layers)}; give {pp} counts of at least 1 that add up to {layers} layers."
        )
    return _runs(pp_layers)


def chunk_layers(layers: int, counts: Sequence[Sequence[int]]) -> list[list[range]]:
    """The global layer numbers of each chunk of a virtual pipeline, [pp rank][virtual rank].

    `counts` [pp][virtual] says how many layers each chunk holds, some maybe none. A micro-batch passes the first chunk
    of every rank, then the second of every rank and so on (interleaved schedule: Narayanan et al., arXiv:2104.04473,
    section 2.2). Raises UserError if the chunks do not add up to the model.
    """
    virtual = max(map(len, counts))
    if any(len(rank) != virtual for rank in counts) or sum(map(sum, counts)) != layers:
        raise UserError(
            f"The pipeline's chunks hold {[list(rank) for rank in counts]} layers; every rank must have as many "
            f"chunks as the others, and all must add up to {layers} layers."
        )
    in_order = _runs([rank[chunk] for chunk in range(virtual) for rank in counts])
    return [[in_order[chunk * len(counts) + rank] for chunk in range(virtual)] for rank in range(len(counts))]


def expert_block(experts: int, ep: int, ep_rank: int) -> range:
    """The global numbers of the experts that one expert-parallel rank holds, of a layer. Raises UserError."""
    if not experts and ep > 1:
        raise UserError(f"ep is {ep}, but the model has no experts; set it to 1.")
    if experts % ep:
        raise UserError(f"ep is {ep}, which does not divide the model's {experts} experts; lower ep.")
    held = experts // ep
    return range(held * ep_rank, held * (ep_rank + 1))


def packed(items: Iterable[T], nbytes_of: Callable[[T], int], most: int) -> list[list[T]]:
    """The items in order, in runs of at most `most` bytes; one that is larger is a run of its own."""
    runs: list[list[T]] = []
    size = 0
    for item in items:
        nbytes = nbytes_of(item)
        if not runs or size + nbytes > most:
            runs.append([])
            size = 0
        runs[-1].append(item)
        size += nbytes
    return runs


def _runs(counts: Sequence[int]) -> list[range]:
    ends = list(accumulate(counts))
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
