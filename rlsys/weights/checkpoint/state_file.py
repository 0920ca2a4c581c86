"""Saves and loads a tree of frozen dataclasses as one file, without pickle: loading cannot run code.

Dataclasses, numpy arrays, enums, tuples, mappings, unions and scalars are encoded and decoded by their type hints. The
file is an `.npz` with one member for the tree (JSON) and one member per dtype, which joins all arrays of that dtype.

Invariants:
- A loaded value equals the saved value in bits (NaN and infinities included), dtype and order.
- Every loaded array owns its memory, so keeping one array does not keep the others in memory.
- A file appears under its name only when complete.
- Loading a file that is damaged or holds other types raises UserError.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from rlsys.errors import UserError, disk_error
from rlsys.files import open_atomically

_TREE = "tree"
KEY = "saved as"
ADDED = "added later"
"""Metadata key of a field that older files lack; the field needs a default."""
_SCALARS: Mapping[Any, tuple[type, ...]] = {
    bool: (bool, np.bool_),
    int: (int, np.integer),
    float: (float, int, np.floating, np.integer),
    str: (str,),
}
"""Type hint -> types accepted for it when saving."""
T = TypeVar("T")


def save_values(path: Path, value: Any) -> None:
    """Write the dataclass `value` to `path`. Raises TypeError for unsupported types, RunError if the write fails."""
    arrays = _Arrays()
    tree = json.dumps(_encoded(value, type(value), arrays), separators=(",", ":"))
    joined = {name: np.concatenate(found) for name, found in arrays.of_dtype.items()}
    members = {_TREE: np.frombuffer(tree.encode(), np.uint8), **joined}
    try:
        with open_atomically(path) as file:
            np.savez(file, allow_pickle=False, **members)
    except OSError as problem:
        raise disk_error(problem, path) from problem


def load_values(path: Path, kind: type[T]) -> T:
    """Return the value of type `kind` that `save_values` wrote to `path`.

    Raises UserError if the file is missing, damaged or holds something else.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            members = {name: file[name] for name in file.files}
        tree = json.loads(members.pop(_TREE).tobytes())
    except FileNotFoundError as problem:
        raise UserError(
            f"{path} does not exist: give a complete checkpoint.", code="not_found", key=str(path)
        ) from problem
    except Exception as problem:  # A damaged file can raise anything.
        raise UserError(
            f"{path} is damaged ({_first_line(problem)}): take an earlier checkpoint.", code="malformed", key=str(path)
        ) from problem
    try:
        loaded: T = _decoded(tree, kind, members)
    except (TypeError, ValueError, LookupError, AttributeError) as problem:
        raise UserError(
            f"{path} does not hold a {kind.__name__} that this version of rlsys can read ({_first_line(problem)}): "
            "take another checkpoint, or use the rlsys version that wrote it.",
            code="mismatch",
            key=str(path),
        ) from problem
    return loaded


class _Arrays:
    """Collects arrays to save, by dtype."""

    def __init__(self) -> None:
        self.of_dtype: dict[str, list[NDArray[Any]]] = defaultdict(list)
        self._lengths: dict[str, int] = defaultdict(int)

    def add(self, array: NDArray[Any]) -> dict[str, Any]:
        """Append `array`; return its location as JSON: member, index of its first value, shape."""
        if array.dtype.hasobject or array.dtype.names:
            raise TypeError(f"An array of {array.dtype} cannot be saved without pickle.")
        name = array.dtype.str
        start = self._lengths[name]
        self.of_dtype[name].append(array.ravel())
        self._lengths[name] += array.size
        return {"in": name, "from": start, "shape": list(array.shape)}


def _encoded(value: Any, hint: Any, arrays: _Arrays) -> Any:
    """Return `value`, of type `hint`, as JSON; its arrays go to `arrays`."""
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType):
        others = [other for other in inner if other is not NoneType]
        if value is None and NoneType in inner:
            return None
        if len(others) == 1:
            return _encoded(value, others[0], arrays)
        # A union of several classes needs the class name.
        kind = type(value)
        if kind not in others:
            raise TypeError(f"Expected one of {others}, got {kind.__name__}.")
        return {kind.__name__: _encoded(value, kind, arrays)}
    if origin is Any:
        return value
    if not isinstance(value, _SCALARS.get(origin, origin)):
        raise TypeError(f"Expected {origin.__name__}, got {type(value).__name__}.")
    if origin in _SCALARS:
        return origin(value)
    if origin is np.ndarray:
        return arrays.add(value)
    if issubclass(origin, Enum):
        return value.value
    if _is_record(origin):
        hints = _hints(origin)
        return {key: _encoded(getattr(value, name), hint, arrays) for key, (name, hint) in hints.items()}
    if issubclass(origin, Mapping):
        key, item = inner
        return [[_encoded(k, key, arrays), _encoded(v, item, arrays)] for k, v in value.items()]
    if origin is tuple:
        return [_encoded(item, of, arrays) for item, of in zip(value, _items(inner, len(value)), strict=True)]
    raise TypeError(f"Values of type {hint} cannot be saved.")


def _decoded(tree: Any, hint: Any, members: Mapping[str, NDArray[Any]]) -> Any:
    """Return the value of type `hint` that `tree` encodes."""
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType):
        named = {kind.__name__: kind for kind in inner if kind is not NoneType}
        if tree is None and NoneType in inner:
            return None
        (name,) = tree if len(named) > 1 else named
        return _decoded(tree[name] if len(named) > 1 else tree, named[name], members)
    if origin is Any:
        return tree
    if origin in _SCALARS:
        if type(tree) is not origin:
            raise TypeError(f"expected {origin.__name__}, got {tree!r}")
        return tree
    if origin is np.ndarray:
        start, shape = tree["from"], tree["shape"]
        return members[tree["in"]][start : start + int(np.prod(shape))].reshape(shape).copy()
    if issubclass(origin, Enum):
        return origin(tree)
    if _is_record(origin):
        hints = _hints(origin)
        added = {field.name for field in fields(origin) if field.metadata.get(ADDED)}
        if odd := (tree.keys() ^ hints.keys()) - (added - tree.keys()):
            raise TypeError(f"{sorted(odd)} are missing or unknown")
        return origin(
            **{name: _decoded(tree[key], hint, members) for key, (name, hint) in hints.items() if key in tree}
        )
    if issubclass(origin, Mapping):
        key, item = inner
        return {_decoded(k, key, members): _decoded(v, item, members) for k, v in tree}
    return tuple(_decoded(item, of, members) for item, of in zip(tree, _items(inner, len(tree)), strict=True))


def _items(inner: tuple[Any, ...], length: int) -> tuple[Any, ...]:
    """Return the hint of each item of a tuple."""
    return (inner[0],) * length if inner[1:] == (Ellipsis,) else inner


def _is_record(kind: Any) -> bool:
    """Return `is_dataclass(kind)` without its type narrowing, after which mypy would reject calling `kind`."""
    return is_dataclass(kind)


@cache
def _hints(kind: type[Any]) -> Mapping[str, tuple[str, Any]]:
    """Return key in the file -> (name, hint) for each field of the dataclass `kind`.

    `field(metadata={KEY: ...})` keeps the old key of a renamed field.
    """
    hints = get_type_hints(kind)
    return {field.metadata.get(KEY, field.name): (field.name, hints[field.name]) for field in fields(kind)}


def _first_line(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}".splitlines()[0]
