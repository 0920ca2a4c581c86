"""Plans which worker processes share which devices: bundles to reserve, and device slots in them. Pure.

A bundle is what one machine reserves as a whole. Ranks that one process holds together are in one bundle, and so are all
processes that hold one of its ranks; ranks that nothing ties together are apart. Bundles stand in the order of their
lowest ranks, so groups lie on a cluster as the placement says. On a cluster of several machines of known size a bundle is
all that is held of one machine: what the placement puts side by side is.

Ray gives a process a share of one device of the bundle, of its own choice: right where the bundle has one device, wrong
where it has several that are shared, since two processes may then land on the same one. The slots of such a bundle are
`pinned`: their devices are named, and Ray is asked for none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import floor

Ranks = tuple[int, ...]
RESOLUTION = 10_000  # Ray counts devices in ten-thousandths, and rounds: 6 x 1/6 would be more than 1.


@dataclass(frozen=True, slots=True)
class DeviceSlot:
    """The devices of one worker process."""

    bundle: int
    devices: tuple[int, ...]  # Which of the bundle's devices it works on, from 0.
    share: float  # Devices that it takes up; those of all slots of a bundle sum to the bundle's size, or just below.
    pinned: bool  # Whether its devices must be named, because Ray could choose others.


@dataclass(frozen=True, slots=True)
class BundlePlan:
    """Bundles, and the slots of every group in the order of its worker ranks."""

    sizes: tuple[int, ...]  # Devices of each bundle.
    machines: tuple[int, ...] | None
    """Number of each bundle's machine, which no other bundle is on; None where any machine may have it."""
    slots: Mapping[str, tuple[DeviceSlot, ...]]


def plan_bundles(holdings: Mapping[str, Sequence[Ranks]], per_machine: int | None = None) -> BundlePlan:
    """Plan slots for processes that hold the device ranks `holdings[group][process]`, shared or not.

    With `per_machine` devices, ranks 0 to `per_machine` - 1 are the first machine's, and so on; what one process
    holds must lie on one machine then.
    """
    held = [ranks for processes in holdings.values() for ranks in processes]
    holders = Counter(rank for ranks in held for rank in ranks)
    if per_machine is None:
        bundles = _tied_together(held)
    else:
        bundles = [tuple(here) for _, here in groupby(sorted(holders), lambda rank: rank // per_machine)]
    bundle_of = {rank: number for number, ranks in enumerate(bundles) for rank in ranks}

    def slot(ranks: Ranks) -> DeviceSlot:
        number = bundle_of[ranks[0]]
        bundle = bundles[number]
        devices = tuple(bundle.index(rank) for rank in ranks)
        share = floor(sum(1 / holders[rank] for rank in ranks) * RESOLUTION) / RESOLUTION
        return DeviceSlot(number, devices, share, len(bundle) > 1 and any(holders[rank] > 1 for rank in bundle))

    on = None if per_machine is None else tuple(ranks[0] // per_machine for ranks in bundles)
    slots = {group: tuple(map(slot, processes)) for group, processes in holdings.items()}
    return BundlePlan(tuple(map(len, bundles)), on, slots)


def _tied_together(held: Iterable[Ranks]) -> list[Ranks]:
    """The finest partition of all ranks in which each of `held` lies within one part; in order."""
    parts: list[set[int]] = []
    for ranks in held:
        touched = [part for part in parts if part & set(ranks)]
        parts = [part for part in parts if part not in touched]
        parts.append(set(ranks).union(*touched))
    return sorted(tuple(sorted(part)) for part in parts)
