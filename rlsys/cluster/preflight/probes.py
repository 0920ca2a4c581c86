"""What the checks ask of the machine and of what it can reach, so that they can be asked of another one in tests.

Contract: no probe starts anything that stays, and each ends by itself: within a minute at most it answers or
raises `Unseen`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlsys.config.schema import SearchConfig
from rlsys.observe.capabilities import Capabilities


class Unseen(Exception):
    """A probe has no answer; one phrase says why."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card that this process may use."""

    index: int
    uuid: str
    name: str
    total_gib: float
    used_gib: float


@dataclass(frozen=True, slots=True)
class Tenant:
    """A process that computes on a card."""

    uuid: str
    """Of the card."""
    pid: int
    name: str
    used_gib: float


@dataclass(frozen=True, slots=True)
class Gpus:
    """The cards of this machine that CUDA_VISIBLE_DEVICES leaves, and who is on them."""

    driver: str
    cards: tuple[Gpu, ...]
    tenants: tuple[Tenant, ...] = ()


@dataclass(frozen=True, slots=True)
class Disk:
    """The file system that a path is, or will be, on."""

    folder: Path
    """The nearest folder that is there."""
    total_gib: float
    free_gib: float
    writable: bool


@dataclass(frozen=True, slots=True)
class RayNode:
    """A machine of a Ray cluster that is alive."""

    address: str
    resources: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RayCluster:
    """A Ray cluster that this process could join."""

    nodes: tuple[RayNode, ...]
    free: Mapping[str, float]
    """What nobody has reserved, of all nodes together."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one search server made of a question."""

    url: str
    passages: int
    error: str = ""
    """Why there is no answer; one phrase."""


class Probes(Protocol):
    """The machine that a run is to start from."""

    def gpus(self) -> Gpus:
        """Raises Unseen where the driver gives no answer."""

    def capabilities(self) -> Capabilities:
        """What is installed, and what torch sees."""

    def version(self, package: str) -> str | None:
        """Of an installed package; None is absent."""

    def disk(self, path: Path) -> Disk:
        """Where `path` is or will be. Raises Unseen."""

    def memory_gib(self) -> float:
        """Host memory that is free."""

    def interfaces(self) -> Mapping[str, Sequence[str]]:
        """Addresses of each network interface that is up."""

    def variable(self, name: str) -> str | None:
        """Of the environment."""

    def port_is_free(self, port: int) -> bool:
        """Whether a server could listen there, on all interfaces."""

    def ray(self, address: str) -> RayCluster:
        """The cluster at `address`. Raises Unseen where it cannot be joined."""

    def search(self, settings: SearchConfig, question: str) -> tuple[Answer, ...]:
        """What `url` and each of `replicas` answers."""

    def search_differs(self, settings: SearchConfig) -> str:
        """In what the servers are no replicas of each other; empty where they are."""
