"""Devices of the processes of a group, also of processes that join a run later or whose machine is lost.

A process has a slot in the run's bundles. A process with a higher number, or whose bundle is tied to a machine that is
lost, gets a bundle of its own, which Ray places as soon as a machine has free devices, also one that joins the cluster
later. Ray places a lost bundle that is not tied to a machine again by itself.

A Ray of this run's own without GPUs has as many slots as the run has processes. More processes may join it without a bundle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from rlsys.cluster.planning.placement import DeviceSlot
from rlsys.cluster.runtime import RESOURCE, SLIVER, Machine, machines, machines_of
from rlsys.config.schema import ClusterConfig, Device


class Seats:
    """Finds the devices of each process of one group. Calls ask Ray, which blocks: see `runtime.answer`."""

    def __init__(
        self, bundles: PlacementGroup, slots: Sequence[DeviceSlot], cluster: ClusterConfig, near: int | None = None
    ) -> None:
        """`near` is a bundle on whose machine all processes must be; None if they may be on any machine."""
        self._bundles, self._slots, self._cluster, self._near = bundles, tuple(slots), cluster, near
        self._own: dict[int, PlacementGroup] = {}
        """Number of a process -> its own bundle, which may have no machine yet."""

    @property
    def planned(self) -> int:
        """Number of processes that the run's bundles are for."""
        return len(self._slots)

    @property
    def unreserved(self) -> bool:
        """True if more processes may join without devices of Ray."""
        return self._cluster.address is None and self._cluster.device is Device.cpu

    def of(self, number: int) -> tuple[PlacementGroup | None, DeviceSlot]:
        """Return the bundles of a process and its slot in them; without bundles, the process reserves nothing."""
        devices = len(self._slots[0].devices)
        if number < self.planned and number not in self._own:
            return self._bundles, self._slots[number]
        return self._own.get(number), DeviceSlot(0, tuple(range(devices)), float(devices), pinned=False)

    def find(self, number: int) -> bool:
        """Return True if a process has devices on a machine that lives. Ray is asked for some if it has none."""
        return self.find_all([number])[number]

    def find_all(self, numbers: Iterable[int]) -> dict[int, bool]:
        """Return the answer of `find` for each process. Ray's machines and the run's bundles are read once."""
        alive = machines()
        placed = machines_of(self._bundles, alive)
        return {number: self._find(number, alive, placed) for number in numbers}

    def stranded(self) -> list[int]:
        """Return the planned processes whose devices are tied to a machine that is lost."""
        if self._cluster.nodes == 1:
            return []
        placed = machines_of(self._bundles, machines())
        return [number for number, slot in enumerate(self._slots) if slot.bundle not in placed]

    @property
    def asked_for(self) -> tuple[int, ...]:
        """Processes for which `find` has asked Ray, placed or not."""
        return tuple(self._own)

    def release(self, number: int) -> None:
        """Give back the devices that only this process has, if any."""
        own = self._own.pop(number, None)
        if own is not None:
            remove_placement_group(own)

    def release_all(self) -> None:
        """Give back the devices that `find` has asked for."""
        for number in tuple(self._own):
            self.release(number)

    def _find(self, number: int, alive: Sequence[Machine], placed: Mapping[int, Machine]) -> bool:
        planned = number < self.planned
        own = self._own.get(number)
        if own is not None and 0 in machines_of(own, alive):
            return True  # Also if its planned machine is back: Ray would kill the process with its bundle.
        if planned and self._slots[number].bundle in placed:
            self.release(number)
            return True
        if own is not None:
            return False
        if not planned and self.unreserved:
            return True
        if not planned or self._cluster.nodes > 1:
            self._own[number] = placement_group([self._shape(placed)], strategy="PACK")
        return False

    def _shape(self, placed: Mapping[int, Machine]) -> dict[str, float]:
        shape = {RESOURCE[self._cluster.device]: float(len(self._slots[0].devices))}
        near = None if self._near is None else placed.get(self._near)
        return shape if near is None else shape | {near.resource: SLIVER}
