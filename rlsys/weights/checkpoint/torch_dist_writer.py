"""Writes weights as one of Megatron's distributed checkpoints, without a model or a process group.

Which file holds what is known beforehand and depends on nothing but the model and how it is to be cut, so that files
can be written by any process in any order, and what is there already need not be written again. A file appears under
its name when it is whole; what says that the checkpoint is complete is written last.

Any TP, PP and EP can load the result; how it is cut only decides which of it a rank finds in one piece.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.utils.serialization import config

from rlsys.config.schema import ParallelConfig
from rlsys.errors import RunError, UserError
from rlsys.weights.checkpoint.megatron_reader import BACKEND, COMMON, LAYER_STATE, METADATA, key_of, saved
from rlsys.weights.checkpoint.store import COMPLETE, About
from rlsys.weights.weight_map import ALIGNMENT, Cut, Entry, Rule, WeightMap, expert_block, packed, stage_layers

_OPTIONS: Any = config
FILE_BYTES = 1 << 30  # About how much a file holds; a larger tensor has one for itself.
_STATE_FILE = "__state.distcp"
_BACKEND: Mapping[str, object] = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True, slots=True)
class FileJob:
    """One file to write."""

    name: str
    entries: tuple[Entry, ...]
    nbytes: int  # Of the tensors in it.


class TorchDistWriter:
    """Writes the weights of one model."""

    def __init__(
        self,
        weights: WeightMap,
        dtype_of: Callable[[Entry], torch.dtype],
        parallel: ParallelConfig,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        """Nothing is written yet. Raises UserError if the model cannot be cut as `parallel` says, or if a weight has
        not the same dtype in all layers.
        """
        self._weights, self._tp = weights, parallel.tp
        self._dtypes = _dtypes(weights, dtype_of)
        self._cuts = {entry.name: self._bounds(entry) for entry in weights.entries()}
        self.files: list[FileJob] = self._plan(parallel, file_bytes)

    def write(self, folder: Path, job: FileJob, parts_of: Callable[[Entry], Sequence[Tensor]]) -> dict[str, Any]:
        """Write one file of tensors, one in memory at a time; a receipt for `finish`, as plain JSON. Raises RunError."""
        chunks = []
        folder.mkdir(parents=True, exist_ok=True)
        # Reading takes no notice of checksums, and making them takes longer than writing.
        with (
            _appearing(folder / job.name) as file,
            file.open("wb") as stream,
            _OPTIONS.patch("save.compute_crc32", False),
        ):
            for entry in job.entries:
                axes = [1 for number in (entry.layer, entry.expert) if number is not None]
                for at, chunk in self._chunks(entry, parts_of(entry)):
                    # torch aligns what it writes from its own start; so a reader can map the tensor as it is.
                    stream.write(bytes(-stream.tell() % ALIGNMENT))
                    start = stream.tell()
                    torch.save(chunk.view(axes + list(chunk.shape)), stream)
                    chunks.append([entry.name, at, list(chunk.shape), start, stream.tell() - start])
        return {"file": job.name, "chunks": chunks}

    def finish(self, folder: Path, receipts: Sequence[Mapping[str, Any]], about: About) -> None:
        """Complete the checkpoint, which says `about` of itself. Raises ValueError if a receipt is missing, RunError."""
        if {receipt["file"] for receipt in receipts} != {job.name for job in self.files}:
            raise ValueError("Not every file of the checkpoint has a receipt.")
        # Megatron's linear layers ask for a state of their own, which is None.
        state = saved([None])
        contents = {
            _STATE_FILE: state,
            COMMON: saved({}),
            METADATA: pickle.dumps(self._metadata(receipts, len(state))),
            BACKEND: json.dumps(_BACKEND).encode(),
            COMPLETE: about.to_json().encode(),
        }
        for name, content in contents.items():
            with _appearing(folder / name) as file:
                file.write_bytes(content)

    def _plan(self, parallel: ParallelConfig, file_bytes: int) -> list[FileJob]:
        """The files of each pipeline stage and expert rank, which hold no others' tensors."""
        owner = _owners(self._weights, parallel)
        held: dict[tuple[int, int], list[Entry]] = {}
        for entry in self._weights.entries():
            held.setdefault(owner(entry), []).append(entry)
        return [
            FileJob(f"__{rank}_{number}.distcp", tuple(entries), sum(map(self._nbytes, entries)))
            for rank, place in enumerate(sorted(held))
            for number, entries in enumerate(packed(held[place], self._nbytes, file_bytes))
        ]

    def _nbytes(self, entry: Entry) -> int:
        return prod(self._shape(entry)) * self._dtypes[entry.name].itemsize

    def _shape(self, entry: Entry) -> tuple[int, ...]:
        return self._weights.whole_shape(entry, self._tp)

    def _bounds(self, entry: Entry) -> tuple[int, list[int]]:
        """The dimension that TP cuts, and where the pieces begin along it, with the end."""
        shape, cut = self._shape(entry), entry.rule.cut
        dimension = 1 if cut is Cut.COLUMNS else 0
        # An expert is on one rank, and not cut by TP.
        tp = 1 if cut is Cut.WHOLE or entry.expert is not None else self._tp
        pieces = 2 * tp if cut is Cut.GATE_UP else tp
        size = shape[dimension]
        if size % pieces:
            raise UserError(
                f"tp is {self._tp}, which does not divide {entry.name} of {list(shape)}; lower tp.",
                code="mismatch",
                key="tp",
            )
        bounds = {piece * (size // pieces) for piece in range(pieces + 1)}
        if cut is Cut.VOCAB:
            # Padding is a piece of its own, so that the matrix need not be copied to a larger one.
            bounds.add(self._weights.architecture.vocab)
        return dimension, sorted(bounds)

    def _chunks(self, entry: Entry, parts: Sequence[Tensor]) -> Iterator[tuple[list[int], Tensor]]:
        """Where each piece begins in the whole tensor, and the piece, in memory of its own."""
        dimension, bounds = self._cuts[entry.name]
        shape, before = self._shape(entry), 0
        # What makes up the Megatron tensor one after the other; as little as possible of it is a copy.
        wholes = parts
        if entry.rule.cut is Cut.VOCAB:
            wholes = [*parts, parts[0].new_zeros(shape[0] - parts[0].shape[0], *shape[1:])]
        elif entry.rule.cut is not Cut.GATE_UP:
            wholes = [self._weights.shard(entry, parts, 0, 1)]
        for whole in wholes:
            if whole.dtype != self._dtypes[entry.name]:
                raise ValueError(f"{entry.name} is {whole.dtype}, not {self._dtypes[entry.name]} as was said.")
            after = before + whole.shape[dimension]
            for start, end in pairwise(bounds):
                if before <= start < after:
                    at = [0] * len(shape)
                    at[dimension] = start
                    piece = whole.narrow(dimension, start - before, end - start).contiguous()
                    # `torch.save` writes all memory that a tensor is a view of.
                    yield at, piece if piece.untyped_storage().nbytes() == piece.nbytes else piece.clone()
            before = after

    def _metadata(self, receipts: Sequence[Mapping[str, Any]], state_bytes: int) -> described.Metadata:
        entries = {entry.name: entry for entry in self._weights.entries()}
        tensors: dict[str, Any] = {}
        places: dict[described.MetadataIndex, _StorageInfo] = {}
        for receipt in receipts:
            for name, at, sizes, start, length in receipt["chunks"]:
                key, lead = self._key(entries[name])
                offsets = torch.Size([number for number, _ in lead] + at)
                size = torch.Size([count for _, count in lead] + list(self._shape(entries[name])))
                properties = described.TensorProperties(self._dtypes[name])
                empty = described.TensorStorageMetadata(properties, size, [])
                chunk = described.ChunkStorageMetadata(offsets, torch.Size([1] * len(lead) + sizes))
                tensors.setdefault(key, empty).chunks.append(chunk)
                places[described.MetadataIndex(key, offsets)] = _StorageInfo(receipt["file"], start, length)
        for entry in entries.values():
            key, lead = self._key(entry)
            # Megatron's layers ask for a state beside each weight.
            if key.startswith("decoder.") and key.endswith(".weight"):
                at, of = (".".join(map(str, axis)) for axis in zip(*(lead or [(0, 1)]), strict=True))
                state = f"{key.removesuffix('weight')}{LAYER_STATE}/shard_{at}_{of}"
                tensors[state] = described.BytesStorageMetadata()
                places[described.MetadataIndex(state)] = _StorageInfo(_STATE_FILE, 0, state_bytes)
        return described.Metadata(tensors, storage_data=places, storage_meta=described.StorageMeta(), version="1.0.0")

    def _key(self, entry: Entry) -> tuple[str, list[tuple[int, int]]]:
        """The key that a weight lies under, with its number along each leading axis and the size of that."""
        architecture = self._weights.architecture
        numbers = ((entry.layer, architecture.layers), (entry.expert, architecture.experts))
        lead = [(number, count) for number, count in numbers if number is not None]
        return key_of(entry.name, mixture=architecture.experts > 0), lead


@contextmanager
def _appearing(file: Path) -> Iterator[Path]:
    """What to write to, which is `file` when all is written. Raises RunError if it cannot be."""
    partial = file.with_name(f".{file.name}.partial")
    try:
        yield partial
        partial.replace(file)
    except (OSError, RuntimeError) as error:
        # torch reports in its own words what happened while it wrote.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        partial.unlink(missing_ok=True)
        if cause.filename not in (None, str(partial), str(file)):
            # Of another file, which the tensors come from.
            raise cause from None
        raise RunError(f"{file} could not be written: {cause.strerror}.") from error


def _dtypes(weights: WeightMap, dtype_of: Callable[[Entry], torch.dtype]) -> dict[str, torch.dtype]:
    """Of every weight. All layers are one tensor of the checkpoint, which has one dtype."""
    found = {entry.name: dtype_of(entry) for entry in weights.entries()}
    first: dict[Rule, Entry] = {}
    for entry in weights.entries():
        like = first.setdefault(entry.rule, entry)
        if found[entry.name] != found[like.name]:
            raise UserError(
                f"{entry.hf[0]} is {found[entry.name]} but {like.hf[0]} is {found[like.name]}, and Megatron has all "
                "layers in one tensor; ask for one dtype with --dtype.",
                code="mismatch",
                key=entry.hf[0],
            )
    return found


def _owners(weights: WeightMap, parallel: ParallelConfig) -> Callable[[Entry], tuple[int, int]]:
    """Which pipeline stage and expert rank a weight is of."""
    architecture = weights.architecture
    stages = stage_layers(architecture.layers, parallel.pp, parallel.pp_layers)
    blocks = [expert_block(architecture.experts, parallel.ep, rank) for rank in range(parallel.ep)]

    def owner(entry: Entry) -> tuple[int, int]:
        expert = next((rank for rank, block in enumerate(blocks) if entry.expert in block), 0)
        if entry.layer is None:
            return (0 if entry.name.startswith("embedding.") else parallel.pp - 1), expert
        return next(stage for stage, layers in enumerate(stages) if entry.layer in layers), expert

    return owner
