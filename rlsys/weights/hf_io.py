"""Safetensors, in and out, one tensor at a time: the files of a Hugging Face model folder.

Reading maps a tensor into memory by itself, and writing streams, so neither holds more than one tensor: the library's
own map of a whole file counts as memory of the process as it is read, and its writer takes all tensors of a file at
once. A written file appears under its final name only when it is complete.

Format: 8 bytes with the length of the header, little endian; the header, JSON by tensor name of dtype, shape and
[begin, end) in what follows; the tensors' bytes, row-major, without gaps
(https://huggingface.co/docs/safetensors/index#format).
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
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsys.errors import Code, UserError
from rlsys.weights.transport import bytes_of, checksum, write_all
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
"""Safetensors' name of each dtype."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH_BYTES, _ALIGNMENT = 8, 8
_HEADER_BYTES = 100_000_000  # A longer header the library refuses too: it would be read whole.
_SIZE_END = 1 << 63
_MOST_TENSORS = 1 << 18  # In a folder, with each expert by itself: more than any model has, and few to count.
_STACKED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")
_MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Experts in one tensor [experts, rows, columns], as transformers 5 holds them: its matrices, row below row."""
_POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14, which Python does not name: map all pages at once, a third faster."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What is known of a tensor before it is read or written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor lies."""

    spec: TensorSpec
    file: Path
    offset: int  # Bytes from the start of the file.


class HfReader:
    """Reads tensors, also experts of a stack, by name from safetensors files in a folder. May be pickled."""

    def __init__(self, path: str | Path) -> None:
        """Reads the headers. Raises UserError if `path` holds no safetensors, or a file is damaged."""
        folder = Path(path)
        index = folder / INDEX
        files = sorted(folder.glob("*.safetensors"))
        if not files and not index.is_file():
            raise UserError(
                f"{folder} holds no safetensors; give a folder with a Hugging Face checkpoint.",
                code="empty" if folder.is_dir() else "not_found",
                key=str(folder),
            )
        every = (named for file in files for named in _read_header(file).items())
        self._stored = _once(_indexed(folder, index) if index.is_file() else every)

    def names(self) -> set[str]:
        """Every tensor in the folder."""
        return set(self._stored)

    def spec(self, name: str) -> TensorSpec:
        """What one tensor is, without reading it. KeyError if there is none."""
        return self._stored[name].spec

    def files(self) -> list[Path]:
        """The files that hold tensors, in order."""
        return sorted({stored.file for stored in self._stored.values()})

    def get(self, name: str) -> Tensor:
        """One tensor, on the CPU, in the dtype it is stored in: the file's own bytes, mapped for as long as it lives.

        Raises KeyError if there is none, UserError if the file cannot be read any more, or has become shorter.
        """
        stored = self._stored[name]
        spec = stored.spec
        if not spec.nbytes:
            return torch.empty(spec.shape, dtype=spec.dtype)
        try:
            flat = map_bytes(stored.file, stored.offset, spec.nbytes)
        except OSError as error:
            raise unreadable(stored.file, error) from error
        except ValueError as error:
            raise UserError(
                f"{stored.file} has become shorter than it was; get it again.", code="malformed", key=str(stored.file)
            ) from error
        if stored.offset % spec.dtype.itemsize:
            flat = flat.clone()
        return flat.view(spec.dtype).view(spec.shape)


def map_bytes(file: Path, offset: int, nbytes: int) -> Tensor:
    """[nbytes] uint8: that part of a file, mapped; writing changes no file. Raises ValueError if it is shorter, OSError."""
    begin = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    lead = offset - begin
    with file.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), lead + nbytes, access=mmap.ACCESS_COPY, offset=begin)
    with suppress(OSError, ValueError):
        mapped.madvise(_POPULATE_READ)
    return torch.frombuffer(mapped, dtype=torch.uint8, count=nbytes, offset=lead)


def check_repeated(reader: HfReader, weights: WeightMap, source: str | Path) -> None:
    """Raise UserError unless what `source` holds twice is alike to the bit: only one of the two is used."""
    for again, name in weights.repeated.items():
        if again in reader.names() and checksum("", reader.get(again)) != checksum("", reader.get(name)):
            raise UserError(
                f"{source} has {again} with other numbers than {name}, and they would be lost, for its config.json "
                "says that the two are one (tie_word_embeddings); correct that, or use weights and config of one model.",
                code="mismatch",
                key=again,
            )


def write_safetensors(path: Path, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write the file `path` with the tensors that `specs` announces, which `tensors` gives in that order.

    Larger dtypes should come first, so that every tensor lies where its dtype can be read in place. Raises ValueError for
    tensors that were not announced so.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb", buffering=0) as file:
            write_all(file, _header(specs))
            given = iter(tensors)
            for spec in specs:
                name, tensor = next(given, ("", torch.empty(0)))
                if (name, tensor.dtype, tuple(tensor.shape)) != (spec.name, spec.dtype, spec.shape):
                    raise ValueError(
                        f"{path.name} was to hold {spec}, and got {name or 'nothing'}, {tensor.dtype}, "
                        f"{tuple(tensor.shape)}."
                    )
                write_all(file, bytes_of(tensor).data)
                del tensor
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def file_bytes(specs: Sequence[TensorSpec]) -> int:
    """Size of the file that `write_safetensors` writes."""
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
    """Each tensor by its name. Raises UserError if two have the same."""
    stored: dict[str, _Stored] = {}
    for name, tensor in (named for item in found for named in _by_expert(*item)):
        if name in stored:
            raise UserError(
                f"{stored[name].file} and {tensor.file} both hold {name}, and nothing says which counts; move the one "
                "that does not belong to the model away.",
                code="conflict",
                key=name,
            )
        if len(stored) == _MOST_TENSORS:
            raise _broken(tensor.file, f"with it the model has more than {_MOST_TENSORS:,} tensors")
        stored[name] = tensor
    return stored


def _by_expert(name: str, stored: _Stored) -> Iterator[tuple[str, _Stored]]:
    """A stack of experts as the tensors of each, which lie in it one after the other; another tensor as it is."""
    spec, stack = stored.spec, _STACKED.fullmatch(name)
    matrices = _MATRICES[stack[2]] if stack else ()
    if not stack or len(spec.shape) != 3 or not spec.nbytes or spec.shape[1] % len(matrices):
        yield name, stored
        return
    experts, rows, columns = spec.shape
    for number, (expert, matrix) in enumerate(product(range(experts), matrices)):
        part = f"{stack[1]}.{expert}.{matrix}.weight"
        alone = TensorSpec(part, spec.dtype, (rows // len(matrices), columns))
        yield part, replace(stored, spec=alone, offset=stored.offset + number * alone.nbytes)


def _indexed(folder: Path, index: Path) -> Iterator[tuple[str, _Stored]]:
    file_of = _weight_map(index)
    if (folder / SINGLE).is_file() and SINGLE not in file_of.values():
        raise UserError(
            f"{folder} has {SINGLE}, which {INDEX} does not name, and programs differ in which they read; move the "
            "one that does not belong to the model away.",
            code="conflict",
            key=str(folder),
        )
    headers: dict[str, dict[str, _Stored]] = {}
    for name, file in file_of.items():
        if file not in headers:
            if not (folder / file).exists():
                raise UserError(
                    f"{folder / file} is named in {INDEX} but is not there; complete the checkpoint.",
                    code="not_found",
                    key=str(folder / file),
                )
            headers[file] = _read_header(folder / file)
        if name not in headers[file]:
            raise UserError(
                f"{folder / file} does not hold {name}, as {INDEX} says; get both again.",
                code="mismatch",
                key=str(folder / file),
            )
        yield name, headers[file][name]


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, as a plain name within the folder."""
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = dict(found.items())
    except OSError as error:
        raise unreadable(index, error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{index} is damaged; get it again.", code="malformed", key=str(index)) from None
    for name, file in files.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise UserError(
                f"{index} says that {name} is in {file}, which is no file beside it; get it again.",
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
        raise _broken(path, f"it has {size} bytes of {end}")
    return stored


def _stored(path: Path, start: int, name: str, entry: Mapping[str, Any]) -> _Stored:
    begin, end = entry["data_offsets"]
    # What JSON calls 64.0 or true is no size, though Python would count with it.
    if not all(type(number) is int and 0 <= number < _SIZE_END for number in (begin, end, *entry["shape"])):
        raise ValueError(f"{name} has a size that is none")
    spec = TensorSpec(name, DTYPES[entry["dtype"]], tuple(entry["shape"]))
    if end - begin != spec.nbytes:
        raise ValueError(f"{name} does not have the bytes of its shape")
    return _Stored(spec, path, start + begin)


def _broken(file: Path, reason: object) -> UserError:
    return UserError(f"{file} is no whole safetensors file ({reason}); get it again.", code="malformed", key=str(file))


def unreadable(file: Path, error: OSError) -> UserError:
    """Make the error for a file that the system does not let be read."""
    kinds: dict[type[OSError], Code] = {FileNotFoundError: "not_found", PermissionError: "denied"}
    return UserError(
        f"{file} cannot be read ({error.strerror}); make it readable, or get it again.",
        code=kinds.get(type(error), "malformed"),
        key=str(file),
    )
