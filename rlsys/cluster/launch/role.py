"""The run to launch, this machine's role in it, and the machines that serve searches. Pure.

Where flags do not say it, the environment does: torchrun's and Kubernetes' names (NODE_RANK, GROUP_RANK or RANK; NNODES
or WORLD_SIZE; MASTER_ADDR and MASTER_PORT, with one process a machine) and Slurm's. A flag goes before all of them, and
what names nodes before what names processes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlsys.cluster.local_ray import RAY_PORT
from rlsys.config.derived import needs_server
from rlsys.config.schema import RunConfig, SearchConfig
from rlsys.errors import UserError
from rlsys.search.address import TOKEN_VARIABLE

_RANKS = ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX", "RANK")
_NODES = ("NNODES", "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "WORLD_SIZE")
_LISTED = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")

Notify = Callable[[str], None]  # Takes a sentence on what the launcher does.


@dataclass(frozen=True, slots=True)
class LaunchTask:
    """A run to launch."""

    config: RunConfig
    name: str  # Of the config, as the command line gives it.
    overrides: tuple[str, ...]
    config_dir: Path | None
    preflight: bool  # Whether `rlsys doctor --for` decides if it is started.
    wait_s: float  # For all machines to come.

    def arguments(self, command: Sequence[str], settings: Sequence[str]) -> list[str]:
        """Arguments of `rlsys` for a `command` that ends with the config's option, with further `settings`."""
        folder = [] if self.config_dir is None else ["--config-dir", str(self.config_dir)]
        return [*command, self.name, *folder, *self.overrides, *settings]


@dataclass(frozen=True, slots=True)
class Role:
    """This machine among those of a run; the others come to the one of rank 0."""

    rank: int
    nodes: int
    host: str  # Name or address of the first machine; empty where it is the only one and may choose.
    port: int  # Of Ray there.
    names: tuple[str, ...] = ()  # Host names of all, by rank, where the environment tells them.

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
    """Find the role that flags and environment give. `wanted` machines is what the config says.

    Raises UserError where something is missing, is no number, or does not fit together.
    """
    listed = next((environment[name] for name in _LISTED if environment.get(name)), "")
    names = tuple(expand_hosts(listed))
    nodes = machine_count(_number(environment, _NODES) if nodes is None else nodes, wanted)
    rank = _number(environment, _RANKS) if rank is None else rank
    if rank is None and nodes > 1:
        raise UserError(
            f"--rank: which of the {nodes} machines is this? Give --rank 0 on the head and "
            f"{'--rank 1 on the other' if nodes == 2 else f'--rank 1 to {nodes - 1} on the others'}, "
            f"or set one of {', '.join(_RANKS)}.",
            code="missing",
            key="--rank",
        )
    rank = rank or 0
    if not 0 <= rank < nodes:
        raise UserError(
            f"--rank {rank} is not a machine of --nodes {nodes}: ranks go from 0 to {nodes - 1}.",
            code="out_of_range",
            key="--rank",
        )
    host, port = _head(head, environment, names)
    if not host and nodes > 1:
        raise UserError(
            "--head: where is the machine of rank 0? Give --head HOST[:PORT] on every machine, or set MASTER_ADDR.",
            code="missing",
            key="--head",
        )
    return Role(rank, nodes, host, port, names)


def machine_count(given: int | None, wanted: int) -> int:
    """Count the machines: as many as are given, else as the config wants. Raises UserError for fewer."""
    if given is None or given >= wanted:
        return given or wanted
    raise UserError(
        f"--nodes {given} is fewer than cluster.nodes={wanted}: start as many, or take a config for fewer.",
        code="conflict",
        key="--nodes",
    )


def expand_hosts(listed: str) -> Iterator[str]:
    """Host names of Slurm's short form: `gpu[01-03,7],login` is gpu01, gpu02, gpu03, gpu7 and login."""
    for part in re.findall(r"(?:[^,\[]|\[[^]]*\])+", listed):
        prefix, bracket, rest = part.partition("[")
        if not bracket:
            yield part
            continue
        inner, _, suffix = rest.partition("]")
        for item in inner.split(","):
            first, _, last = item.partition("-")
            for number in range(int(first), int(last or first) + 1):
                yield from (f"{prefix}{number:0{len(first)}d}{tail}" for tail in [*expand_hosts(suffix)] or [""])


def check_searching(config: RunConfig) -> None:
    """Raise UserError where servers are asked for that nobody would use."""
    nodes, url = config.cluster.search.nodes, config.search.url
    if nodes and needs_server(config.search) and url is not None:
        raise UserError(
            f"search.url={url} and cluster.search.nodes={nodes} both say who answers searches: leave one out.",
            code="conflict",
            key="cluster.search.nodes",
        )


def serving_positions(config: RunConfig, hosts: Sequence[tuple[int, str]]) -> list[int]:
    """Positions in `hosts`, of ranks and host names, of the machines of cluster.search.nodes, in the order there.

    Raises UserError for one that is not there.
    """
    # A host's own name may have its domain with it.
    names = [{str(rank), host, host.partition(".")[0]} for rank, host in hosts]
    positions = []
    for wanted in config.cluster.search.nodes if needs_server(config.search) else ():
        position = next((position for position, known in enumerate(names) if wanted in known), None)
        if position is None:
            there = ", ".join(f"{rank} ({host})" for rank, host in hosts)
            raise UserError(
                f"cluster.search.nodes: there is no machine {wanted} among {there}; give a rank or a host name.",
                code="unknown",
                key="cluster.search.nodes",
            )
        positions.append(position)
    return positions


def search_settings(
    search: SearchConfig, urls: Sequence[str], environment: Mapping[str, str] = os.environ
) -> list[str]:
    """Overrides by which a run asks the servers at `urls`, which take their token from the environment, if any."""
    replicas = ",".join(f"'{url}'" for url in urls[1:])
    settings = [f"search.url='{urls[0]}'", f"search.replicas=[{replicas}]"]
    if search.token_env is None and environment.get(TOKEN_VARIABLE):
        settings.append(f"search.token_env={TOKEN_VARIABLE}")
    return settings


def _head(head: str | None, environment: Mapping[str, str], names: Sequence[str]) -> tuple[str, int]:
    master = environment.get("MASTER_ADDR", "")
    key, separator, host = ("MASTER_ADDR", "=", master) if head is None else ("--head", " ", head)
    if host.count(":") > 1:
        raise UserError(
            f"{key}{separator}{host} is an IPv6 address, and machines meet over IPv4: give the machine's name or its IPv4 address.",
            code="unsupported",
            key=key,
        )
    if head is None and master:
        return master, _number(environment, ("MASTER_PORT",)) or RAY_PORT
    if head is None:
        return (names[0] if names else ""), RAY_PORT
    parts = re.fullmatch(r"([^:]+)(?::(\d+))?", head)
    if parts is None:
        raise UserError(
            f"--head {head} is not HOST or HOST:PORT: give the machine of rank 0.", code="malformed", key="--head"
        )
    port = int(parts[2] or RAY_PORT)
    if not 0 < port < 65536:
        raise UserError(
            f"--head {head}: a port is from 1 to 65535, so give one of these.", code="out_of_range", key="--head"
        )
    return parts[1], port


def _number(environment: Mapping[str, str], variables: Sequence[str]) -> int | None:
    """The number in the first variable that is set."""
    for variable in variables:
        if text := environment.get(variable):
            if not text.isdigit():
                raise UserError(
                    f"{variable}={text} in the environment is not a number: set it right, or unset it.",
                    code="wrong_type",
                    key=variable,
                )
            return int(text)
    return None
