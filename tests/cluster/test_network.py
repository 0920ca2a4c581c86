"""The interface that gloo and NCCL are told, and the order of machines."""

from __future__ import annotations

import socket

import pytest

from rlsys.cluster.machines import natural
from rlsys.cluster.network import (
    INTERFACE_VARIABLES,
    address_towards,
    answers,
    interface_settings,
    own_addresses,
)

ADDRESSES = {"127.0.0.1": "lo", "10.0.0.7": "ib0", "192.168.1.5": "eth0"}


def test_the_interface_is_the_one_of_the_address_unless_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    gloo, nccl = INTERFACE_VARIABLES
    for name in INTERFACE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert interface_settings("10.0.0.7", ADDRESSES) == {gloo: "ib0", nccl: "ib0"}
    monkeypatch.setenv(nccl, "ib1")
    assert interface_settings("10.0.0.7", ADDRESSES) == {gloo: "ib0"}
    assert interface_settings("10.9.9.9", ADDRESSES) == {}


def test_addresses_of_this_machine() -> None:
    assert own_addresses()["127.0.0.1"] == "lo"
    assert address_towards("127.0.0.1") == "127.0.0.1"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert answers("127.0.0.1", port, 1)
    assert not answers("127.0.0.1", port, 1)


def test_numbers_in_host_names_count_as_numbers() -> None:
    assert sorted(["n10", "n9", "a1", "n9b", "n9-2"], key=natural) == ["a1", "n9", "n9-2", "n9b", "n10"]
