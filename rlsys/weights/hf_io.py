"""Reads and writes the safetensors files of a Hugging Face model folder, one tensor at a time.

Tensors are mapped one at a time for reading and streamed to the file for writing, so at most one tensor is in memory.
The safetensors library instead maps a whole file, which counts as process memory once read, and writes all tensors of a
file in one call. A written file appears under its final name only when complete.

Format (https://huggingface.co/docs/safetensors/index#format): the header length (8 bytes, little endian); the header
(JSON that maps each tensor name to dtype, shape and [begin, end) in the data); the tensor data, row-major, without
gaps.

Some models stack the experts of a layer in one tensor. Here each expert has tensors of its own, of rows as in a linear
layer: `gate_proj`, `up_proj` and `down_proj`. The stacks of gate and up, [experts, ...], are

    in transformers 5    [gate rows above up rows, columns];
    in gpt-oss           [columns, rows], in which the rows of gate and up alternate; beside it a stack of biases, [rows];
    in gpt-oss, MXFP4    "blocks" [rows, columns / 32, 16] and "scales" [rows, columns / 32], the rows alternating.

`from_mxfp4` makes bfloat16 of the last ones. Only the second form is written, by `stacked`.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import log, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsys.errors import Code, UserError
from rlsys.files import named
from rlsys.weights.bucket import bytes_of, checksum, write_all
from rlsys.weights.weight_map import WeightMap

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Safetensors dtype name -> torch dtype."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH_BYTES, _ALIGNMENT = 8, 8
_HEADER_BYTES = 100_000_000  # Limit on the header, which is read whole; the library has the same limit.
_SIZE_END = 1 << 63
_MAX_TENSORS = 1 << 18  # Limit per folder, counting each expert: more than any model has, few enough to enumerate.
_STACKED = re.compile(r"((.+\.experts)\.(gate_up_proj|down_proj))(_bias|_blocks|_scales)?")
_MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Stack -> the matrices of an expert in it."""
_FP4 = torch.tensor([sign * value for sign in (1, -1) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)])
"""Number of each 4-bit code (OCP Microscaling Formats 1.0, E2M1)."""
_BLOCK_BYTES = 16  # A block of MXFP4: 32 numbers, which share a scale.
_POPULATE_READ = 22
"""MADV_POPULATE_READ (Linux 5.14, no Python constant): prefaults all pages at once, which is a third faster."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype and shape of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Stored:
    """Location of a tensor in a file."""

    spec: TensorSpec
    file: Path
    offset: int  # Bytes from the start of the file.
    share: _Share | None = None  # None: the tensor is stored as it is.


@dataclass(frozen=True, slots=True)
class _Share:
    """An expert's share of a stack of gpt-oss, and how its tensor lies there."""

    spec: TensorSpec  # As it is stored.
    first: int  # First row of the tensor.
    step: int  # Distance of its rows.
    scales: _Stored | None = None  # Of the share, if it is in MXFP4.

    def tensor(self, stored: Tensor, scales: Tensor | None) -> Tensor:
        """Return the tensor, given what is stored, and the scales of MXFP4."""
        rows = (stored.T if scales is None and stored.dim() == 2 else stored)[self.first :: self.step]
        return rows.contiguous() if scales is None else from_mxfp4(rows, scales[self.first :: self.step])


def with_attention_scale(model: Any) -> Any:
    """Give the attention of a DeepSeek-V2 with YaRN its scale, which transformers lacks (huggingface/transformers#47435).

    `model` is one of transformers, which is returned; other models are not changed.
    """
    rope = getattr(model.config, "rope_parameters", None) or {}
    if model.config.model_type == "deepseek_v2" and rope.get("rope_type") == "yarn":
        factor = 0.1 * (rope.get("mscale_all_dim") or 0.0) * log(max(rope["factor"], 1.0)) + 1.0
        for layer in model.model.layers:
            layer.self_attn.scaling = layer.self_attn.qk_head_dim**-0.5 * factor**2
    return model


class HfReader:
    """Reads tensors by name from the safetensors files of a folder, and single experts from stacked tensors.

    Picklable.
    """

    def __init__(self, path: str | Path) -> None:
        """Reads the headers. Raises UserError if `path` holds no safetensors, or a file is damaged."""
        folder = Path(path)
        index = folder / INDEX
        files = sorted(folder.glob("*.safetensors"))
        if not files and not index.is_file():
            raise UserError(
                f"{folder} holds no safetensors: give a folder with a Hugging Face checkpoint.",
                code="empty" if folder.is_dir() else "not_found",
                key=str(folder),
            )
        every = (named for file in files for named in _read_header(file).items())
        self._stored = _once(_indexed(folder, index) if index.is_file() else every)

    def names(self) -> set[str]:
        """Return the names of all tensors in the folder."""
        return set(self._stored)

    def spec(self, name: str) -> TensorSpec:
        """Return dtype and shape of one tensor without reading it. Raises KeyError for an unknown name."""
        return self._stored[name].spec

    def files(self) -> list[Path]:
        """Return the files that hold tensors, sorted."""
        return sorted({stored.file for stored in self._stored.values()})

    def get(self, name: str) -> Tensor:
        """Return one tensor on the CPU, in its stored dtype, memory-mapped from the file for the tensor's lifetime.

        Raises KeyError for an unknown name, UserError if the file has become unreadable or shorter.
        """
        stored = self._stored[name]
        share = stored.share
        if share is None:
            return _mapped(stored)
        whole = _mapped(replace(stored, spec=share.spec))
        return share.tensor(whole, None if share.scales is None else _mapped(share.scales))


def _mapped(stored: _Stored) -> Tensor:
    spec = stored.spec
    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=spec.dtype)
    try:
        flat = map_bytes(stored.file, stored.offset, spec.nbytes)
    except OSError as error:
        raise unreadable(stored.file, error) from error
    except ValueError as error:
        raise UserError(
            f"{stored.file} became shorter while in use: download it again.", code="malformed", key=str(stored.file)
        ) from error
    if stored.offset % spec.dtype.itemsize:
        flat = flat.clone()
    return flat.view(spec.dtype).view(spec.shape)


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of MXFP4 `blocks` [rows, blocks, 16] and `scales` [rows, blocks], [rows, 32 blocks] bfloat16.

    A byte holds two codes, the first one in its low half. Scales are powers of 2, stored as exponent + 127. All products
    that bfloat16 can hold are exact.
    """
    numbers = _FP4[torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).int()]
    return torch.ldexp(numbers, scales.int()[..., None] - 127).flatten(-2).to(torch.bfloat16)


def stacked(spec: TensorSpec, experts: Iterable[Sequence[Tensor]]) -> Tensor:
    """Return the stack `spec` of gpt-oss, given gate and up, or down, of each expert: matrices or biases."""
    whole = torch.empty(spec.shape, dtype=spec.dtype)
    for own, parts in zip(whole, experts, strict=True):
        rows = own.T if own.dim() == 2 else own
        for first, part in enumerate(parts):
            rows[first :: len(parts)] = part
    return whole


def by_expert(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model of transformers, with views of stacks in place of these."""
    for name, tensor in tensors.items():
        stack = _STACKED.fullmatch(name)
        if stack is None:
            yield name, tensor
            continue
        parts, alternate = _MATRICES[stack[3]], f"{stack[1]}_bias" in tensors
        kind = "bias" if stack[4] else "weight"
        for number, own in enumerate(tensor):
            rows = own.T if alternate and own.dim() == 2 else own
            each = len(rows) // len(parts)
            for place, part in enumerate(parts):
                view = rows[place :: len(parts)] if alternate else rows[place * each : (place + 1) * each]
                yield f"{stack[2]}.{number}.{part}.{kind}", view


def map_bytes(file: Path, offset: int, nbytes: int) -> Tensor:
    """Map part of a file copy-on-write, as [nbytes] uint8.

    Raises ValueError if the file is too short, OSError if it cannot be read.
    """
    begin = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    lead = offset - begin
    with file.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), lead + nbytes, access=mmap.ACCESS_COPY, offset=begin)
    with suppress(OSError, ValueError):
        mapped.madvise(_POPULATE_READ)
    return torch.frombuffer(mapped, dtype=torch.uint8, count=nbytes, offset=lead)


def check_repeated(reader: HfReader, weights: WeightMap, source: str | Path) -> None:
    """Raise UserError if `source` stores a tied tensor twice with different bits, because only one copy is used."""
    for again, name in weights.repeated.items():
        if again in reader.names() and checksum("", reader.get(again)) != checksum("", reader.get(name)):
            raise UserError(
                f"{source} holds different values in {again} and {name}, but its config.json ties the two "
                f"(tie_word_embeddings), so {again} would be lost: correct the config, or use weights and config of "
                "the same model.",
                code="mismatch",
                key=again,
            )


def write_safetensors(path: Path, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write `tensors` (name, tensor) to the file `path`; they must match `specs` in order.

    Order `specs` by descending dtype size, so that every tensor is aligned to its dtype and can be mapped. Raises
    ValueError if a tensor does not match its spec.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with named(path), partial.open("wb", buffering=0) as file:
            write_all(file, _header(specs))
            given = iter(tensors)
            for spec in specs:
                name, tensor = next(given, ("", torch.empty(0)))
                if (name, tensor.dtype, tuple(tensor.shape)) != (spec.name, spec.dtype, spec.shape):
                    raise ValueError(
                        f"{path.name} should hold {spec}, but got {name or 'nothing'}, {tensor.dtype}, "
                        f"{tuple(tensor.shape)}."
                    )
                write_all(file, bytes_of(tensor).data)
                del tensor
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def file_bytes(specs: Sequence[TensorSpec]) -> int:
    """Return the size of the file that `write_safetensors` writes for `specs`."""
    return len(_header(specs)) + sum(spec.nbytes for spec in specs)


def _header(specs: Sequence[TensorSpec]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        begin, end = end, end + spec.nbytes
        entries[spec.name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _once(found: Iterable[tuple[str, _Stored]]) -> dict[str, _Stored]:
    """Return the tensors by name, with stacks of experts split. Raises UserError for a duplicate name."""
    every, stored = list(found), dict[str, _Stored]()
    stacks = {name: tensor for name, tensor in every if _STACKED.fullmatch(name)}
    for name, tensor in (own for item in every for own in _experts_of(*item, stacks)):
        if name in stored:
            raise UserError(
                f"{stored[name].file} and {tensor.file} both hold {name}, and nothing says which one is valid: move "
                "away the file that does not belong to the model.",
                code="conflict",
                key=name,
            )
        if len(stored) == _MAX_TENSORS:
            raise _broken(tensor.file, f"the model has more than {_MAX_TENSORS:,} tensors")
        stored[name] = tensor
    return stored


def _experts_of(name: str, stored: _Stored, stacks: Mapping[str, _Stored]) -> Iterator[tuple[str, _Stored]]:
    """Split a stack of experts into one (name, location) per expert and matrix; yield any other tensor unchanged.

    `stacks` are all stacks of the folder. The scales of MXFP4 are parts of its blocks.
    """
    spec, stack = stored.spec, _STACKED.fullmatch(name)
    if stack and f"{stack[1]}_bias" in stacks:
        yield from _alternating(stack, stored, stacks)
        return
    matrices = _MATRICES[stack[3]] if stack else ()
    if not stack or stack[4] or len(spec.shape) != 3 or not spec.nbytes or spec.shape[1] % len(matrices):
        yield name, stored
        return
    experts, rows, columns = spec.shape
    for number, (expert, matrix) in enumerate(product(range(experts), matrices)):
        part = f"{stack[2]}.{expert}.{matrix}.weight"
        alone = TensorSpec(part, spec.dtype, (rows // len(matrices), columns))
        yield part, replace(stored, spec=alone, offset=stored.offset + number * alone.nbytes)


def _alternating(stack: re.Match[str], stored: _Stored, stacks: Mapping[str, _Stored]) -> Iterator[tuple[str, _Stored]]:
    """Split a stack of gpt-oss as `_experts_of`; yield it unchanged if its shape is not that of one."""
    base, experts, name, form = stack.groups()
    if form == "_scales" and f"{base}_blocks" in stacks:
        return
    scales = stacks.get(f"{base}_scales") if form == "_blocks" else None
    shape, matrices = _expert_shape(form, stored.spec, scales.spec if scales else None), _MATRICES[name]
    if shape is None or shape[0] % len(matrices):
        yield stack[0], stored
        return
    shape = (shape[0] // len(matrices), *shape[1:])
    dtype, kind = (stored.spec.dtype if scales is None else torch.bfloat16), "bias" if form == "_bias" else "weight"
    for number in range(stored.spec.shape[0]):
        own, own_scales = _of_expert(stored, number), scales and _of_expert(scales, number)
        for first, matrix in enumerate(matrices):
            spec = TensorSpec(f"{experts}.{number}.{matrix}.{kind}", dtype, shape)
            yield spec.name, replace(own, spec=spec, share=_Share(own.spec, first, len(matrices), own_scales))


def _expert_shape(form: str | None, spec: TensorSpec, scales: TensorSpec | None) -> tuple[int, ...] | None:
    """Return [rows, columns], or [rows] of biases, of an expert in a stack of gpt-oss; None for another shape."""
    match form, spec.shape:
        case None, (_, columns, rows):
            return rows, columns
        case "_bias", (_, rows):
            return (rows,)
        case "_blocks", (_, rows, blocks, each) if scales is not None and each == _BLOCK_BYTES:
            fits = scales.shape == spec.shape[:-1] and spec.dtype == scales.dtype == torch.uint8
            return (rows, 2 * _BLOCK_BYTES * blocks) if fits else None
    return None


def _of_expert(stack: _Stored, number: int) -> _Stored:
    share = TensorSpec(stack.spec.name, stack.spec.dtype, stack.spec.shape[1:])
    return replace(stack, spec=share, offset=stack.offset + number * share.nbytes)


def _indexed(folder: Path, index: Path) -> Iterator[tuple[str, _Stored]]:
    file_of = _weight_map(index)
    if (folder / SINGLE).is_file() and SINGLE not in file_of.values():
        raise UserError(
            f"{folder} has both {SINGLE} and an {INDEX} that does not name it, and programs differ in which they read: "
            "move away the one that does not belong to the model.",
            code="conflict",
            key=str(folder),
        )
    headers: dict[str, dict[str, _Stored]] = {}
    for name, file in file_of.items():
        if file not in headers:
            if not (folder / file).exists():
                raise UserError(
                    f"{folder / file}, named in {INDEX}, is missing: complete the checkpoint.",
                    code="not_found",
                    key=str(folder / file),
                )
            headers[file] = _read_header(folder / file)
        if name not in headers[file]:
            raise UserError(
                f"{folder / file} lacks {name}, although {INDEX} lists it there: download both again.",
                code="mismatch",
                key=str(folder / file),
            )
        yield name, headers[file][name]


def _weight_map(index: Path) -> dict[str, str]:
    """Read an index file: tensor name -> file name.

    Raises UserError if the index is damaged or names a file outside the folder.
    """
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = dict(found.items())
    except OSError as error:
        raise unreadable(index, error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{index} is damaged: download it again.", code="malformed", key=str(index)) from None
    for name, file in files.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise UserError(
                f"{index} places {name} in {file}, which is not a plain file name: download it again.",
                code="unsafe",
                key=str(index),
            )
    return files


def _read_header(path: Path) -> dict[str, _Stored]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > min(size, _HEADER_BYTES):
                raise _broken(path, f"a header of {length} bytes")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        start = _LENGTH_BYTES + length
        stored = {name: _stored(path, start, name, entry) for name, entry in header.items()}
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _broken(path, error) from None
    end = max((tensor.offset + tensor.spec.nbytes for tensor in stored.values()), default=start)
    if end > size:
        raise _broken(path, f"it has {size} of {end} bytes")
    return stored


def _stored(path: Path, start: int, name: str, entry: Mapping[str, Any]) -> _Stored:
    begin, end = entry["data_offsets"]
    # Python would accept 64.0 or true as a size; `type` rejects both.
    if not all(type(number) is int and 0 <= number < _SIZE_END for number in (begin, end, *entry["shape"])):
        raise ValueError(f"{name} has an invalid size")
    spec = TensorSpec(name, DTYPES[entry["dtype"]], tuple(entry["shape"]))
    if end - begin != spec.nbytes:
        raise ValueError(f"{name} has {end - begin} bytes, but its shape needs {spec.nbytes}")
    return _Stored(spec, path, start + begin)


def _broken(file: Path, reason: object) -> UserError:
    return UserError(
        f"{file} is not a whole safetensors file ({reason}): download it again.", code="malformed", key=str(file)
    )


def unreadable(file: Path, error: OSError) -> UserError:
    """Return the UserError for a file that the operating system cannot read."""
    kinds: dict[type[OSError], Code] = {FileNotFoundError: "not_found", PermissionError: "denied"}
    return UserError(
        f"{file} cannot be read ({error.strerror}): make it readable, or download it again.",
        code=kinds.get(type(error), "malformed"),
        key=str(file),
    )
