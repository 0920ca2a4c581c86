"""Whether two folders hold the same model: names, shapes, dtypes, checksums, and what they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rlsys.apps.convert.logits import LogitsCheck, check_logits, not_computed, too_large
from rlsys.weights.buckets import checksum
from rlsys.weights.convert.model_folder import name_of
from rlsys.weights.convert.sides import Side, open_side
from rlsys.weights.hf_io import TensorSpec

MISSING = "-"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not the same."""

    name: str
    """Of the Hugging Face tensor."""
    what: str
    """present, shape, dtype or bytes."""
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `verify` found."""

    tensors: int
    """Of both, by name."""
    nbytes: int
    """Of the first."""
    differences: tuple[Difference, ...]
    logits: LogitsCheck | None
    """None where they were not compared."""
    note: str
    """Why they were not; empty where they were, or nobody asked."""

    @property
    def same(self) -> bool:
        """Nothing differs."""
        return not self.differences and (self.logits is None or self.logits.same)


def verify(
    first: str | Path,
    second: str | Path,
    *,
    hf: str | Path | None = None,
    logits: bool = True,
    show: Callable[[int, int], None] | None = None,
) -> Verdict:
    """Compare two models, each a Hugging Face folder or a Megatron checkpoint.

    `hf` has the config of a Megatron checkpoint without one. Every byte is read, one Megatron tensor at a time;
    `show` gets the bytes that were, and those of both. Raises UserError.
    """
    config = None if hf is None else Path(hf)
    sides = open_side(Path(first), config), open_side(Path(second), config)
    specs = sides[0].specs(), sides[1].specs()
    for side in sides:
        side.check_repeated()
    sizes = [sum(spec.nbytes for spec in one.values()) for one in specs]
    counted = _counter(sum(sizes), show)
    sums = _checksums(sides[0], counted), _checksums(sides[1], counted)
    differences = tuple(_differences(specs, sums))
    check, note = None, ""
    if logits:
        note = _why_not(sides, differences)
        check = None if note else check_logits(*sides)
    return Verdict(len(specs[0].keys() | specs[1].keys()), sizes[0], differences, check, note)


def _why_not(sides: tuple[Side, Side], differences: tuple[Difference, ...]) -> str:
    if any(difference.what in ("present", "shape") for difference in differences):
        return "Logits were not compared: these are models of different shapes."
    return not_computed(sides) or too_large(sides[0])


def _counter(total: int, show: Callable[[int, int], None] | None) -> Callable[[int], None]:
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if show is not None:
            show(done, total)

    return count


def _checksums(side: Side, counted: Callable[[int], None]) -> dict[str, str]:
    sums = {}
    for name, tensor in side.tensors():
        sums[name] = checksum(name, tensor)
        counted(tensor.nbytes)
    return sums


def _differences(
    specs: tuple[dict[str, TensorSpec], dict[str, TensorSpec]], sums: tuple[dict[str, str], dict[str, str]]
) -> Iterator[Difference]:
    for name in sorted(specs[0].keys() | specs[1].keys()):
        one, other = specs[0].get(name), specs[1].get(name)
        if one is None or other is None:
            there = ("yes", MISSING) if other is None else (MISSING, "yes")
            yield Difference(name, "present", *there)
        elif one.shape != other.shape:
            yield Difference(name, "shape", str(list(one.shape)), str(list(other.shape)))
        elif one.dtype != other.dtype:
            yield Difference(name, "dtype", name_of(one.dtype), name_of(other.dtype))
        elif sums[0][name] != sums[1][name]:
            yield Difference(name, "bytes", sums[0][name], sums[1][name])
