"""Whether a distributed checkpoint can be loaded: all of it is there, it is whole, and nothing in it could run code.

Megatron and torch unpickle the metadata, and the objects that lie among the tensors, with trust. So what they read is
read here before, by readers that make nothing but plain values, tensors and classes that torch's `weights_only` allows
(to which Megatron adds some of its own when it is imported).
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.utils._pytree import tree_leaves

from rlsys.errors import UserError
from rlsys.weights.checkpoint.keys import LAYER_STATE
from rlsys.weights.checkpoint.on_disk import find_tensors
from rlsys.weights.checkpoint.torch_dist import BACKEND, COMMON, METADATA, check_place, read_metadata


def require_sound(folder: Path) -> None:
    """Raise UserError, which names the file, unless `folder` holds a checkpoint that can be loaded without danger.

    Of tensors only their places are looked at, not what they hold.
    """
    for name in (BACKEND, COMMON, METADATA):
        if not (folder / name).is_file():
            raise _unsound(folder / name, "is missing")
    try:
        json.loads((folder / BACKEND).read_text())
    except (ValueError, RecursionError):
        raise _unsound(folder / BACKEND, "is damaged") from None
    found = read_metadata(folder / METADATA)
    _require_whole(folder, found)
    with (folder / COMMON).open("rb") as stream:
        find_tensors(folder / COMMON, stream)
    seen = set()
    for key, file, content in _objects(folder, found):
        # Most layers have the same one.
        known = (LAYER_STATE in key, blake2b(content).digest())
        if known not in seen:
            held, _ = find_tensors(file, io.BytesIO(content))
            if LAYER_STATE in key and any(isinstance(leaf, Tensor) and leaf.numel() for leaf in tree_leaves(held)):
                raise UserError(
                    f"{file} holds {key}, which Transformer Engine would unpickle; it is not read, for it could run "
                    "code. Use a checkpoint that was saved without FP8."
                )
            seen.add(known)


def _require_whole(folder: Path, found: Metadata) -> None:
    ends: dict[str, int] = {}
    for index, place in found.storage_data.items():
        check_place(place, index.fqn)
        end = max(ends.get(place.relative_path, 0), place.offset + place.length)
        ends[place.relative_path] = end
    for name, end in ends.items():
        file = folder / name
        if not file.is_file():
            raise _unsound(file, "is missing")
        if file.stat().st_size < end:
            raise _unsound(file, f"was cut short, to {file.stat().st_size} bytes")


def _objects(folder: Path, found: Metadata) -> Iterator[tuple[str, Path, bytes]]:
    """What is no tensor: its key, the file that it is in, and its bytes."""
    for index, place in found.storage_data.items():
        if not isinstance(found.state_dict_metadata.get(index.fqn), TensorStorageMetadata):
            file = folder / place.relative_path
            with file.open("rb") as stream:
                stream.seek(place.offset)
                yield index.fqn, file, stream.read(place.length)


def _unsound(file: Path, what: str) -> UserError:
    return UserError(f"{file} {what}: take an earlier checkpoint.")
