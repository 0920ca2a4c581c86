"""Opens a checkpoint of Megatron's, whatever wrote it (rlsys, Megatron-LM, another system on Megatron-core): weights, one by one.

Nothing of a model is built and no process group is joined. A checkpoint is plain data, which other processes may be sent; its
files are opened when something is read and closed again.

A checkpoint is untrusted: what is not a tensor, a plain value or on a list of what lies beside weights is refused, and nothing
that it names is ever called. What is on the list becomes an `Inert` object and is not imported either.
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
from rlsys.weights.checkpoint.store import is_complete, read_about
from rlsys.weights.hf_io import map_bytes, unreadable
from rlsys.weights.transport import checksum
from rlsys.weights.weight_map import VOCAB_MULTIPLE, Cut, Entry, WeightMap, chunk_layers

METADATA, BACKEND, COMMON = ".metadata", "metadata.json", "common.pt"
"""Files of a distributed checkpoint beside the tensors."""
LAYER_STATE = "_extra_state"
"""In the key of what a layer of Transformer Engine keeps beside its weights; without FP8 there is nothing in it."""
_LATEST, _RANK_FILE = "latest_checkpointed_iteration.txt", "model_optim_rng.pt"


def saved(value: Any) -> bytes:
    """What `torch.save` writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def open_checkpoint(folder: str | Path) -> MegatronCheckpoint:
    """Opens the checkpoint in `folder`, or the one that Megatron's note of the latest names there. Raises UserError."""
    folder = _resolve(Path(folder))
    if (folder / BACKEND).is_file():
        return TorchDistCheckpoint(folder)
    if (folder / METADATA).is_file():
        raise UserError(
            f"{folder} has {METADATA} but no {BACKEND}: it was not written to the end; give another.",
            code="malformed",
            key=str(folder),
        )
    if any(folder.glob("mp_rank_*")):
        return LegacyCheckpoint(folder)
    raise UserError(
        f"{folder} holds no checkpoint of Megatron's; give a folder with {BACKEND} or mp_rank_00 in it, such as "
        ".../global_step_N/actor or .../iter_0000100.",
        code="empty",
        key=str(folder),
    )


def _resolve(folder: Path) -> Path:
    if not folder.is_dir():
        raise UserError(f"{folder} is not there; give the folder of a checkpoint.", code="not_found", key=str(folder))
    note = folder / _LATEST
    if note.is_file():
        latest = note.read_text().strip()
        named = folder / (f"iter_{int(latest):07d}" if latest.isdecimal() else latest)
        if not named.is_dir() or named.parent != folder:
            raise UserError(
                f"{note} names {latest}, but {named} is not there; give the folder of a checkpoint.",
                code="not_found",
                key=str(named),
            )
        return named
    saved = sorted(path for path in folder.glob("iter_*") if path.is_dir())
    if len(saved) > 1:
        raise UserError(
            f"{folder} holds {len(saved)} checkpoints; give one, such as {saved[-1]}.",
            code="out_of_range",
            key=str(folder),
        )
    return saved[0] if saved else folder


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One Megatron tensor as a checkpoint holds it."""

    shapes: tuple[tuple[int, ...], ...]
    """Of each tensor-parallel piece, in the order of ranks; one where it is held whole."""
    dtype: torch.dtype


class MegatronCheckpoint(ABC):
    """Megatron's weights in a folder, by their names with global layer and expert numbers."""

    format: str  # torch_dist or mp_rank.

    def __init__(
        self,
        folder: Path,
        step: int | None,
        layout: str,
        stored: Mapping[str, StoredWeight],
        pieces: Mapping[str, list[Any]],
    ) -> None:
        """`layout` says to people how it was cut when it was saved, as far as can be told; `pieces` of a weight are at
        least as many as the tensor-parallel ranks that cut it."""
        self.folder, self.step, self.layout, self._stored, self._pieces = folder, step, layout, stored, pieces

    def names(self) -> Mapping[str, StoredWeight]:
        """Every weight, named as it is stored: of Transformer Engine's layers as those name it."""
        return self._stored

    def files(self) -> list[Path]:
        """The files that weights are read from, as far as they are there, relative to the folder."""
        named = {piece.file for pieces in self._pieces.values() for piece in pieces}
        return [file.relative_to(self.folder) for file in sorted(named) if file.is_file()]

    @abstractmethod
    def _read(self, name: str) -> list[Tensor]:
        """The tensor-parallel pieces of a weight, in the order of ranks."""

    def check(self, weights: WeightMap) -> None:
        """Raise UserError unless this is a checkpoint of the model of `weights`, whole and of the right shapes."""
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
                f"{self.folder} lacks {len(missing)} weights of this model, first {missing[0]}; give the whole "
                "checkpoint of a model that fits the config.json.",
                code="mismatch",
                key=str(self.folder),
            )
        if unknown:
            raise UserError(
                f"{self.folder} has {len(unknown)} weights that this model does not have, first {unknown[0]}; "
                "give the config.json of the model that was trained.",
                code="mismatch",
                key=str(self.folder),
            )
        for entry in entries.values():
            self._check_shape(entry, weights)
            name, vocab = self._stored_name(entry), weights.architecture.vocab
            rows = sum(shape[0] for shape in self.names()[name].shapes)
            # Megatron pads by less than a multiple of its own for each tensor-parallel rank; more is another model's.
            if entry.rule.cut is Cut.VOCAB and rows - vocab >= VOCAB_MULTIPLE * len(self._pieces[name]):
                raise UserError(
                    f"{self.folder} has a vocabulary of {rows} rows in {name}, and the config.json says {vocab}, which "
                    "is too few for the rest to be padding; give the config.json of the model that was trained (--hf).",
                    code="mismatch",
                    key=str(self.folder),
                )

    def check_copies(self, weights: WeightMap) -> None:
        """Raise UserError unless what is stored beside the tensor that it is a copy of has the same numbers."""

        def sums(entry: Entry) -> list[str]:
            return [checksum(name, tensor) for name, tensor in self.parts(entry, weights)]

        originals = {entry.hf: entry for entry in weights.entries()}
        stored = {known.name for name in self.names() if (known := _entry(weights, name))}
        for copy in weights.copies():
            original = originals[copy.hf]
            if copy.name in stored and sums(copy) != sums(original):
                raise UserError(
                    f"{self.folder} has {copy.name} with other numbers than {original.name}, and they would be lost, "
                    "for the config.json says that the two are one (tie_word_embeddings); give the config.json of the "
                    "model that was trained.",
                    code="mismatch",
                    key=str(self.folder),
                )

    def dtype(self, entry: Entry) -> torch.dtype:
        """The dtype that a weight is stored in. Raises UserError if there is no such weight."""
        return self.names()[self._stored_name(entry)].dtype

    def parts(self, entry: Entry, weights: WeightMap) -> list[tuple[str, Tensor]]:
        """A weight's whole Hugging Face tensors with their names, on the CPU, in the dtype they are stored in.

        They may share memory. Raises UserError if the weight is not there, or its file is damaged.
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
            f"{self.folder} has {entry.name} of shape {shapes}, which is not this model's; give the config.json of "
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
            f"{self.folder} lacks {entry.name}; give the whole checkpoint of this model.",
            code="mismatch",
            key=str(self.folder),
        )


def _entry(weights: WeightMap, name: str) -> Entry | None:
    with suppress(KeyError):
        return weights.entry(name)
    return None


class Inert:
    """Stands for an object of a class that is of no use here: it keeps attributes and does nothing."""

    def __new__(cls, *_: Any, **__: Any) -> Inert:
        """Whatever its class was made from."""
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


@dataclass(frozen=True, slots=True)
class OnDisk:
    """Where in a file a tensor lies."""

    file: Path
    offset: int  # Bytes from the start of the file to its first element.
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def rows(self, start: int, stop: int) -> OnDisk:
        """Some rows of it."""
        skipped = start * self.stride[0] * self.dtype.itemsize
        return replace(self, offset=self.offset + skipped, shape=(stop - start, *self.shape[1:]))

    def read(self) -> Tensor:
        """The tensor: the file's own bytes where they are aligned, mapped for as long as it lives, else a copy.

        What is written to it is not written to the file. Raises UserError if the file has become shorter.
        """
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype)
        itemsize = self.dtype.itemsize
        nbytes = (sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)) + 1) * itemsize
        try:
            if self.file.stat().st_size < self.offset + nbytes:
                raise UserError(
                    f"{self.file} is cut short; complete the checkpoint, or copy it again.",
                    code="malformed",
                    key=str(self.file),
                )
            if self.offset % itemsize:
                # Half the memory of a map that is then copied.
                flat = torch.from_numpy(np.fromfile(self.file, np.uint8, nbytes, offset=self.offset))
            else:
                flat = map_bytes(self.file, self.offset, nbytes)
        except OSError as error:
            raise unreadable(self.file, error) from error
        return flat.view(self.dtype).as_strided(self.shape, self.stride)


def find_tensors(
    file: Path, stream: IO[bytes], start: int = 0, is_inert: Callable[[str], bool] = lambda _: False
) -> tuple[Any, Callable[[Tensor], OnDisk]]:
    """What `torch.save` wrote to `stream`, with tensors that have no data, and where such a tensor lies.

    `stream` begins `start` bytes into `file`. `is_inert` says of a full name whether objects made with it are tolerated,
    as `Inert` ones. Raises UserError if it is damaged or asks for anything else.
    """
    # So files of `torch.save` began that were no archives yet.
    old = pickle.dumps(torch.serialization.MAGIC_NUMBER, protocol=2)
    begins = stream.read(len(old))
    stream.seek(0)
    if begins == old:
        raise UserError(
            f"{file} was written by a torch before 1.6, or as that did, which is not read here; load it with torch and "
            "save it again.",
            code="unsupported",
            key=str(file),
        )
    try:
        named = get_unsafe_globals_in_checkpoint(stream)
        if refused := sorted(name for name in named if not is_inert(name)):
            raise UserError(
                f"{file} asks for {refused[0]}, which no checkpoint of weights needs; it is not read, for it could "
                "run code. Use a checkpoint from a source that you trust.",
                code="unsafe",
                key=str(file),
            )
        stream.seek(0)
        with safe_globals([(Inert, name) for name in named]):
            loaded = torch.load(stream, map_location="meta", weights_only=True)
    except (RuntimeError, ValueError, EOFError, OSError, pickle.UnpicklingError, TypeError, KeyError) as error:
        raise UserError(
            f"{file} is damaged or cut short; complete the checkpoint, or copy it again.",
            code="malformed",
            key=str(file),
        ) from error

    def locate(tensor: Tensor) -> OnDisk:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise UserError(
                f"{file} has a sparse or quantised tensor, which is not read; give another checkpoint.",
                code="unsupported",
                key=str(file),
            )
        storage: Any = tensor.untyped_storage()
        offset = start + storage._checkpoint_offset + tensor.storage_offset() * tensor.dtype.itemsize
        return OnDisk(file, offset, tuple(tensor.shape), tensor.stride(), tensor.dtype)

    return loaded, locate


# Names in distributed checkpoints: a weight of a layer lies under a key without the layer's number, whose tensor has all layers
# as its first axis; that of an expert has all experts as the next one. Checkpoints of layers that are not alike number the layers
# in the key instead. Here a key and the numbers along its leading axes become the name of one weight, and back.
_LAYERS = "decoder.layers."
_STACKED_LAYERS = re.compile(r"^decoder\.layers\.(?!\d)")
_EXPERTS, _LOCAL = ".mlp.experts.experts.", ".mlp.experts.local_experts."
_STACKED_EXPERTS = re.compile(r"\.mlp\.experts\.experts\.(?!\d)")
_WRAPPERS = re.compile(r"^(?:model\.|module\.)+")
_OPTIMIZER = re.compile(r"^(?:chained_\d+\.)?(?:optimizer|master)\.")
_HALVES = {"linear_fc1.weight_w": 0, "linear_fc1.weight_v": 1}
"""Keys of the gate and of the up projection alone, which are one weight elsewhere."""
_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Norms lie under the name that Transformer Engine gives them, where it fuses them into the next linear layer."""


def is_weight(key: str) -> bool:
    """Whether what lies under `key` is a weight of the model, not the optimiser's nor a `LAYER_STATE`."""
    return not _OPTIMIZER.match(key) and LAYER_STATE not in key


def name_of(key: str, numbers: tuple[int, ...]) -> str:
    """The weight at `numbers` along the leading axes of `key`, with its global layer and expert numbers."""
    if key.endswith(tuple(_HALVES)):
        key = key[:-2]
    rest = iter(numbers)
    if _STACKED_LAYERS.match(key):
        key = f"{_LAYERS}{next(rest)}.{key.removeprefix(_LAYERS)}"
    if found := _STACKED_EXPERTS.search(key):
        return f"{key[: found.start()]}{_LOCAL}{next(rest)}.{key[found.end() :]}"
    return key.replace(_EXPERTS, _LOCAL)


def key_of(name: str, mixture: bool) -> str:
    """The stacked key of a weight; `mixture`: the layers have experts, before which no norm is fused."""
    if not name.startswith(_LAYERS):
        return name
    _, _, rest = name.removeprefix(_LAYERS).partition(".")
    rest = re.sub(r"^mlp\.experts\.local_experts\.\d+\.", _EXPERTS.removeprefix("."), rest)
    return _LAYERS + (rest if mixture and rest.startswith("pre_mlp") else _NORMS.get(rest, rest))


_MOST_PIECES = 1 << 20
"""Pieces of weights, one for each expert of each layer and each cut: more than any model has, and few to count."""
_METADATA_BYTES = 1 << 30  # Largest `.metadata` that is read; no model needs as much.


class _Piece(NamedTuple):
    """A part of a weight within a chunk."""

    file: Path
    start: int  # Bytes into the file, to what `torch.save` wrote.
    length: int
    sizes: tuple[int, ...]  # Of the chunk.
    within: tuple[int, ...]  # Where along the chunk's leading axes the weight is.
    at: tuple[int, ...]  # Where in the weight the piece begins.


class TorchDistCheckpoint(MegatronCheckpoint):
    """A distributed checkpoint: `.metadata` says which chunk (of `torch.save`) of which tensor lies where."""

    format = "torch_dist"

    def __init__(self, folder: Path) -> None:
        """Raises UserError if the folder is incomplete, or its metadata is damaged or is none."""
        try:
            backend = json.loads((folder / BACKEND).read_text())["sharded_backend"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f"{folder / BACKEND} is damaged; copy the checkpoint again.",
                code="malformed",
                key=str(folder / BACKEND),
            ) from error
        if backend != "torch_dist":
            raise UserError(
                f"{folder} was saved as {backend}, which is not read here; save it as torch_dist.",
                code="unsupported",
                key=str(folder),
            )
        if not (folder / METADATA).is_file():
            raise UserError(
                f"{folder / METADATA} is not there; complete the checkpoint, or copy it again.",
                code="not_found",
                key=str(folder / METADATA),
            )
        found = read_metadata(folder / METADATA)
        try:
            stored, pieces = _index(folder, found)
        except UserError:
            raise
        except Exception as error:  # it may lack anything
            raise _damaged(folder / METADATA, error) from error
        # A distributed checkpoint is whole; only the chunks tell of the tensor parallelism that wrote it.
        tp = max((len(cut) for name, cut in pieces.items() if name.endswith("linear_proj.weight")), default=1)
        layout = f"whole tensors, saved under tp {tp} in {len(list(folder.glob('*.distcp')))} files"
        named = re.fullmatch(r"iter_(\d+)", folder.name)
        step = read_about(folder).step if is_complete(folder) else int(named[1]) if named else None
        super().__init__(folder, step, layout, stored, pieces)

    def files(self) -> list[Path]:
        return [Path(METADATA), *super().files()]

    def parts(self, entry: Entry, weights: WeightMap) -> list[tuple[str, Tensor]]:
        """See `MegatronCheckpoint`; what lies in one piece is not copied."""
        self._check_shape(entry, weights)
        if entry.rule.cut not in (Cut.GATE_UP, Cut.VOCAB):
            return super().parts(entry, weights)
        # In the whole tensor they follow one another, and it is often cut between them.
        name, shapes = self._stored_name(entry), entry.rule.shapes
        bounds = pairwise(accumulate((shape[0] for shape in shapes), initial=0))
        return [(hf, self._rows(name, *rows)) for hf, rows in zip(entry.hf, bounds, strict=True)]

    def _read(self, name: str) -> list[Tensor]:
        return [self._rows(name, 0, self._stored[name].shapes[0][0])]

    def _rows(self, name: str, start: int, stop: int) -> Tensor:
        """Some rows of a weight, which has at least one dimension."""
        stored = self._stored[name]
        shape = (stop - start, *stored.shapes[0][1:])
        found: list[tuple[tuple[int, ...], OnDisk]] = []
        for piece in self._pieces[name]:
            first, rows = piece.at[0], piece.sizes[len(piece.within)]
            begin, end = max(start - first, 0), min(stop - first, rows)
            if begin < end:
                place = self._locate(name, piece, stored.dtype).rows(begin, end)
                found.append(((first + begin - start, *piece.at[1:]), place))
        if sum(prod(place.shape) for _, place in found) != prod(shape):
            raise UserError(
                f"{self.folder / METADATA} does not say where all of {name} is; use another checkpoint.",
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

    def _locate(self, name: str, piece: _Piece, dtype: torch.dtype) -> OnDisk:
        file = piece.file
        if not file.is_file():
            raise UserError(
                f"{file} is not there, but holds {name}; complete the checkpoint.", code="not_found", key=str(file)
            )
        if file.stat().st_size < piece.start + piece.length:
            raise UserError(
                f"{file} is cut short, and {name} was in it; complete the checkpoint, or copy it again.",
                code="malformed",
                key=str(file),
            )
        with file.open("rb") as stream:
            view: Any = _create_file_view(stream, piece.start, piece.length)
            tensor, locate = find_tensors(file, view, piece.start)
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != piece.sizes or tensor.dtype != dtype:
            raise UserError(
                f"{file} does not hold {name} as {METADATA} says; use another checkpoint.",
                code="mismatch",
                key=str(file),
            )
        chunk, axes = locate(tensor), len(piece.within)
        skipped = sum(number * step for number, step in zip(piece.within, chunk.stride, strict=False))
        offset = chunk.offset + skipped * dtype.itemsize
        return replace(chunk, offset=offset, shape=chunk.shape[axes:], stride=chunk.stride[axes:])


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
"""What `.metadata`, an untrusted pickle, may name, by module and name, and what is made for it."""


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
            "code. Use a checkpoint from a source that you trust.",
            code="unsafe",
            key=str(self._file),
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
        raise UserError(
            f"{file} holds {key} in a way that is not read here; use torch_dist as is.",
            code="unsupported" if Path(file).name == file else "unsafe",
            key=file,
        )


def _damaged(file: Path, reason: object) -> UserError:
    return UserError(
        f"{file} is damaged or cut short ({reason}); take another checkpoint, or copy it again.",
        code="malformed",
        key=str(file),
    )


def _index(folder: Path, found: metadata.Metadata) -> tuple[dict[str, StoredWeight], dict[str, list[_Piece]]]:
    """Every weight, and the pieces that it is made of."""
    stored: dict[str, StoredWeight] = {}
    pieces: dict[str, list[_Piece]] = {}
    files: dict[str, Path] = {}
    count = 0
    for key, tensor in found.state_dict_metadata.items():
        if not isinstance(tensor, metadata.TensorStorageMetadata) or not is_weight(key):
            continue
        # Wrappers around the model put their names before the key.
        plain = _WRAPPERS.sub("", key)
        axes = bool(_STACKED_LAYERS.match(plain)) + bool(_STACKED_EXPERTS.search(plain))
        count += sum(max(prod(tuple(chunk.sizes)[:axes]), 0) for chunk in tensor.chunks)
        if count > _MOST_PIECES:
            raise ValueError(f"{key} is the last of more than {_MOST_PIECES} weights")
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
_EXPERT = re.compile(r"(\.mlp\.experts\.(?:local_experts\.|linear_fc[12]\.weight))(\d{1,9})(?!\d)")
_TOLERATED = re.compile(
    r"(megatron|transformer_engine|apex)\..*|argparse\.Namespace|types\.SimpleNamespace|_?io\.BytesIO"
    r"|numpy\.(dtype|ndarray|dtypes\.\w+|_?core\.multiarray\.(_reconstruct|scalar))"
    r"|pathlib(\._local)?\.(Pure)?PosixPath|datetime\.timedelta"
)
"""Classes of what lies beside the weights: settings, states of random generators."""
_SHOWN = 1 << 63
"""Beyond this, a number in an untrusted file is not shown: Python prints none of more than 4,300 digits."""
_SIZES = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "ep": "expert_model_parallel_size"}


class _Rank(NamedTuple):
    """Whose file it is."""

    tp: int
    pp: int
    ep: int


class _RankFile(NamedTuple):
    """What one file says: its models in the order of virtual stages, the ranks in all, and the step."""

    models: tuple[dict[str, OnDisk], ...]
    sizes: dict[str, int]
    step: int | None


class _Grid(NamedTuple):
    """The ranks that there are. A rank of the experts' tensor parallelism holds what `etp` ranks cut an expert in."""

    tp: int
    pp: int
    ep: int
    etp: int

    def files(self) -> list[tuple[int, int]]:
        """Tensor and expert rank of each file of a stage."""
        return [(rank % self.tp, rank // self.etp % self.ep) for rank in range(lcm(self.tp, self.etp * self.ep))]


class LegacyCheckpoint(MegatronCheckpoint):
    """A folder with a file for every rank, `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`.

    A file holds the layers of its stage, numbered from 0, and of its share of the experts; with virtual stages it holds
    several models. Which layers those are follows from how many each holds.
    """

    format = "mp_rank"

    def __init__(self, folder: Path) -> None:
        """Raises UserError if a rank's file is missing, damaged, or asks to run code."""
        files = {}
        for path in sorted(folder.glob("mp_rank_*")):
            if named := _RANK.fullmatch(path.name):
                if not (path / _RANK_FILE).is_file():
                    raise UserError(
                        f"{path / _RANK_FILE} is not there; complete the checkpoint, or copy it again.",
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
                    f"{folder} has {name} in different dtypes on different ranks; give a checkpoint of one run.",
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
        raise UserError(
            f"{file} holds no checkpoint of Megatron's; give another folder.", code="malformed", key=str(file)
        )
    chunks = {int(named[1] or 0): value for key, value in loaded.items() if (named := _MODEL.fullmatch(str(key)))}
    if not chunks or sorted(chunks) != list(range(len(chunks))):
        raise UserError(
            f"{file} holds {', '.join(map(str, loaded))}, but no model; give a checkpoint of a model.",
            code="malformed",
            key=str(file),
        )
    models = []
    for _, chunk in sorted(chunks.items()):
        if not isinstance(chunk, dict) or not all(isinstance(name, str) for name in chunk):
            raise UserError(
                f"{file} holds no weights by name where a model should be; give another checkpoint.",
                code="malformed",
                key=str(file),
            )
        if "language_model" in chunk:
            raise UserError(
                f"{file} is of Megatron's old models, which are not read; convert it to Megatron-core.",
                code="unsupported",
                key=str(file),
            )
        weights = {name: value for name, value in chunk.items() if isinstance(value, Tensor) and is_weight(name)}
        models.append({re.sub(r"^(?:module\.)+", "", name): locate(tensor) for name, tensor in weights.items()})
    step, settings = loaded.get("iteration"), loaded.get("args")
    # Ranks that there should be, where Megatron's settings lie beside the weights.
    # Where Megatron is loaded, it has told torch of their classes, and they are not inert.
    said = vars(settings) if isinstance(settings, Inert | Namespace | SimpleNamespace) else {}
    sizes = {short: said[name] for short, name in _SIZES.items() if isinstance(said.get(name), int)}
    return _RankFile(tuple(models), sizes, step if isinstance(step, int) and 0 <= step < _SHOWN else None)


def _with_expert_ranks(files: dict[_Rank, _RankFile]) -> dict[_Rank, _RankFile]:
    """Without stages, the number after the tensor rank is the expert rank, and every file has the embedding."""
    first = "embedding.word_embeddings.weight"
    if any(rank.ep for rank in files) or not all(first in file.models[0] for file in files.values()):
        return files
    return {_Rank(rank.tp, 0, rank.pp): file for rank, file in files.items()}


def _grid(folder: Path, files: dict[_Rank, _RankFile]) -> _Grid:
    """Raises UserError if a rank of a regular layout is missing."""
    said = next(iter(files.values())).sizes
    sizes = {axis: max(1 + max(getattr(rank, axis) for rank in files), said.get(axis, 1)) for axis in _SIZES}
    for axis, size in sizes.items():
        # Nothing is counted out for such a size, for anything may be said.
        if size > len(files):
            raise UserError(
                f"{folder} has the files of {len(files)} ranks, which are too few for "
                f"{_SIZES[axis]}={min(size, _SHOWN)}; complete the checkpoint, or copy it again.",
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
        f"{folder / name / _RANK_FILE} is not there; complete the checkpoint, or copy it again.",
        code="not_found",
        key=str(folder / name / _RANK_FILE),
    )


def _assemble(files: dict[_Rank, _RankFile], grid: _Grid) -> dict[str, list[OnDisk]]:
    """The pieces of every weight in the order of tensor ranks, by its name with global numbers."""
    virtual = max(len(file.models) for file in files.values())
    # Each virtual stage of a pipeline rank, as each of its tensor and expert ranks has it.
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
    pieces: dict[str, list[OnDisk]] = {}
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
    """Tensor and expert ranks whose piece counts, of a weight and of an expert's: of what several ranks hold alike, it
    is the first one's."""
    whole: dict[int, int] = {}
    expert: dict[tuple[int, int], int] = {}
    for tp, ep in sorted(grid.files(), reverse=True):
        whole[tp] = ep
        expert[ep, tp % grid.etp] = tp
    return set(whole.items()), {(tp, ep) for (ep, _), tp in expert.items()}


def _last(kind: re.Pattern[str], names: Iterable[str]) -> int:
    """The largest local number of a layer or an expert in `names`; -1 if there is none."""
    return max((int(found[2]) for name in names if (found := kind.search(name))), default=-1)


def _raised(kind: re.Pattern[str], name: str, first: int) -> str:
    """`name` with `first` added to its local number."""
    return kind.sub(lambda found: f"{found[1]}{int(found[2]) + first}", name)
