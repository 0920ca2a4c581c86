"""Tensors inside what `torch.save` wrote: found without reading them, then read one at a time.

A checkpoint is untrusted: what is not a tensor, a plain value or on the list that the caller gives is refused, and
nothing that it names is ever called. What is on the list becomes an `Inert` object and is not imported either.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from rlsys.errors import UserError
from rlsys.weights.hf_io import map_bytes

_BEFORE_ZIP = pickle.dumps(torch.serialization.MAGIC_NUMBER, protocol=2)
"""How files began that were no archives yet."""


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
    offset: int
    """Bytes from the start of the file to its first element."""
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
        count = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)) + 1
        itemsize = self.dtype.itemsize
        take = _copy_bytes if self.offset % itemsize else map_bytes
        try:
            flat = take(self.file, self.offset, count * itemsize)
        except OSError as error:
            raise UserError(f"{self.file} cannot be read ({error.strerror}); complete the checkpoint.") from error
        except ValueError as error:
            raise UserError(f"{self.file} is cut short; complete the checkpoint, or copy it again.") from error
        return flat.view(self.dtype).as_strided(self.shape, self.stride)


def _copy_bytes(file: Path, offset: int, nbytes: int) -> Tensor:
    """See `map_bytes`. Takes half the memory of a map that is then copied."""
    buffer = torch.empty(nbytes, dtype=torch.uint8)
    view, done = buffer.numpy().data, 0
    with file.open("rb", buffering=0) as stream:
        stream.seek(offset)
        while done < nbytes and (got := stream.readinto(view[done:])):
            done += got
    if done < nbytes:
        raise ValueError(f"{file} ends {nbytes - done} bytes too soon")
    return buffer


def find_tensors(
    file: Path, stream: IO[bytes], start: int = 0, is_inert: Callable[[str], bool] = lambda _: False
) -> tuple[Any, Callable[[Tensor], OnDisk]]:
    """What `torch.save` wrote to `stream`, with tensors that have no data, and where such a tensor lies.

    `stream` begins `start` bytes into `file`. `is_inert` says of the full name of a class or function whether objects
    made with it are tolerated, as `Inert` ones. Raises UserError if it is damaged or asks for anything else.
    """
    begins = stream.read(len(_BEFORE_ZIP))
    stream.seek(0)
    if begins == _BEFORE_ZIP:
        raise UserError(
            f"{file} was written by a torch before 1.6, or as that did, which is not read here; load it with torch and "
            "save it again."
        )
    try:
        named = get_unsafe_globals_in_checkpoint(stream)
        refused = sorted(name for name in named if not is_inert(name))
        if refused:
            raise UserError(
                f"{file} asks for {refused[0]}, which no checkpoint of weights needs; it is not read, for it could "
                "run code. Use a checkpoint from a source that you trust."
            )
        stream.seek(0)
        with safe_globals([(Inert, name) for name in named]):
            loaded = torch.load(stream, map_location="meta", weights_only=True)
    except (
        RuntimeError,
        ValueError,
        EOFError,
        OSError,
        pickle.UnpicklingError,
        TypeError,
        KeyError,
    ) as error:
        raise UserError(f"{file} is damaged or cut short; complete the checkpoint, or copy it again.") from error

    def locate(tensor: Tensor) -> OnDisk:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise UserError(f"{file} has a sparse or quantised tensor, which is not read; give another checkpoint.")
        storage: Any = tensor.untyped_storage()
        offset = start + storage._checkpoint_offset + tensor.storage_offset() * tensor.dtype.itemsize
        return OnDisk(file, offset, tuple(tensor.shape), tensor.stride(), tensor.dtype)

    return loaded, locate
