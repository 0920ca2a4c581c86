"""Which machine of how many this one is, and where the first one is: from flags, else from the environment. Pure.

Known environments: torchrun's and Kubernetes' names (NODE_RANK, GROUP_RANK or RANK; NNODES or WORLD_SIZE; MASTER_ADDR
and MASTER_PORT, with one process a machine) and Slurm's. A flag goes before all of them, and what names nodes
before what names processes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlsys.errors import UserError

DEFAULT_PORT = 6379
_RANKS = ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX", "RANK")
_NODES = ("NNODES", "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "WORLD_SIZE")
_LISTED = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")


@dataclass(frozen=True, slots=True)
class Role:
    """This machine among those of a run."""

    rank: int
    nodes: int
    host: str
    """Name or address of the first machine; empty where it is the only one and may choose."""
    port: int
    """Of Ray there."""
    names: tuple[str, ...] = ()
    """Host names of all, by rank, where the environment tells them."""

    @property
    def leads(self) -> bool:
        """Whether this machine is the one that the others come to."""
        return self.rank == 0

    def describe(self, rank: int) -> str:
        """A machine by its rank, and by its name where that is known."""
        return f"node {rank} ({self.names[rank]})" if rank < len(self.names) else f"node {rank}"


def find_role(
    environment: Mapping[str, str],
    wanted: int,
    *,
    rank: int | None = None,
    nodes: int | None = None,
    head: str | None = None,
) -> Role:
    """The role that flags and environment give. `wanted` machines is what the config says.

    Raises UserError where something is missing, is no number, or does not fit together.
    """
    names = _listed(environment)
    nodes = nodes if nodes is not None else _number(environment, _NODES)
    nodes = machine_count(nodes, wanted)
    rank = rank if rank is not None else _number(environment, _RANKS)
    if rank is None and nodes > 1:
        raise UserError(
            f"--rank: which of the {nodes} machines is this? Give --rank 0 on the head and "
            f"{'--rank 1 on the other' if nodes == 2 else f'--rank 1 to {nodes - 1} on the others'}, "
            f"or set one of {', '.join(_RANKS)}."
        )
    rank = rank or 0
    if not 0 <= rank < nodes:
        raise UserError(f"--rank {rank} is not a machine of --nodes {nodes}: ranks go from 0 to {nodes - 1}.")
    host, port = _head(head, environment, names)
    if not host and nodes > 1:
        raise UserError(
            "--head: where is the machine of rank 0? Give --head HOST[:PORT] on every machine, or set MASTER_ADDR."
        )
    return Role(rank, nodes, host, port, names)


def machine_count(given: int | None, wanted: int) -> int:
    """How many machines there will be: as many as are given, else as the config wants. Raises UserError for fewer."""
    if given is not None and given < wanted:
        raise UserError(
            f"--nodes {given} is fewer than cluster.nodes={wanted}: start as many, or take a config for fewer."
        )
    return wanted if given is None else given


def _head(head: str | None, environment: Mapping[str, str], names: Sequence[str]) -> tuple[str, int]:
    if head is not None:
        _refuse_ipv6(f"--head {head}", head)
        found = re.fullmatch(r"(?P<host>[^:]+)(:(?P<port>\d+))?", head)
        if found is None:
            raise UserError(f"--head {head} is not HOST or HOST:PORT.")
        port = int(found["port"] or DEFAULT_PORT)
        if not 0 < port < 65536:
            raise UserError(f"--head {head}: a port is from 1 to 65535.")
        return found["host"], port
    if environment.get("MASTER_ADDR"):
        _refuse_ipv6(f"MASTER_ADDR={environment['MASTER_ADDR']}", environment["MASTER_ADDR"])
        return environment["MASTER_ADDR"], _number(environment, ("MASTER_PORT",)) or DEFAULT_PORT
    return (names[0] if names else ""), DEFAULT_PORT


def _refuse_ipv6(given: str, host: str) -> None:
    if host.count(":") > 1:
        raise UserError(
            f"{given} is an IPv6 address, and machines meet over IPv4: give the machine's name or its IPv4 address."
        )


def _number(environment: Mapping[str, str], variables: Sequence[str]) -> int | None:
    """Of the first variable that is set."""
    for variable in variables:
        if text := environment.get(variable):
            if not text.isdigit():
                raise UserError(f"{variable}={text} in the environment is not a number: set it right, or unset it.")
            return int(text)
    return None


def _listed(environment: Mapping[str, str]) -> tuple[str, ...]:
    found = next((environment[name] for name in _LISTED if environment.get(name)), "")
    return tuple(expand_hosts(found))


def expand_hosts(listed: str) -> Iterator[str]:
    """Host names of Slurm's short form: `gpu[01-03,7],login` is gpu01, gpu02, gpu03, gpu7 and login."""
    for part in re.findall(r"(?:[^,\[]|\[[^]]*\])+", listed):
        yield from _expanded(part)


def _expanded(part: str) -> Iterator[str]:
    prefix, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    inner, _, suffix = rest.partition("]")
    for piece in inner.split(","):
        first, _, last = piece.partition("-")
        for number in range(int(first), int(last or first) + 1):
            for tail in _expanded(suffix):
                yield f"{prefix}{number:0{len(first)}d}{tail}"
