"""Which machines serve searches, and what the run is told of them. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from rlsys.config.derived import needs_server
from rlsys.config.schema import RunConfig, SearchConfig
from rlsys.errors import UserError
from rlsys.search.address import TOKEN_VARIABLE


def check_searching(config: RunConfig) -> None:
    """Raise UserError where servers are asked for that nobody would use."""
    nodes, search = config.cluster.search.nodes, config.search
    if nodes and needs_server(search) and search.url is not None:
        raise UserError(
            f"search.url={search.url} and cluster.search.nodes={nodes} both say who answers searches: leave one out."
        )


def serving_positions(config: RunConfig, hosts: Sequence[tuple[int, str]]) -> list[int]:
    """Positions in `hosts`, of ranks and host names, of the machines of cluster.search.nodes, in the order there.

    Raises UserError for one that is not there.
    """
    if not needs_server(config.search):
        return []
    return [_position(wanted, hosts) for wanted in config.cluster.search.nodes]


def _position(wanted: str, hosts: Sequence[tuple[int, str]]) -> int:
    for position, (rank, host) in enumerate(hosts):
        # A host's own name may have its domain with it.
        if wanted in (str(rank), host, host.partition(".")[0]):
            return position
    there = ", ".join(f"{rank} ({host})" for rank, host in hosts)
    raise UserError(f"cluster.search.nodes: there is no machine {wanted} among {there}; give a rank or a host name.")


def search_settings(
    search: SearchConfig, urls: Sequence[str], environment: Mapping[str, str] = os.environ
) -> list[str]:
    """Overrides by which a run asks the servers at `urls`, which take their token from the environment, if any."""
    replicas = ",".join(f"'{url}'" for url in urls[1:])
    settings = [f"search.url='{urls[0]}'", f"search.replicas=[{replicas}]"]
    if search.token_env is None and environment.get(TOKEN_VARIABLE):
        settings.append(f"search.token_env={TOKEN_VARIABLE}")
    return settings
