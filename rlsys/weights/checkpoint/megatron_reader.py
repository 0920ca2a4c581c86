"""Reads Megatron checkpoints weight by weight, whether rlsys, Megatron-LM or another Megatron-core system wrote them.

Builds no model and joins no process group. An opened checkpoint is plain data and can be pickled to other processes;
each read opens the file and closes it again.

A checkpoint is untrusted input. Only tensors, plain values, torch's checkpoint metadata and allowlisted classes are
accepted; anything else raises UserError before any of its code runs. The allowlisted classes are not imported: their
instances load as `Inert`.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import re
from abc import ABC, abstractmethod
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from math import lcm, prod
from pathlib import Path, PurePosixPath
from types import ModuleType, SimpleNamespace
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.utils import _create_file_view
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from rlsys.errors import UserError
from rlsys.weights.bucket import checksum
from rlsys.weights.checkpoint.store import is_complete, read_checkpoint_info
from rlsys.weights.hf_io import map_bytes, unreadable
from rlsys.weights.weight_map import VOCAB_MULTIPLE, Architecture, Cut, Entry, WeightMap, chunk_layers

METADATA, BACKEND, COMMON = ".metadata", "metadata.json", "common.pt"
"""Files of a distributed checkpoint other than the tensor files."""
LAYER_STATE = "_extra_state"
"""Part of the keys under which Transformer Engine layers save extra state, which is empty without FP8."""
_LATEST, _RANK_FILE = "latest_checkpointed_iteration.txt", "model_optim_rng.pt"


def saved(value: Any) -> bytes:
    """Return `value` as the bytes that `torch.save` writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def open_checkpoint(folder: str | Path) -> MegatronCheckpoint:
    """Open the checkpoint in `folder`.

    If `folder` holds iterations (`iter_NNNNNNN`), open the iteration that `latest_checkpointed_iteration.txt` names,
    or the only iteration. Raises UserError.
    """
    folder = _resolve(Path(folder))
    if (folder / BACKEND).is_file():
        return TorchDistCheckpoint(folder)
    if (folder / METADATA).is_file():
        raise UserError(
            f"{folder} has {METADATA} but no {BACKEND}: the checkpoint is incomplete; give another.",
            code="malformed",
            key=str(folder),
        )
    if any(folder.glob("mp_rank_*")):
        return LegacyCheckpoint(folder)
    raise UserError(
        f"{folder} holds no Megatron checkpoint: give a folder with {BACKEND} or mp_rank_00 in it, such as "
        ".../global_step_N/actor or .../iter_0000100.",
        code="empty",
        key=str(folder),
    )


def _resolve(folder: Path) -> Path:
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist: give the folder of a checkpoint.", code="not_found", key=str(folder))
    note = folder / _LATEST
    if note.is_file():
        latest = note.read_text().strip()
        named = folder / (f"iter_{int(latest):07d}" if latest.isdecimal() else latest)
        if not named.is_dir() or named.parent != folder:
            raise UserError(
                f"{note} names {latest}, but {named} does not exist: give the folder of a checkpoint.",
                code="not_found",
                key=str(named),
            )
        return named
    saved = sorted(path for path in folder.glob("iter_*") if path.is_dir())
    if len(saved) > 1:
        raise UserError(
            f"{folder} holds {len(saved)} checkpoints: give one, such as {saved[-1]}.",
            code="out_of_range",
            key=str(folder),
        )
    return saved[0] if saved else folder


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """Shapes and dtype of a Megatron tensor in a checkpoint."""

    shapes: tuple[tuple[int, ...], ...]
    """Shape of each tensor-parallel shard, in rank order; a single shape if the tensor is stored whole."""
    dtype: torch.dtype


class MegatronCheckpoint(ABC):
    """A Megatron checkpoint folder, read by weight names with global layer and expert numbers."""

    format: str  # "torch_dist" or "mp_rank".

    def __init__(
        self,
        folder: Path,
        step: int | None,
        layout: str,
        stored: Mapping[str, StoredWeight],
        pieces: Mapping[str, list[Any]],
    ) -> None:
        """`layout` is a text for users: the sharding at save time, as far as the files show it.

        `pieces` lists the stored pieces of each weight, at least one per tensor-parallel shard.
        """
        self.folder, self.step, self.layout, self._stored, self._pieces = folder, step, layout, stored, pieces

    def names(self) -> Mapping[str, StoredWeight]:
        """Return stored name -> weight; Transformer Engine layers store some weights under names of their own."""
        return self._stored

    def files(self) -> list[Path]:
        """Return the existing files that hold weights, relative to the folder."""
        named = {piece.file for pieces in self._pieces.values() for piece in pieces}
        return [file.relative_to(self.folder) for file in sorted(named) if file.is_file()]

    @abstractmethod
    def _read(self, name: str) -> list[Tensor]:
        """Return the tensor-parallel shards of a weight, in rank order."""

    def check(self, weights: WeightMap) -> None:
        """Raise UserError unless the checkpoint holds exactly the weights that `weights` maps, in the same shapes."""
        entries = {entry.name: entry for entry in weights.entries()}
        known = {name: _entry(weights, name) for name in self.names()}
        unknown = [
            name
            for name, entry in known.items()
            if entry is None or (entry.rule.exported and entry.name not in entries)
        ]
        found = {entry.name for entry in known.values() if entry}
        missing = [name for name in entries if name not in found]
        if missing:
            raise UserError(
                f"{self.folder} lacks {len(missing)} weights of this model, first {missing[0]}: give the whole "
                "checkpoint of a model that fits the config.json.",
                code="mismatch",
                key=str(self.folder),
            )
        if unknown:
            raise UserError(
                f"{self.folder} has {len(unknown)} weights that this model does not have, first {unknown[0]}: "
                "give the config.json of the model that was trained.",
                code="mismatch",
                key=str(self.folder),
            )
        for entry in entries.values():
            self._check_shape(entry, weights)
            name, vocab = self._stored_name(entry), weights.architecture.vocab
            rows = sum(shape[0] for shape in self.names()[name].shapes)
            # Padding is below VOCAB_MULTIPLE rows per tensor-parallel rank; more rows mean another model.
            if entry.rule.cut is Cut.VOCAB and rows - vocab >= VOCAB_MULTIPLE * len(self._pieces[name]):
                raise UserError(
                    f"{self.folder} has {rows} vocabulary rows in {name}, but the config.json says {vocab}, and the "
                    "difference is too large for padding: give the config.json of the model that was trained (--hf).",
                    code="mismatch",
                    key=str(self.folder),
                )

    def check_copies(self, weights: WeightMap) -> None:
        """Raise UserError if a stored copy of a tied tensor differs from its original."""

        def sums(entry: Entry) -> list[str]:
            return [checksum(name, tensor) for name, tensor in self.parts(entry, weights)]

        originals = {entry.hf: entry for entry in weights.entries()}
        stored = {known.name for name in self.names() if (known := _entry(weights, name))}
        for copy in weights.copies():
            original = originals[copy.hf]
            if copy.name in stored and sums(copy) != sums(original):
                raise UserError(
                    f"{self.folder} holds different values in {copy.name} and {original.name}, but the config.json "
                    f"ties the two (tie_word_embeddings), so {copy.name} would be lost: give the config.json of the "
                    "model that was trained.",
                    code="mismatch",
                    key=str(self.folder),
                )

    def dtype(self, entry: Entry) -> torch.dtype:
        """Return the stored dtype of a weight. Raises UserError if the checkpoint lacks the weight."""
        return self.names()[self._stored_name(entry)].dtype

    def parts(self, entry: Entry, weights: WeightMap) -> list[tuple[str, Tensor]]:
        """Return a weight's whole Hugging Face tensors with their names, on the CPU, in their stored dtype.

        The tensors may share memory. Raises UserError if the weight is missing or its file is damaged.
        """
        return self._merged(entry, weights, self._read(self._stored_name(entry)))

    def _check_shape(self, entry: Entry, weights: WeightMap) -> None:
        stored = self.names()[self._stored_name(entry)]
        shapes = [torch.empty(shape, dtype=stored.dtype, device="meta") for shape in stored.shapes]
        merged = [tuple(part.shape) for _, part in self._merged(entry, weights, shapes)]
        if merged != list(entry.rule.shapes):
            raise self._misfit(entry, stored)

    def _merged(self, entry: Entry, weights: WeightMap, shards: list[Tensor]) -> list[tuple[str, Tensor]]:
        try:
            return weights.merge(entry, shards)
        except (RuntimeError, ValueError) as error:
            raise self._misfit(entry, self.names()[self._stored_name(entry)]) from error

    def _misfit(self, entry: Entry, stored: StoredWeight) -> UserError:
        shapes = " and ".join(str(list(shape)) for shape in stored.shapes)
        return UserError(
            f"{self.folder} has {entry.name} of shape {shapes}, which is not this model's: give the config.json of "
            "the model that was trained, and the files of all its ranks.",
            code="mismatch",
            key=str(self.folder),
        )

    def _stored_name(self, entry: Entry) -> str:
        for template in entry.rule.megatron:
            name = template.format(layer=entry.layer, expert=entry.expert)
            if name in self.names():
                return name
        raise UserError(
            f"{self.folder} lacks {entry.name}: give the whole checkpoint of this model.",
            code="mismatch",
            key=str(self.folder),
        )


def _entry(weights: WeightMap, name: str) -> Entry | None:
    with suppress(KeyError):
        return weights.entry(name)
    return None


class Inert:
    """Placeholder for an unpickled object whose class is not imported; keeps attributes, has no behaviour."""

    def __new__(cls, *_: Any, **__: Any) -> Inert:
        """Accept and ignore the arguments of any replaced class."""
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


@dataclass(frozen=True, slots=True)
class TensorOnDisk:
    """Location and layout of a tensor in a file."""

    file: Path
    offset: int  # Bytes from the start of the file to the tensor's first element.
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def rows(self, start: int, stop: int) -> TensorOnDisk:
        """Return the location of rows `start` to `stop` (exclusive)."""
        skipped = start * self.stride[0] * self.dtype.itemsize
        return replace(self, offset=self.offset + skipped, shape=(stop - start, *self.shape[1:]))

    def read(self) -> Tensor:
        """Return the tensor, memory-mapped from the file if aligned to its dtype, else a copy.

        The mapping lasts as long as the tensor, and writes to the tensor do not reach the file. Raises UserError if the
        file is too short or unreadable.
        """
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype)
        itemsize = self.dtype.itemsize
        nbytes = (sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)) + 1) * itemsize
        try:
            if self.file.stat().st_size < self.offset + nbytes:
                raise UserError(
                    f"{self.file} is truncated: complete the checkpoint, or copy it again.",
                    code="malformed",
                    key=str(self.file),
                )
            if self.offset % itemsize:
                # Mapping and then copying would need twice the memory.
                flat = torch.from_numpy(np.fromfile(self.file, np.uint8, nbytes, offset=self.offset))
            else:
                flat = map_bytes(self.file, self.offset, nbytes)
        except OSError as error:
            raise unreadable(self.file, error) from error
        return flat.view(self.dtype).as_strided(self.shape, self.stride)


def find_tensors(
    file: Path, stream: IO[bytes], start: int = 0, is_inert: Callable[[str], bool] = lambda _: False
) -> tuple[Any, Callable[[Tensor], TensorOnDisk]]:
    """Load a `torch.save` stream without tensor data; return the value and a function that locates its tensors on disk.

    `stream` begins `start` bytes into `file`. Globals whose full name satisfies `is_inert` load as `Inert`. Raises
    UserError if the stream is damaged or references any other global outside torch's `weights_only` allowlist.
    """
    # First bytes of the torch.save format that preceded zip archives.
    old = pickle.dumps(torch.serialization.MAGIC_NUMBER, protocol=2)
    begins = stream.read(len(old))
    stream.seek(0)
    if begins == old:
        raise UserError(
            f"{file} is in the torch.save format from before torch 1.6, which is not supported: load it with torch and "
            "save it again.",
            code="unsupported",
            key=str(file),
        )
    try:
        named = get_unsafe_globals_in_checkpoint(stream)
        if refused := sorted(name for name in named if not is_inert(name)):
            raise UserError(
                f"{file} asks for {refused[0]}, which no checkpoint of weights needs and which could run code, so the "
                "file is not read: use a checkpoint from a source that you trust.",
                code="unsafe",
                key=str(file),
            )
        stream.seek(0)
        with safe_globals([(Inert, name) for name in named]):
            loaded = torch.load(stream, map_location="meta", weights_only=True)
    except (RuntimeError, ValueError, EOFError, OSError, pickle.UnpicklingError, TypeError, KeyError) as error:
        raise UserError(
            f"{file} is damaged or truncated: complete the checkpoint, or copy it again.",
            code="malformed",
            key=str(file),
        ) from error

    def locate(tensor: Tensor) -> TensorOnDisk:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise UserError(
                f"{file} has a sparse or quantised tensor, which is not supported: give another checkpoint.",
                code="unsupported",
                key=str(file),
            )
        storage: Any = tensor.untyped_storage()
        offset = start + storage._checkpoint_offset + tensor.storage_offset() * tensor.dtype.itemsize
        return TensorOnDisk(file, offset, tuple(tensor.shape), tensor.stride(), tensor.dtype)

    return loaded, locate


# Keys of distributed checkpoints stack layers: a key has no layer number, and the first axis of its tensor runs over
# all layers. An expert's key has all experts along the next axis. If the layers differ in structure, the key has the
# layer number instead of an axis. `name_of` turns a key and the indices along its leading axes into a weight name,
# `key_of` a name into a key:
#   decoder.layers.mlp.linear_fc2.weight, (3,)  <->  decoder.layers.3.mlp.linear_fc2.weight
_LAYERS = "decoder.layers."
_STACKED_LAYERS = re.compile(r"^decoder\.layers\.(?!\d)")
_EXPERTS, _LOCAL = ".mlp.experts.experts.", ".mlp.experts.local_experts."
_STACKED_EXPERTS = re.compile(r"\.mlp\.experts\.experts\.(?!\d)")
_WRAPPERS = re.compile(r"^(?:model\.|module\.)+")
_OPTIMIZER = re.compile(r"^(?:chained_\d+\.)?(?:optimizer|master)\.")
_HALVES = {f"linear_fc1.{kind}_{half}": place for kind in ("weight", "bias") for place, half in enumerate("wv")}
"""Key endings of gate and up projections that are stored separately -> position in the fused tensor."""
_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Norm -> its name in Transformer Engine, which fuses the norm into the next linear layer."""
_NORMS_OF_LATENTS = {
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
    "pre_mlp_layernorm.weight": _NORMS["pre_mlp_layernorm.weight"],
}
"""The same in a model with multi-head latent attention, whose input two layers project."""


def is_weight(key: str) -> bool:
    """Return True if `key` is a model weight, neither optimiser state nor `LAYER_STATE`."""
    return not _OPTIMIZER.match(key) and LAYER_STATE not in key


def name_of(key: str, numbers: tuple[int, ...]) -> str:
    """Return the name of one weight in the stacked tensor `key`; `numbers` index its leading axes (layer, expert)."""
    if key.endswith(tuple(_HALVES)):
        key = key[:-2]
    rest = iter(numbers)
    if _STACKED_LAYERS.match(key):
        key = f"{_LAYERS}{next(rest)}.{key.removeprefix(_LAYERS)}"
    if found := _STACKED_EXPERTS.search(key):
        return f"{key[: found.start()]}{_LOCAL}{next(rest)}.{key[found.end() :]}"
    return key.replace(_EXPERTS, _LOCAL)


def key_of(name: str, architecture: Architecture) -> str:
    """Return the key of a weight: stacked, unless some layers have experts and others have none."""
    if not name.startswith(_LAYERS):
        return name
    number, _, rest = name.removeprefix(_LAYERS).partition(".")
    rest = re.sub(r"^mlp\.experts\.local_experts\.\d+\.", _EXPERTS.removeprefix("."), rest)
    mixture = architecture.experts and int(number) >= architecture.dense_layers
    norms = _NORMS_OF_LATENTS if architecture.kv_lora_rank else _NORMS
    fused = rest if mixture and rest.startswith("pre_mlp") else norms.get(rest, rest)
    return f"{_LAYERS}{number}.{fused}" if architecture.dense_layers else _LAYERS + fused


_MAX_PIECES = 1 << 20
"""Limit on weight pieces (one per layer, expert and cut): more than any real model has, few enough to enumerate."""
_METADATA_BYTES = 1 << 30  # Size limit of `.metadata`, far above its size for any real model.


class _Piece(NamedTuple):
    """The part of a weight that one stored chunk holds."""

    file: Path
    start: int  # Byte offset of the chunk's `torch.save` stream in the file.
    length: int  # Bytes of that stream.
    sizes: tuple[int, ...]  # Shape of the chunk.
    within: tuple[int, ...]  # Index of the weight along the chunk's leading axes (layer, expert).
    at: tuple[int, ...]  # Index in the weight at which the piece begins.


class TorchDistCheckpoint(MegatronCheckpoint):
    """A distributed checkpoint, whose `.metadata` locates each chunk (a `torch.save` stream) of each tensor."""

    format = "torch_dist"

    def __init__(self, folder: Path) -> None:
        """Raises UserError if the folder is incomplete or its metadata is invalid."""
        try:
            backend = json.loads((folder / BACKEND).read_text())["sharded_backend"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f"{folder / BACKEND} is damaged: copy the checkpoint again.",
                code="malformed",
                key=str(folder / BACKEND),
            ) from error
        if backend != "torch_dist":
            raise UserError(
                f"{folder} was saved as {backend}, which is not supported: save it as torch_dist.",
                code="unsupported",
                key=str(folder),
            )
        if not (folder / METADATA).is_file():
            raise UserError(
                f"{folder / METADATA} does not exist: complete the checkpoint, or copy it again.",
                code="not_found",
                key=str(folder / METADATA),
            )
        found = read_metadata(folder / METADATA)
        try:
            stored, pieces = _index(folder, found)
        except UserError:
            raise
        except Exception as error:  # Any field may be missing.
            raise _damaged(folder / METADATA, error) from error
        # The format records whole tensors; only the number of chunks shows the TP size at save time.
        tp = max((len(cut) for name, cut in pieces.items() if name.endswith("linear_proj.weight")), default=1)
        layout = f"whole tensors, saved under tp {tp} in {len(list(folder.glob('*.distcp')))} files"
        named = re.fullmatch(r"iter_(\d+)", folder.name)
        step = read_checkpoint_info(folder).step if is_complete(folder) else int(named[1]) if named else None
        super().__init__(folder, step, layout, stored, pieces)

    def files(self) -> list[Path]:
        return [Path(METADATA), *super().files()]

    def parts(self, entry: Entry, weights: WeightMap) -> list[tuple[str, Tensor]]:
        """See `MegatronCheckpoint`. A tensor stored in one piece is mapped, not copied."""
        self._check_shape(entry, weights)
        if entry.rule.cut not in (Cut.GATE_UP, Cut.VOCAB):
            return super().parts(entry, weights)
        # The parts are consecutive rows of the whole tensor, which is often cut between them.
        name, shapes = self._stored_name(entry), entry.rule.shapes
        bounds = pairwise(accumulate((shape[0] for shape in shapes), initial=0))
        return [(hf, self._rows(name, *rows)) for hf, rows in zip(entry.hf, bounds, strict=True)]

    def _read(self, name: str) -> list[Tensor]:
        return [self._rows(name, 0, self._stored[name].shapes[0][0])]

    def _rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` (exclusive) of a weight with at least one dimension."""
        stored = self._stored[name]
        shape = (stop - start, *stored.shapes[0][1:])
        found: list[tuple[tuple[int, ...], TensorOnDisk]] = []
        for piece in self._pieces[name]:
            first, rows = piece.at[0], piece.sizes[len(piece.within)]
            begin, end = max(start - first, 0), min(stop - first, rows)
            if begin < end:
                place = self._locate(name, piece, stored.dtype).rows(begin, end)
                found.append(((first + begin - start, *piece.at[1:]), place))
        if sum(prod(place.shape) for _, place in found) != prod(shape):
            raise UserError(
                f"{self.folder / METADATA} does not locate all of {name}: use another checkpoint.",
                code="malformed",
                key=str(self.folder / METADATA),
            )
        if len(found) == 1:
            return found[0][1].read()
        whole = torch.empty(shape, dtype=stored.dtype)
        for origin, place in found:
            region = tuple(slice(at, at + size) for at, size in zip(origin, place.shape, strict=True))
            whole[region].copy_(place.read())
        return whole

    def _locate(self, name: str, piece: _Piece, dtype: torch.dtype) -> TensorOnDisk:
        file = piece.file
        if not file.is_file():
            raise UserError(
                f"{file}, which holds {name}, does not exist: complete the checkpoint.", code="not_found", key=str(file)
            )
        if file.stat().st_size < piece.start + piece.length:
            raise UserError(
                f"{file}, which holds {name}, is truncated: complete the checkpoint, or copy it again.",
                code="malformed",
                key=str(file),
            )
        with file.open("rb") as stream:
            view: Any = _create_file_view(stream, piece.start, piece.length)
            tensor, locate = find_tensors(file, view, piece.start)
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != piece.sizes or tensor.dtype != dtype:
            raise UserError(
                f"{file} does not hold {name} as {METADATA} says: use another checkpoint.",
                code="mismatch",
                key=str(file),
            )
        chunk, axes = locate(tensor), len(piece.within)
        skipped = sum(number * step for number, step in zip(piece.within, chunk.stride, strict=False))
        offset = chunk.offset + skipped * dtype.itemsize
        return replace(chunk, offset=offset, shape=chunk.shape[axes:], stride=chunk.stride[axes:])


class _MegatronMetadata(metadata.Metadata):
    """Replaces the metadata class of older Megatron versions; only the fields inherited from torch are used."""


_OF_TORCH: dict[ModuleType, tuple[str, ...]] = {
    metadata: (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    ),
    planner: ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
    filesystem: ("_StorageInfo", "_StoragePrefix"),
}
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_OLD_TORCH = "torch.distributed._shard.sharded_tensor.metadata"
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(place.__name__, name): getattr(place, name) for place, names in _OF_TORCH.items() for name in names},
    (_OLD_TORCH, "TensorProperties"): metadata.TensorProperties,
    (_OLD_TORCH, "MEM_FORMAT_ENCODING"): metadata._MEM_FORMAT_ENCODING,
    (_MEGATRON, "MCoreMetadata"): _MegatronMetadata,
    (_MEGATRON, "MCoreSavePlan"): planner.SavePlan,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): OrderedDict,
}
"""(module, name) that `.metadata`, an untrusted pickle, may reference -> the object used for it."""


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler restricted to tensor metadata."""

    def __init__(self, file: Path) -> None:
        if file.stat().st_size > _METADATA_BYTES:
            raise _damaged(file, f"it has {file.stat().st_size} bytes")
        data = file.read_bytes()
        for code, number, _ in pickletools.genops(data):
            # Unpicklers (this one, torch's, Megatron's) allocate a memo table as large as this number.
            if code.name in ("PUT", "LONG_BINPUT") and int(number or 0) > len(data):
                raise _damaged(file, "it numbers more objects than it has bytes")
        super().__init__(io.BytesIO(data))
        self._file = file

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowlisted class or a dtype. Raises UserError for any other name."""
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise UserError(
            f"{self._file} asks for {module}.{name}, which is not tensor metadata and could run code, so the file is "
            "not read: use a checkpoint from a source that you trust.",
            code="unsafe",
            key=str(self._file),
        )


def read_metadata(file: Path) -> metadata.Metadata:
    """Read a `.metadata` file. Raises UserError if it is damaged or references anything but tensor metadata."""
    try:
        found = _MetadataUnpickler(file).load()
    except UserError:
        raise
    except Exception as error:  # A damaged pickle can raise anything.
        raise _damaged(file, error) from error
    if not isinstance(found, metadata.Metadata):
        raise _damaged(file, "it holds no metadata")
    return found


def check_place(place: Any, key: str) -> None:
    """Raise UserError unless `key` is stored uncompressed and unencrypted in a file of the checkpoint folder."""
    file = place.relative_path
    if Path(file).name != file or getattr(place, "transform_descriptors", None):
        raise UserError(
            f"{file} holds {key} outside the folder or in a transformed form, which is not supported: save it as plain "
            "torch_dist.",
            code="unsupported" if Path(file).name == file else "unsafe",
            key=file,
        )


def _damaged(file: Path, reason: object) -> UserError:
    return UserError(
        f"{file} is damaged or truncated ({reason}): take another checkpoint, or copy it again.",
        code="malformed",
        key=str(file),
    )


def _index(folder: Path, found: metadata.Metadata) -> tuple[dict[str, StoredWeight], dict[str, list[_Piece]]]:
    """Return weight name -> shape and dtype, and weight name -> stored pieces."""
    stored: dict[str, StoredWeight] = {}
    pieces: dict[str, list[_Piece]] = {}
    files: dict[str, Path] = {}
    count = 0
    for key, tensor in found.state_dict_metadata.items():
        if not isinstance(tensor, metadata.TensorStorageMetadata) or not is_weight(key):
            continue
        # Model wrappers prefix the key with their own names.
        plain = _WRAPPERS.sub("", key)
        axes = bool(_STACKED_LAYERS.match(plain)) + bool(_STACKED_EXPERTS.search(plain))
        count += sum(max(prod(tuple(chunk.sizes)[:axes]), 0) for chunk in tensor.chunks)
        if count > _MAX_PIECES:
            raise ValueError(f"{key} is the last of more than {_MAX_PIECES} weights")
        half = next((half for ending, half in _HALVES.items() if plain.endswith(ending)), None)
        rows, *others = tuple(tensor.size)[axes:] or (1,)
        shape = tuple(tensor.size)[axes:] if half is None else (2 * rows, *others)
        for chunk in tensor.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            place = found.storage_data[metadata.MetadataIndex(key, offsets)]
            check_place(place, key)
            at = offsets[axes:] if half is None else (offsets[axes] + half * rows, *offsets[axes + 1 :])
            for within in product(*(range(size) for size in sizes[:axes])):
                name = name_of(plain, tuple(map(sum, zip(offsets, within, strict=False))))
                stored[name] = StoredWeight((shape,), tensor.properties.dtype)
                file = files.setdefault(place.relative_path, folder / place.relative_path)
                piece = _Piece(file, place.offset, place.length, sizes, within, at)
                pieces.setdefault(name, []).append(piece)
    return stored, pieces


_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_MODEL = re.compile(r"model(\d*)")
_LAYER = re.compile(r"^(decoder\.layers\.)(\d{1,9})(?=\.)")
_EXPERT = re.compile(r"(\.mlp\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(\d{1,9})(?!\d)")
_TOLERATED = re.compile(
    r"(megatron|transformer_engine|apex)\..*|argparse\.Namespace|types\.SimpleNamespace|_?io\.BytesIO"
    r"|numpy\.(dtype|ndarray|dtypes\.\w+|_?core\.multiarray\.(_reconstruct|scalar))"
    r"|pathlib(\._local)?\.(Pure)?PosixPath|datetime\.timedelta"
)
"""Classes accepted beside weights: settings and random generator states."""
_SHOWN = 1 << 63
"""Limit for printing a number from an untrusted file: Python cannot print numbers of more than 4,300 digits."""
_SIZES = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "ep": "expert_model_parallel_size"}


class _Rank(NamedTuple):
    """The rank that wrote a file."""

    tp: int
    pp: int
    ep: int


class _RankFile(NamedTuple):
    """Content of one rank's file."""

    models: tuple[dict[str, TensorOnDisk], ...]  # One model for each virtual stage, in order.
    sizes: dict[str, int]  # TP, PP and EP size of the saving run, as far as its settings are stored.
    step: int | None


class _Grid(NamedTuple):
    """Parallel sizes of the saving run; `etp` is the tensor-parallel size of the experts."""

    tp: int
    pp: int
    ep: int
    etp: int

    def files(self) -> list[tuple[int, int]]:
        """Return (tensor rank, expert rank) of each file of a pipeline stage."""
        return [(rank % self.tp, rank // self.etp % self.ep) for rank in range(lcm(self.tp, self.etp * self.ep))]


class LegacyCheckpoint(MegatronCheckpoint):
    """A folder with one file per rank, `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`.

    A file holds the layers of one pipeline stage and a share of their experts, both numbered from 0; with virtual
    stages it holds several models. Global layer numbers follow from the number of layers in each model.
    """

    format = "mp_rank"

    def __init__(self, folder: Path) -> None:
        """Raises UserError if a rank's file is missing, damaged or unsafe to load."""
        files = {}
        for path in sorted(folder.glob("mp_rank_*")):
            if named := _RANK.fullmatch(path.name):
                if not (path / _RANK_FILE).is_file():
                    raise UserError(
                        f"{path / _RANK_FILE} does not exist: complete the checkpoint, or copy it again.",
                        code="not_found",
                        key=str(path / _RANK_FILE),
                    )
                files[_Rank(*(int(number or 0) for number in named.groups()))] = _read_file(path / _RANK_FILE)
        files = _with_expert_ranks(dict(sorted(files.items(), key=lambda item: item[0])))
        grid = _grid(folder, files)
        stored, weights = {}, _assemble(files, grid)
        for name, pieces in weights.items():
            stored[name] = StoredWeight(tuple(piece.shape for piece in pieces), pieces[0].dtype)
            if len({piece.dtype for piece in pieces}) > 1:
                raise UserError(
                    f"{folder} has {name} in different dtypes on different ranks: give a checkpoint of one run.",
                    code="mismatch",
                    key=str(folder),
                )
        stages = max(len(file.models) for file in files.values())
        layout = f"tp {grid.tp}, pp {grid.pp}, ep {grid.ep}" + (f", {stages} virtual stages" if stages > 1 else "")
        super().__init__(folder, next(iter(files.values())).step, layout, stored, weights)

    def _read(self, name: str) -> list[Tensor]:
        return [piece.read() for piece in self._pieces[name]]


def _read_file(file: Path) -> _RankFile:
    with file.open("rb") as stream:
        loaded, locate = find_tensors(file, stream, is_inert=lambda name: bool(_TOLERATED.fullmatch(name)))
    if not isinstance(loaded, dict):
        raise UserError(f"{file} holds no Megatron model: give another checkpoint.", code="malformed", key=str(file))
    chunks = {int(named[1] or 0): value for key, value in loaded.items() if (named := _MODEL.fullmatch(str(key)))}
    if not chunks or sorted(chunks) != list(range(len(chunks))):
        raise UserError(
            f"{file} holds {', '.join(map(str, loaded))}, but no model: give a checkpoint of a model.",
            code="malformed",
            key=str(file),
        )
    models = []
    for _, chunk in sorted(chunks.items()):
        if not isinstance(chunk, dict) or not all(isinstance(name, str) for name in chunk):
            raise UserError(
                f"{file} holds no weights by name where a model should be: give another checkpoint.",
                code="malformed",
                key=str(file),
            )
        if "language_model" in chunk:
            raise UserError(
                f"{file} holds a Megatron model from before Megatron-core, which is not supported: convert it to "
                "Megatron-core.",
                code="unsupported",
                key=str(file),
            )
        weights = {name: value for name, value in chunk.items() if isinstance(value, Tensor) and is_weight(name)}
        models.append({re.sub(r"^(?:module\.)+", "", name): locate(tensor) for name, tensor in weights.items()})
    step, settings = loaded.get("iteration"), loaded.get("args")
    # Megatron's settings, if stored, give the parallel sizes. If Megatron is imported, it has registered the classes of
    # its settings with torch as safe, and the settings load as real objects instead of `Inert`.
    said = vars(settings) if isinstance(settings, Inert | Namespace | SimpleNamespace) else {}
    sizes = {short: said[name] for short, name in _SIZES.items() if isinstance(said.get(name), int)}
    return _RankFile(tuple(models), sizes, step if isinstance(step, int) and 0 <= step < _SHOWN else None)


def _with_expert_ranks(files: dict[_Rank, _RankFile]) -> dict[_Rank, _RankFile]:
    """Reinterpret `mp_rank_TT_NNN` as tensor and expert rank if the run had no pipeline stages.

    A run had no stages if every file has the embedding. NNN, the pipeline rank in `files`, is then the expert rank.
    """
    first = "embedding.word_embeddings.weight"
    if any(rank.ep for rank in files) or not all(first in file.models[0] for file in files.values()):
        return files
    return {_Rank(rank.tp, 0, rank.pp): file for rank, file in files.items()}


def _grid(folder: Path, files: dict[_Rank, _RankFile]) -> _Grid:
    """Return the parallel sizes that match the files. Raises UserError if a rank's file is missing."""
    said = next(iter(files.values())).sizes
    sizes = {axis: max(1 + max(getattr(rank, axis) for rank in files), said.get(axis, 1)) for axis in _SIZES}
    for axis, size in sizes.items():
        # Fail before enumerating ranks: the size comes from an untrusted file.
        if size > len(files):
            raise UserError(
                f"{folder} has the files of {len(files)} ranks, too few for "
                f"{_SIZES[axis]}={min(size, _SHOWN)}: complete the checkpoint, or copy it again.",
                code="not_found",
                key=str(folder),
            )
    tp, pp, ep = sizes.values()
    stages = [{(rank.tp, rank.ep) for rank in files if rank.pp == stage} for stage in range(pp)]
    for grid in (_Grid(tp, pp, ep, etp) for etp in range(tp, 0, -1) if tp % etp == 0):
        if all(sorted(stage) == sorted(grid.files()) for stage in stages):
            return grid
    every = (_Rank(t, p, e) for t in range(tp) for p in range(pp) for e in range(ep))
    missing = next(rank for rank in every if rank not in files)
    name = f"mp_rank_{missing.tp:02d}" + (f"_{missing.pp:03d}" if pp > 1 else "")
    name += f"_{missing.ep:03d}" if ep > 1 else ""
    raise UserError(
        f"{folder / name / _RANK_FILE} does not exist: complete the checkpoint, or copy it again.",
        code="not_found",
        key=str(folder / name / _RANK_FILE),
    )


def _assemble(files: dict[_Rank, _RankFile], grid: _Grid) -> dict[str, list[TensorOnDisk]]:
    """Return the tensor-parallel shards of every weight in rank order, by name with global layer and expert numbers."""
    virtual = max(len(file.models) for file in files.values())
    # [pipeline rank][virtual stage] -> (rank, model) of each tensor and expert rank.
    chunks = [
        [
            [(rank, file.models[n]) for rank, file in files.items() if rank.pp == stage and n < len(file.models)]
            for n in range(virtual)
        ]
        for stage in range(grid.pp)
    ]
    counts = [
        [1 + _last(_LAYER, (name for _, model in chunk for name in model)) for chunk in stage] for stage in chunks
    ]
    held_by = _holders(grid)
    pieces: dict[str, list[TensorOnDisk]] = {}
    for stage, held in zip(chunks, chunk_layers(sum(map(sum, counts)), counts), strict=True):
        for chunk, layers in zip(stage, held, strict=True):
            for rank, model in chunk:
                experts = 1 + _last(_EXPERT, model)
                for name, piece in model.items():
                    if (rank.tp, rank.ep) in held_by[bool(_EXPERT.search(name))]:
                        named = _raised(_EXPERT, _raised(_LAYER, name, layers.start), rank.ep * experts)
                        pieces.setdefault(named, []).append(piece)
    return pieces


def _holders(grid: _Grid) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Return the (tensor, expert) ranks whose shards are read: one set for dense weights, one for expert weights.

    If several ranks hold the same shard, the shard of the first rank is read.
    """
    whole: dict[int, int] = {}
    expert: dict[tuple[int, int], int] = {}
    for tp, ep in sorted(grid.files(), reverse=True):
        whole[tp] = ep
        expert[ep, tp % grid.etp] = tp
    return set(whole.items()), {(tp, ep) for (ep, _), tp in expert.items()}


def _last(kind: re.Pattern[str], names: Iterable[str]) -> int:
    """Return the largest local layer or expert number in `names`, -1 if `names` has none."""
    return max((int(found[2]) for name in names if (found := kind.search(name))), default=-1)


def _raised(kind: re.Pattern[str], name: str, first: int) -> str:
    """Return `name` with `first` added to its local number."""
    return kind.sub(lambda found: f"{found[1]}{int(found[2]) + first}", name)
