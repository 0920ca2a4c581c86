"""Megatron's distributed checkpoints, read tensor by tensor.

`.metadata` says which chunk of which tensor lies where; a chunk is what `torch.save` writes. That file is a pickle and
untrusted, so it may name the classes that such metadata is made of and nothing else.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from math import prod
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.utils import _create_file_view

from rlsys.errors import UserError
from rlsys.weights.bijection import Entry, WeightMap
from rlsys.weights.checkpoint import keys
from rlsys.weights.checkpoint.about import is_complete, read_about
from rlsys.weights.checkpoint.on_disk import OnDisk, find_tensors
from rlsys.weights.checkpoint.stored import MegatronCheckpoint, Stored
from rlsys.weights.families import Cut

METADATA, BACKEND, COMMON = ".metadata", "metadata.json", "common.pt"
"""Files that Megatron asks for beside the tensors."""


_MOST_PIECES = 1 << 20
"""Pieces of weights, one for each expert of each layer and each cut: more than any model has, and few to count."""
_METADATA_BYTES = 1 << 30
"""Largest `.metadata` that is read; no model needs as much."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a weight within a chunk."""

    file: str
    start: int
    """Bytes into the file, to what `torch.save` wrote."""
    length: int
    sizes: tuple[int, ...]
    """Of the chunk."""
    within: tuple[int, ...]
    """Where along the chunk's leading axes the weight is."""
    at: tuple[int, ...]
    """Where in the weight the piece begins."""


class TorchDistCheckpoint(MegatronCheckpoint):
    """A folder with `.metadata` and `.distcp` files."""

    format = "torch_dist"

    def __init__(self, folder: Path) -> None:
        """Raises UserError if the folder is incomplete, or its metadata is damaged or is none."""
        self._stored, self._pieces = _index(folder / METADATA)
        super().__init__(folder, _step(folder), self._cuts(folder))

    def names(self) -> Mapping[str, Stored]:
        """See `MegatronCheckpoint`."""
        return self._stored

    def files(self) -> list[Path]:
        """See `MegatronCheckpoint`."""
        named = {piece.file for pieces in self._pieces.values() for piece in pieces}
        return [Path(name) for name in sorted({METADATA, *named}) if (self.folder / name).is_file()]

    def parts(self, entry: Entry, weights: WeightMap) -> list[tuple[str, Tensor]]:
        """See `MegatronCheckpoint`; what lies in one piece is not copied."""
        self._check_shape(entry, weights)
        if entry.rule.cut not in (Cut.GATE_UP, Cut.VOCAB):
            return super().parts(entry, weights)
        # In the whole tensor they follow one another, and it is often cut between them.
        name, shapes = self._stored_name(entry), weights.hf_shapes(entry)
        bounds = pairwise(accumulate((shape[0] for shape in shapes), initial=0))
        return [(hf, self._rows(name, *rows)) for hf, rows in zip(entry.hf, bounds, strict=True)]

    def _cut_into(self, name: str) -> int:
        """See `MegatronCheckpoint`."""
        return len(self._pieces[name])

    def _read(self, name: str) -> list[Tensor]:
        """See `MegatronCheckpoint`: always whole."""
        (shape,) = self._stored[name].shapes
        return [self._rows(name, 0, shape[0])]

    def _rows(self, name: str, start: int, stop: int) -> Tensor:
        """Some rows of a weight, which has at least one dimension."""
        stored = self._stored[name]
        (shape,) = stored.shapes
        found: list[tuple[tuple[int, ...], OnDisk]] = []
        for piece in self._pieces[name]:
            first, rows = piece.at[0], piece.sizes[len(piece.within)]
            begin, end = max(start - first, 0), min(stop - first, rows)
            if begin < end:
                place = self._locate(name, piece, stored.dtype).rows(begin, end)
                found.append(((first + begin - start, *piece.at[1:]), place))
        if sum(prod(place.shape) for _, place in found) != prod((stop - start, *shape[1:])):
            raise UserError(f"{self.folder / METADATA} does not say where all of {name} is; use another checkpoint.")
        if len(found) == 1:
            return found[0][1].read()
        whole = torch.empty((stop - start, *shape[1:]), dtype=stored.dtype)
        for origin, place in found:
            region = tuple(slice(at, at + size) for at, size in zip(origin, place.shape, strict=True))
            whole[region].copy_(place.read())
        return whole

    def _locate(self, name: str, piece: Piece, dtype: torch.dtype) -> OnDisk:
        file = self.folder / piece.file
        if not file.is_file():
            raise UserError(f"{file} is not there, but holds {name}; complete the checkpoint.")
        if file.stat().st_size < piece.start + piece.length:
            raise UserError(f"{file} is cut short, and {name} was in it; complete the checkpoint, or copy it again.")
        with file.open("rb") as stream:
            view: Any = _create_file_view(stream, piece.start, piece.length)
            tensor, locate = find_tensors(file, view, piece.start)
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != piece.sizes or tensor.dtype != dtype:
            raise UserError(f"{file} does not hold {name} as {METADATA} says; use another checkpoint.")
        chunk, axes = locate(tensor), len(piece.within)
        skipped = sum(number * step for number, step in zip(piece.within, chunk.stride, strict=False))
        return replace(
            chunk,
            offset=chunk.offset + skipped * dtype.itemsize,
            shape=chunk.shape[axes:],
            stride=chunk.stride[axes:],
        )

    def _cuts(self, folder: Path) -> str:
        """A distributed checkpoint is whole; only the chunks tell of the tensor parallelism that wrote it."""
        cuts = [len(self._pieces[name]) for name in self._stored if name.endswith("linear_proj.weight")]
        files = len(list(folder.glob("*.distcp")))
        return f"whole tensors, saved under tp {max(cuts, default=1)} in {files} files"


class _MegatronMetadata(metadata.Metadata):
    """Older Megatrons wrote classes of their own, of which only torch's fields matter here."""


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
"""What `.metadata` may name, by module and name, and what is made for it."""


class _MetadataUnpickler(pickle.Unpickler):
    """Makes nothing but metadata of tensors."""

    def __init__(self, file: Path) -> None:
        if file.stat().st_size > _METADATA_BYTES:
            raise _damaged(file, f"it has {file.stat().st_size} bytes")
        data = file.read_bytes()
        for code, number, _ in pickletools.genops(data):
            # The unpickler, and torch's and Megatron's too, makes room for as many objects as such a number says.
            if code.name in ("PUT", "LONG_BINPUT") and int(number or 0) > len(data):
                raise _damaged(file, "it numbers more objects than it has bytes")
        super().__init__(io.BytesIO(data))
        self._file = file

    def find_class(self, module: str, name: str) -> Any:
        """A class on the list, or a dtype. Raises UserError for any other."""
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise UserError(
            f"{self._file} asks for {module}.{name}, which is no metadata of tensors; it is not read, for it could run "
            "code. Use a checkpoint from a source that you trust."
        )


def read_metadata(file: Path) -> metadata.Metadata:
    """What `.metadata` says. Raises UserError if it is damaged, or names what is no metadata."""
    try:
        found = _MetadataUnpickler(file).load()
    except UserError:
        raise
    except Exception as error:  # a damaged pickle may fail in any way
        raise _damaged(file, error) from error
    if not isinstance(found, metadata.Metadata):
        raise _damaged(file, "it holds no metadata")
    return found


def check_place(place: Any, key: str) -> None:
    """Raise UserError unless what lies under `key` is in a file of the folder, and neither compressed nor the like."""
    file = place.relative_path
    if Path(file).name != file or getattr(place, "transform_descriptors", None):
        raise UserError(f"{file} holds {key} in a way that is not read here; use torch_dist as is.")


def _damaged(file: Path, reason: object) -> UserError:
    return UserError(f"{file} is damaged or cut short ({reason}); take another checkpoint, or copy it again.")


def _index(file: Path) -> tuple[dict[str, Stored], dict[str, list[Piece]]]:
    """Every weight, and the pieces that it is made of."""
    stored: dict[str, Stored] = {}
    pieces: dict[str, list[Piece]] = {}
    found = read_metadata(file)
    count = 0
    try:
        for key, tensor in found.state_dict_metadata.items():
            if isinstance(tensor, metadata.TensorStorageMetadata) and keys.is_weight(key):
                count = _counted(count, key, tensor)
                _add(key, tensor, found.storage_data, stored, pieces)
    except UserError:
        raise
    except Exception as error:  # it may lack anything
        raise _damaged(file, error) from error
    return stored, pieces


def _counted(before: int, key: str, tensor: metadata.TensorStorageMetadata) -> int:
    """`before` and the pieces of weights that `tensor` holds. Raises ValueError if they are too many."""
    axes = keys.leading_axes(keys.unwrapped(key))
    count = before + sum(max(prod(tuple(chunk.sizes)[:axes]), 0) for chunk in tensor.chunks)
    if count > _MOST_PIECES:
        raise ValueError(f"{key} is the last of more than {_MOST_PIECES} weights")
    return count


def _add(
    key: str,
    tensor: metadata.TensorStorageMetadata,
    places: Mapping[metadata.MetadataIndex, Any],
    stored: dict[str, Stored],
    pieces: dict[str, list[Piece]],
) -> None:
    plain = keys.unwrapped(key)
    axes, half = keys.leading_axes(plain), keys.half_of(plain)
    rows, *others = tuple(tensor.size)[axes:] or (1,)
    shape = tuple(tensor.size)[axes:] if half is None else (2 * rows, *others)
    for chunk in tensor.chunks:
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        place = places[metadata.MetadataIndex(key, offsets)]
        check_place(place, key)
        at = offsets[axes:] if half is None else (offsets[axes] + half * rows, *offsets[axes + 1 :])
        for within in product(*(range(size) for size in sizes[:axes])):
            numbers = tuple(map(sum, zip(offsets, within, strict=False)))
            name = keys.name_of(plain, numbers)
            stored[name] = Stored((shape,), tensor.properties.dtype)
            piece = Piece(place.relative_path, place.offset, place.length, sizes, within, at)
            pieces.setdefault(name, []).append(piece)


def _step(folder: Path) -> int | None:
    """The step it was saved at, as rlsys notes it or Megatron names the folder."""
    if is_complete(folder):
        return read_about(folder).step
    named = re.fullmatch(r"iter_(\d+)", folder.name)
    return int(named[1]) if named else None
