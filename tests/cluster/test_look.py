"""Looking at a Ray cluster that is there, that wants a token, or that is silent."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest
import ray

from rlsys.cluster.preflight.machine import Unseen, cluster_at
from rlsys.cluster.runtime import ray_runtime
from rlsys.config.schema import ClusterConfig, Device


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    cluster = ClusterConfig(device=Device.cpu, start_timeout_s=120)
    with ray_runtime(cluster, [2]):
        yield ray.get_runtime_context().gcs_address


def test_nodes_and_what_is_free_are_seen(address: str) -> None:
    seen = cluster_at(address, 60)
    (node,) = seen.nodes
    assert node.address == address.rpartition(":")[0]
    assert node.resources["CPU"] == 2
    assert seen.free.get("CPU", 0) == 0, "the bundle has them"


def test_a_cluster_that_wants_a_token_says_so(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(Unseen, match="RAY_AUTH_MODE"):
        cluster_at(address, 6)


def test_silence_ends_the_wait_and_the_process() -> None:
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as silent,
        pytest.raises(Unseen, match="within 3 s"),
    ):
        cluster_at(f"127.0.0.1:{silent.getsockname()[1]}", 3)
