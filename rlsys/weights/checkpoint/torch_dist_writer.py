"""Writes weights as a Megatron distributed checkpoint, without a model or a process group.

The assignment of tensors to files is fixed in advance by the model and its parallel sizes. Any process can therefore
write any file in any order, and complete files need not be rewritten. A file appears under its name only when whole;
`complete.json` is written last.

Processes with any TP, PP and EP can load the result; the chosen sizes only decide which shards a rank reads in one
piece.
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
from rlsys.errors import UserError, disk_error
from rlsys.weights.checkpoint.megatron_reader import BACKEND, COMMON, LAYER_STATE, METADATA, key_of, saved
from rlsys.weights.checkpoint.store import COMPLETE, CheckpointInfo
from rlsys.weights.weight_map import ALIGNMENT, Cut, Entry, Rule, WeightMap, expert_block, packed, stage_layers

_OPTIONS: Any = config
FILE_BYTES = 1 << 30  # Target size of a file; a larger tensor gets a file of its own.
_STATE_FILE = "__state.distcp"
_BACKEND: Mapping[str, object] = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True, slots=True)
class FileJob:
    name: str
    entries: tuple[Entry, ...]
    nbytes: int  # Total size of its tensors.


class TorchDistWriter:
    """Plans and writes the checkpoint files of one model."""

    def __init__(
        self,
        weights: WeightMap,
        dtype_of: Callable[[Entry], torch.dtype],
        parallel: ParallelConfig,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        """Plan the files; nothing is written yet.

        Raises UserError if `parallel` does not divide the model, or if a weight's dtype differs between layers.
        """
        self._weights, self._tp = weights, parallel.tp
        self._dtypes = _dtypes(weights, dtype_of)
        self._cuts = {entry.name: self._bounds(entry) for entry in weights.entries()}
        self.files: list[FileJob] = self._plan(parallel, file_bytes)

    def write(self, folder: Path, job: FileJob, parts_of: Callable[[Entry], Sequence[Tensor]]) -> dict[str, Any]:
        """Write one tensor file, holding one tensor in memory at a time; return a receipt (plain JSON) for `finish`.

        Raises RunError if the file cannot be written.
        """
        chunks = []
        folder.mkdir(parents=True, exist_ok=True)
        # Readers ignore the CRC32 checksums, and computing them takes longer than writing.
        with (
            _appearing(folder / job.name) as file,
            file.open("wb") as stream,
            _OPTIONS.patch("save.compute_crc32", False),
        ):
            for entry in job.entries:
                axes = [1 for _ in self._key(entry)[1]]
                for at, chunk in self._chunks(entry, parts_of(entry)):
                    # torch aligns data relative to the stream's start; with the start aligned, readers can map the
                    # tensor.
                    stream.write(bytes(-stream.tell() % ALIGNMENT))
                    start = stream.tell()
                    torch.save(chunk.view(axes + list(chunk.shape)), stream)
                    chunks.append([entry.name, at, list(chunk.shape), start, stream.tell() - start])
        return {"file": job.name, "chunks": chunks}

    def finish(self, folder: Path, receipts: Sequence[Mapping[str, Any]], info: CheckpointInfo) -> None:
        """Complete the checkpoint with its metadata and `info`.

        Raises ValueError if a receipt is missing, RunError if a file cannot be written.
        """
        if {receipt["file"] for receipt in receipts} != {job.name for job in self.files}:
            raise ValueError("Not every file of the checkpoint has a receipt.")
        # Megatron's linear layers load an extra state, which is None here.
        state = saved([None])
        contents = {
            _STATE_FILE: state,
            COMMON: saved({}),
            METADATA: pickle.dumps(self._metadata(receipts, len(state))),
            BACKEND: json.dumps(_BACKEND).encode(),
            COMPLETE: info.to_json().encode(),
        }
        for name, content in contents.items():
            with _appearing(folder / name) as file:
                file.write_bytes(content)

    def _plan(self, parallel: ParallelConfig, file_bytes: int) -> list[FileJob]:
        """Return the files to write; each holds tensors of a single pipeline stage and expert rank."""
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
        """Return the dimension that TP cuts, and where the pieces start and end along that dimension."""
        shape, cut = self._shape(entry), entry.rule.cut
        dimension = 1 if cut is Cut.COLUMNS else 0
        # TP does not cut an expert: it is whole on one rank.
        tp = 1 if cut is Cut.WHOLE or entry.expert is not None else self._tp
        pieces = 2 * tp if cut is Cut.GATE_UP else tp
        size = shape[dimension]
        if size % pieces:
            raise UserError(
                f"tp is {self._tp}, which does not divide {entry.name} of {list(shape)}: lower tp.",
                code="mismatch",
                key="tp",
            )
        bounds = {piece * (size // pieces) for piece in range(pieces + 1)}
        if cut is Cut.VOCAB:
            # A separate piece for the padding avoids copying the matrix into a larger one.
            bounds.add(self._weights.architecture.vocab)
        return dimension, sorted(bounds)

    def _chunks(self, entry: Entry, parts: Sequence[Tensor]) -> Iterator[tuple[list[int], Tensor]]:
        """Yield (start index in the whole tensor, piece) for each piece; pieces own their memory."""
        dimension, bounds = self._cuts[entry.name]
        shape, before = self._shape(entry), 0
        # Consecutive parts of the Megatron tensor, copied only where unavoidable.
        wholes = parts
        if entry.rule.cut is Cut.VOCAB:
            wholes = [*parts, parts[0].new_zeros(shape[0] - parts[0].shape[0], *shape[1:])]
        elif entry.rule.cut is not Cut.GATE_UP:
            wholes = [self._weights.shard(entry, parts, 0, 1)]
        for whole in wholes:
            if whole.dtype != self._dtypes[entry.name]:
                raise ValueError(f"{entry.name} is {whole.dtype}, but {self._dtypes[entry.name]} was announced.")
            after = before + whole.shape[dimension]
            for start, end in pairwise(bounds):
                if before <= start < after:
                    at = [0] * len(shape)
                    at[dimension] = start
                    piece = whole.narrow(dimension, start - before, end - start).contiguous()
                    # `torch.save` writes a view's whole storage, so a partial view needs a copy.
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
            # Megatron's layers load an extra state beside each weight.
            if key.startswith("decoder.") and key.endswith(".weight"):
                at, of = (".".join(map(str, axis)) for axis in zip(*(lead or [(0, 1)]), strict=True))
                state = f"{key.removesuffix('weight')}{LAYER_STATE}/shard_{at}_{of}"
                tensors[state] = described.BytesStorageMetadata()
                places[described.MetadataIndex(state)] = _StorageInfo(_STATE_FILE, 0, state_bytes)
        return described.Metadata(tensors, storage_data=places, storage_meta=described.StorageMeta(), version="1.0.0")

    def _key(self, entry: Entry) -> tuple[str, list[tuple[int, int]]]:
        """Return the key that stores a weight, and (index of the weight, size) for each leading axis of its tensor."""
        architecture = self._weights.architecture
        of_layer = None if architecture.dense_layers else entry.layer
        numbers = ((of_layer, architecture.layers), (entry.expert, architecture.experts))
        lead = [(number, count) for number, count in numbers if number is not None]
        return key_of(entry.name, architecture), lead


@contextmanager
def _appearing(file: Path) -> Iterator[Path]:
    """Yield a temporary path and rename it to `file` on success. Raises RunError if the file cannot be written."""
    partial = file.with_name(f".{file.name}.partial")
    try:
        yield partial
        partial.replace(file)
    except (OSError, RuntimeError) as error:
        # torch wraps the OSError of a failed write in a RuntimeError.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        partial.unlink(missing_ok=True)
        if cause.filename not in (None, str(partial), str(file)):
            # The error concerns a source file of the tensors, not `file`.
            raise cause from None
        raise disk_error(cause, file) from error


def _dtypes(weights: WeightMap, dtype_of: Callable[[Entry], torch.dtype]) -> dict[str, torch.dtype]:
    """Return the dtype of every weight.

    Raises UserError if the dtype of a weight differs between layers, because all layers share one stored tensor.
    """
    found = {entry.name: dtype_of(entry) for entry in weights.entries()}
    first: dict[Rule, Entry] = {}
    for entry in weights.entries():
        like = first.setdefault(entry.rule, entry)
        if found[entry.name] != found[like.name]:
            raise UserError(
                f"{entry.hf[0]} is {found[entry.name]} but {like.hf[0]} is {found[like.name]}; Megatron stores all "
                "layers in one tensor, so give a single dtype with --dtype.",
                code="mismatch",
                key=entry.hf[0],
            )
    return found


def _owners(weights: WeightMap, parallel: ParallelConfig) -> Callable[[Entry], tuple[int, int]]:
    """Return a function from a weight to its (pipeline stage, expert rank)."""
    architecture = weights.architecture
    stages = stage_layers(architecture.layers, parallel.pp, parallel.pp_layers)
    blocks = [expert_block(architecture.experts, parallel.ep, rank) for rank in range(parallel.ep)]

    def owner(entry: Entry) -> tuple[int, int]:
        expert = next((rank for rank, block in enumerate(blocks) if entry.expert in block), 0)
        if entry.layer is None:
            return (0 if entry.name.startswith("embedding.") else parallel.pp - 1), expert
        return next(stage for stage, layers in enumerate(stages) if entry.layer in layers), expert

    return owner
