"""The machines of the Ray cluster that this process has joined, in the order of their node ranks.

A machine that `rlsys launch` has brought has a resource that names its rank. One that came otherwise has
none: then the head is the first, and the others follow in the order of their host names.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlsys.cluster.connecting import connect

RANK = "rlsys-node-"
"""How the resource begins whose name ends with a machine's rank."""
_HEAD = "node:__internal_head__"


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine of the cluster."""

    rank: int | None
    """That it was brought with; None if it came otherwise."""
    host: str
    address: str
    node_id: str
    """Ray's name of it."""
    resource: str
    """That this machine alone has, 1 of it."""
    devices: Mapping[str, float]
    """CPU and GPU slots."""

    def __str__(self) -> str:
        return f"{self.host} ({self.address})"


@contextlib.contextmanager
def joined(address: str) -> Iterator[None]:
    """Be a member of the Ray cluster at `address`."""
    connect(address=address)
    try:
        yield
    finally:
        ray.shutdown()


def machines() -> list[Machine]:
    """Those that are alive, in order."""
    return _in_order(node for node in ray.nodes() if node["Alive"])


def lost(known: Sequence[Machine]) -> list[Machine]:
    """Those of `known` that the cluster has given up."""
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return [machine for machine in known if machine.node_id not in alive]


def resident(shell: type, machine: Machine, log: Path, environment: Mapping[str, str]) -> Any:
    """A handle to a new process of the shell class on `machine`, which takes up no device."""
    options = {
        "num_cpus": 0,
        "max_restarts": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(machine.node_id, soft=False),
        "runtime_env": {"env_vars": dict(environment)},
    }
    return ray.remote(shell).options(**options).remote(str(log), list(sys.path))


def _in_order(nodes: Iterator[dict[str, Any]]) -> list[Machine]:
    found = [(_machine(node), _HEAD in node["Resources"]) for node in nodes]
    ranked = any(machine.rank is not None for machine, _ in found)

    def place(item: tuple[Machine, bool]) -> tuple[float | bool, list[tuple[int, str]]]:
        machine, head = item
        first = (float("inf") if machine.rank is None else machine.rank) if ranked else not head
        return first, natural(machine.host)

    return [machine for machine, _ in sorted(found, key=place)]


def _machine(node: Mapping[str, Any]) -> Machine:
    resources: Mapping[str, float] = node["Resources"]
    ranks = [int(name.removeprefix(RANK)) for name in resources if name.startswith(RANK)]
    address = node["NodeManagerAddress"]
    return Machine(
        rank=ranks[0] if ranks else None,
        host=node["NodeManagerHostname"],
        address=address,
        node_id=node["NodeID"],
        resource=f"{RANK}{ranks[0]}" if ranks else f"node:{address}",
        devices={name: resources.get(name, 0.0) for name in ("CPU", "GPU")},
    )


def natural(name: str) -> list[tuple[int, str]]:
    """A key by which node-2 comes before node-10."""
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", name)]
