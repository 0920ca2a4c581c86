"""The interface that gloo and NCCL are told, and the order of machines."""

from __future__ import annotations

import socket
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from rlsys.cluster.local_ray import (
    INTERFACE_VARIABLES,
    address_here,
    interface_settings,
    promised_port,
)
from tests.support.refusals import refused

ADDRESSES = {"127.0.0.1": "lo", "10.0.0.7": "ib0", "192.168.1.5": "eth0"}


def test_the_interface_is_the_one_of_the_address_unless_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    gloo, nccl = INTERFACE_VARIABLES
    for name in INTERFACE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert interface_settings("10.0.0.7", ADDRESSES) == {gloo: "ib0", nccl: "=ib0"}
    monkeypatch.setenv(nccl, "ib1")
    assert interface_settings("10.0.0.7", ADDRESSES) == {gloo: "ib0"}
    assert interface_settings("10.9.9.9", ADDRESSES) == {}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", socket.gethostname()])
def test_this_machine_by_whatever_name_has_an_address_for_others(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsys.cluster.local_ray.own_addresses", lambda: ADDRESSES | {"fd00::1": "eth0"})
    resolve = socket.getaddrinfo
    debian = {socket.gethostname(): "127.0.1.1"}
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *rest: resolve(debian.get(name, name), *rest))
    with monkeypatch.context() as patch:
        patch.setattr("rlsys.cluster.local_ray.address_towards", lambda _: "192.168.1.5")
        assert address_here(host) == "192.168.1.5", "the way out"
    monkeypatch.setattr("rlsys.cluster.local_ray.address_towards", Mock(side_effect=OSError))
    assert address_here(host) == "10.0.0.7", "the first"
    monkeypatch.setattr("rlsys.cluster.local_ray.own_addresses", lambda: {"127.0.0.1": "lo", "fd00::1": "eth0"})
    with refused("unreachable", "--head"):
        address_here(host)


def test_an_address_of_this_machine_is_taken_and_anothers_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsys.cluster.local_ray.own_addresses", lambda: ADDRESSES)
    assert address_here("192.168.1.5") == "192.168.1.5"
    with refused("mismatch", "--head"):
        address_here("10.9.9.9")
    with refused("unknown", "--head"):
        address_here("fd00::1")


@pytest.mark.parametrize("use_libuv", [True, False])
def test_a_promised_port_is_its_listeners_and_nobody_elses(use_libuv: bool) -> None:
    with promised_port() as promise:
        port = promise.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        store = dist.TCPStore("127.0.0.1", port, 1, is_master=True, use_libuv=use_libuv)
        store.set("here", "1")
        assert dist.TCPStore("127.0.0.1", port, 1).get("here") == b"1"
        with pytest.raises(dist.DistNetworkError, match="already in use"):
            dist.TCPStore("127.0.0.1", port, 1, is_master=True, use_libuv=use_libuv)
