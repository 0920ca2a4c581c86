"""Which worker processes share which devices, as bundles to reserve and seats in them. Pure.

A bundle is what one machine reserves as a whole. Ranks that one process holds together are in one bundle,
and so are all processes that hold one of its ranks; ranks that nothing ties together are apart. Bundles
stand in the order of their lowest ranks, so groups lie on a cluster as the placement says.

Ray gives a process a share of one device of the bundle, of its own choice: right where the bundle has one
device, wrong where it has several that are shared, since two processes may then land on the same one. The
seats of such a bundle are `pinned`: their devices are named, and Ray is asked for none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import floor

Ranks = tuple[int, ...]
RESOLUTION = 10_000
"""Ray counts devices in ten-thousandths, and rounds: 6 x 1/6 would be more than 1."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Where one worker process sits."""

    bundle: int
    devices: tuple[int, ...]
    """Which of the bundle's devices it works on, from 0."""
    share: float
    """Devices that it takes up; those of all seats of a bundle sum to the bundle's size, or just below."""
    pinned: bool
    """Whether its devices must be named, because Ray could choose others."""


@dataclass(frozen=True, slots=True)
class Seating:
    """Bundles, and the seats of every group in the order of its worker ranks."""

    sizes: tuple[int, ...]
    """Devices of each bundle."""
    seats: Mapping[str, tuple[Seat, ...]]


def plan_bundles(holdings: Mapping[str, Sequence[Ranks]]) -> Seating:
    """Seats for processes that hold the device ranks `holdings[group][process]`, shared or not."""
    held = [ranks for processes in holdings.values() for ranks in processes]
    holders = Counter(rank for ranks in held for rank in ranks)
    bundles = _tied_together(held)
    bundle_of = {rank: number for number, ranks in enumerate(bundles) for rank in ranks}

    def seat(ranks: Ranks) -> Seat:
        number = bundle_of[ranks[0]]
        bundle = bundles[number]
        alone = all(holders[rank] == 1 for rank in bundle)
        share = sum(1 / holders[rank] for rank in ranks)
        return Seat(
            bundle=number,
            devices=tuple(bundle.index(rank) for rank in ranks),
            share=floor(share * RESOLUTION) / RESOLUTION,
            pinned=len(bundle) > 1 and not alone,
        )

    return Seating(
        sizes=tuple(map(len, bundles)),
        seats={group: tuple(map(seat, processes)) for group, processes in holdings.items()},
    )


def _tied_together(held: Iterable[Ranks]) -> list[Ranks]:
    """The finest partition of all ranks in which each of `held` lies within one part; in order."""
    parts: list[set[int]] = []
    for ranks in held:
        touched = [part for part in parts if part & set(ranks)]
        parts = [part for part in parts if part not in touched]
        parts.append(set(ranks).union(*touched))
    return sorted(tuple(sorted(part)) for part in parts)
