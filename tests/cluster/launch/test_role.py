"""Which machine this is: from flags, from the environment, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from rich.console import Console

from examples.searchr1.tiny.demo import prepare_world
from rlsys.apps.cli.training import launch as command
from rlsys.cluster.launch.role import Role, expand_hosts, find_role
from rlsys.errors import UserError

SLURM = {"SLURM_NODEID": "2", "SLURM_NNODES": "4", "SLURM_JOB_NODELIST": "gpu[09-11],big"}


@pytest.mark.parametrize(
    ("environment", "flags", "expected"),
    [
        ({}, {}, Role(0, 1, "", 6379)),
        ({}, {"rank": 1, "nodes": 2, "head": "a"}, Role(1, 2, "a", 6379)),
        ({}, {"rank": 1, "nodes": 2, "head": "10.0.0.1:7000"}, Role(1, 2, "10.0.0.1", 7000)),
        ({"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "a"}, {}, Role(1, 3, "a", 6379)),
        (
            {"RANK": "9", "GROUP_RANK": "1", "WORLD_SIZE": "16", "NNODES": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"},
            {},
            Role(1, 2, "a", 29500),
        ),
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
def test_flags_go_before_the_environment(
    environment: Mapping[str, str], flags: Mapping[str, Any], expected: Role
) -> None:
    assert find_role(environment, 1, **flags) == expected


@pytest.mark.parametrize(
    ("environment", "wanted", "flags", "said"),
    [
        ({}, 2, {}, "--rank: which of the 2 machines is this"),
        ({}, 2, {}, "--rank 0 on the head and --rank 1 on the other, or"),
        ({}, 3, {}, "--rank 0 on the head and --rank 1 to 2 on the others, or"),
        ({}, 1, {"nodes": 0}, "--nodes 0 is fewer than cluster.nodes=1"),
        ({}, 2, {"rank": 0, "head": "[fd00::1]:7000"}, "an IPv6 address"),
        ({"MASTER_ADDR": "fd00::1"}, 2, {"rank": 0}, "MASTER_ADDR=fd00::1 is an IPv6 address"),
        ({}, 2, {"rank": 1}, "--head: where is the machine of rank 0"),
        ({}, 2, {"rank": 2, "head": "a"}, "--rank 2 is not a machine of --nodes 2"),
        ({}, 1, {"rank": -1}, "--rank -1 is not a machine"),
        ({}, 4, {"rank": 1, "nodes": 2, "head": "a"}, "--nodes 2 is fewer than cluster.nodes=4"),
        ({"RANK": "first"}, 2, {}, "RANK=first in the environment is not a number"),
        ({}, 2, {"rank": 0, "head": "a:b"}, "--head a:b is not HOST or HOST:PORT"),
        ({}, 2, {"rank": 0, "head": "a:0"}, "a port is from 1 to 65535"),
    ],
)
def test_what_does_not_fit_is_a_sentence(
    environment: Mapping[str, str], wanted: int, flags: Mapping[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        find_role(environment, wanted, **flags)


def test_a_cluster_that_runs_needs_as_many_machines() -> None:
    prepare_world(Console(quiet=True))
    settings = ["cluster.nodes=2", "cluster.devices_per_node=2", "cluster.sync_mode=broadcast"]
    for nodes in (0, 1):
        with pytest.raises(UserError, match=f"--nodes {nodes} is fewer than cluster.nodes=2"):
            command("searchr1_tiny_cpu", settings, None, nodes, None, None, 1.0, "127.0.0.1:1", False)


def test_a_machine_is_named_as_far_as_it_is_known() -> None:
    assert find_role(SLURM, 2).describe(3) == "node 3 (big)"
    assert find_role({}, 2, rank=0, head="a").describe(1) == "node 1"


@pytest.mark.parametrize(
    ("listed", "hosts"),
    [
        ("a", ["a"]),
        ("a,b-3", ["a", "b-3"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[008-010,2]x,m", ["n008x", "n009x", "n010x", "n2x", "m"]),
        ("r[1-2]n[5,7]", ["r1n5", "r1n7", "r2n5", "r2n7"]),
        ("", []),
    ],
)
def test_slurms_short_form_is_spelt_out(listed: str, hosts: list[str]) -> None:
    assert list(expand_hosts(listed)) == hosts
