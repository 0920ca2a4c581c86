"""Resolves the run to launch, this machine's rank in it, and the machines that serve searches. Pure.

Values not given as flags come from the environment: the variables of torchrun and Kubernetes (NODE_RANK, GROUP_RANK or
RANK; NNODES or WORLD_SIZE; MASTER_ADDR and MASTER_PORT; one process per machine) or of Slurm. Flags take precedence over
variables, and variables about nodes over variables about processes (NODE_RANK over RANK).
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

Notify = Callable[[str], None]  # Prints a status line of the launcher.


@dataclass(frozen=True, slots=True)
class LaunchTask:
    """A run to launch: its config, overrides, and options of `rlsys launch`."""

    config: RunConfig
    name: str  # Config name, as given on the command line.
    overrides: tuple[str, ...]
    config_dir: Path | None
    preflight: bool  # True: start only if `rlsys doctor --for` passes.
    wait_s: float  # Timeout for all machines to join.

    def arguments(self, command: Sequence[str], settings: Sequence[str]) -> list[str]:
        """Return `rlsys` arguments: `command` (ending with the config option), config name, overrides and `settings`."""
        folder = [] if self.config_dir is None else ["--config-dir", str(self.config_dir)]
        return [*command, self.name, *folder, *self.overrides, *settings]


@dataclass(frozen=True, slots=True)
class Role:
    """This machine's rank in a launch, and the head that it joins."""

    rank: int
    nodes: int
    host: str  # Name or address of the head; empty if it is the only machine.
    port: int  # Ray's port on the head.
    names: tuple[str, ...] = ()  # Host names by rank, if the environment lists them.

    def describe(self, rank: int) -> str:
        """Name a machine for messages: `node 1 (gpu02)`, or `node 1` if its host name is unknown."""
        return f"node {rank} ({self.names[rank]})" if rank < len(self.names) else f"node {rank}"


def find_role(
    environment: Mapping[str, str],
    wanted: int,
    *,
    rank: int | None = None,
    nodes: int | None = None,
    head: str | None = None,
) -> Role:
    """Resolve the role from flags and environment. `wanted` is `cluster.nodes` of the config.

    Raises UserError for missing, non-numeric or inconsistent values.
    """
    listed = next((environment[name] for name in _LISTED if environment.get(name)), "")
    names = tuple(expand_hosts(listed))
    nodes = machine_count(_number(environment, _NODES) if nodes is None else nodes, wanted)
    rank = _number(environment, _RANKS) if rank is None else rank
    if rank is None and nodes > 1:
        raise UserError(
            f"--rank is missing, and the run has {nodes} machines: give --rank 0 on the head and "
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
            "--head is missing: give --head HOST[:PORT], the machine of rank 0, on every machine, or set MASTER_ADDR.",
            code="missing",
            key="--head",
        )
    return Role(rank, nodes, host, port, names)


def machine_count(given: int | None, wanted: int) -> int:
    """Return the number of machines: `given`, or else the config's `wanted`.

    Raises UserError if `given` is below `wanted`.
    """
    if given is None or given >= wanted:
        return given or wanted
    raise UserError(
        f"--nodes {given} is fewer than cluster.nodes={wanted}: start {wanted} machines, or use a config for fewer.",
        code="conflict",
        key="--nodes",
    )


def expand_hosts(listed: str) -> Iterator[str]:
    """Expand a Slurm host list: `gpu[01-03,7],login` is gpu01, gpu02, gpu03, gpu7 and login."""
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
    """Raise UserError if `cluster.search.nodes` would start servers that the run does not query."""
    nodes, url = config.cluster.search.nodes, config.search.url
    if nodes and needs_server(config.search) and url is not None:
        raise UserError(
            f"search.url={url} and cluster.search.nodes={nodes} both select the search servers: remove one of them.",
            code="conflict",
            key="cluster.search.nodes",
        )


def serving_positions(config: RunConfig, hosts: Sequence[tuple[int, str]]) -> list[int]:
    """Return the positions in `hosts` (rank, host name) of the machines in `cluster.search.nodes`, in that order.

    Raises UserError for a machine that is not in `hosts`.
    """
    # A host name may include its domain; accept the short form too.
    names = [{str(rank), host, host.partition(".")[0]} for rank, host in hosts]
    positions = []
    for wanted in config.cluster.search.nodes if needs_server(config.search) else ():
        position = next((position for position, known in enumerate(names) if wanted in known), None)
        if position is None:
            there = ", ".join(f"{rank} ({host})" for rank, host in hosts)
            raise UserError(
                f"cluster.search.nodes: {wanted} is not a machine of this launch, which has {there}: give a rank or a host "
                "name.",
                code="unknown",
                key="cluster.search.nodes",
            )
        positions.append(position)
    return positions


def search_settings(
    search: SearchConfig, urls: Sequence[str], environment: Mapping[str, str] = os.environ
) -> list[str]:
    """Return the overrides that point a run at the search servers `urls`, with the token from the environment if there
    is one."""
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
            f"{key}{separator}{host} is an IPv6 address, and machines connect over IPv4: give the host name or IPv4 address.",
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
        raise UserError(f"--head {head}: the port must be between 1 and 65535.", code="out_of_range", key="--head")
    return parts[1], port


def _number(environment: Mapping[str, str], variables: Sequence[str]) -> int | None:
    """Return the number in the first of `variables` that is set; None if no variable is set. Raises UserError for a
    value that is not a number."""
    for variable in variables:
        if text := environment.get(variable):
            if not text.isdigit():
                raise UserError(
                    f"{variable}={text} in the environment is not a number: correct or unset it.",
                    code="wrong_type",
                    key=variable,
                )
            return int(text)
    return None
