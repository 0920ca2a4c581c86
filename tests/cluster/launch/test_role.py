"""Tests of a machine's role, from flags or the environment, and of the machines that serve searches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rlsys.cluster.launch.role import Role, check_searching, expand_hosts, find_role, search_settings, serving_positions
from rlsys.config.schema import CassetteConfig, ClusterConfig, RunConfig, SearchConfig, SearchNodesConfig
from rlsys.errors import Code
from tests.support.composed import composed
from tests.support.refusals import refused

SLURM = {"SLURM_NODEID": "2", "SLURM_NNODES": "4", "SLURM_JOB_NODELIST": "gpu[09-11],big"}


@pytest.mark.parametrize(
    ("environment", "flags", "expected"),
    [
        ({}, {"rank": 1, "nodes": 2, "head": "10.0.0.1:7000"}, Role(1, 2, "10.0.0.1", 7000)),
        (
            {"RANK": "9", "GROUP_RANK": "1", "WORLD_SIZE": "16", "NNODES": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"},
            {},
            Role(1, 2, "a", 29500),
        ),
        ({"NODE_RANK": "1", "NNODES": "2", "MASTER_ADDR": "a"}, {}, Role(1, 2, "a", 6379)),
        ({"NODE_RANK": "1", "NNODES": "2", "MASTER_ADDR": "a"}, {"head": "b"}, Role(1, 2, "b", 6379)),
        (SLURM, {}, Role(2, 4, "gpu09", 6379, ("gpu09", "gpu10", "gpu11", "big"))),
        (
            {**SLURM, "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NODELIST": "gpu[10-11],big"},
            {},
            Role(2, 3, "gpu10", 6379, ("gpu10", "gpu11", "big")),
        ),
        (SLURM, {"rank": 0}, Role(0, 4, "gpu09", 6379, ("gpu09", "gpu10", "gpu11", "big"))),
    ],
)  # fmt: skip
def test_role_follows_flags_then_the_environment(
    environment: Mapping[str, str], flags: Mapping[str, Any], expected: Role
) -> None:
    assert find_role(environment, 1, **flags) == expected


@pytest.mark.parametrize(
    ("environment", "wanted", "flags", "code", "key"),
    [
        ({}, 2, {}, "missing", "--rank"),
        ({}, 4, {"rank": 1, "nodes": 2, "head": "a"}, "conflict", "--nodes"),
        ({}, 2, {"rank": 0, "head": "[fd00::1]:7000"}, "unsupported", "--head"),
        ({}, 2, {"rank": 1}, "missing", "--head"),
        ({}, 2, {"rank": 2, "head": "a"}, "out_of_range", "--rank"),
        ({"RANK": "first"}, 2, {}, "wrong_type", "RANK"),
        ({}, 2, {"rank": 0, "head": "a:0"}, "out_of_range", "--head"),
    ],
)
def test_inconsistent_role_is_refused(
    environment: Mapping[str, str], wanted: int, flags: Mapping[str, Any], code: Code, key: str
) -> None:
    with refused(code, key):
        find_role(environment, wanted, **flags)


def test_slurm_node_list_is_expanded() -> None:
    assert list(expand_hosts("a,b-3")) == ["a", "b-3"]
    assert list(expand_hosts("n[008-010,2]x,m")) == ["n008x", "n009x", "n010x", "n2x", "m"]
    assert list(expand_hosts("r[1-2]n[5,7]")) == ["r1n5", "r1n7", "r2n5", "r2n7"]


HOSTS = [(0, "gpu-a"), (1, "gpu-b.example.org"), (12, "1")]


def run_of(nodes: list[str], **search: object) -> RunConfig:
    return RunConfig(
        cluster=ClusterConfig(search=SearchNodesConfig(nodes=nodes)),
        search=SearchConfig(**{"index": "somewhere", **search}),
    )


def test_search_machines_are_named_by_rank_or_host_name() -> None:
    assert serving_positions(run_of(["12", "gpu-b", "gpu-a"]), HOSTS) == [2, 1, 0]
    assert serving_positions(run_of(["1"]), HOSTS) == [1], "a rank has priority over a host of that name"
    played = run_of(["0"], cassette=CassetteConfig(path="calls.jsonl"))
    assert serving_positions(played, HOSTS) == [], "a played cassette needs no server"
    with refused("unknown", "cluster.search.nodes"):
        serving_positions(run_of(["gpu-c"]), HOSTS)
    check_searching(run_of(["0"]))
    with refused("conflict", "cluster.search.nodes"):
        check_searching(run_of(["0"], url="http://a:1"))


def test_search_settings_compose_to_the_servers_and_their_token() -> None:
    urls = ["http://a:1", "http://b:2", "http://[fd00::1]:3"]
    settings = search_settings(SearchConfig(), urls, {"RLSYS_SEARCH_TOKEN": "s3cret"})
    search = composed(*settings).search
    assert [search.url, *search.replicas] == urls
    assert search.token_env == "RLSYS_SEARCH_TOKEN"
