"""Addresses of this machine, and the interface that the rest of a cluster reaches it by."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import psutil

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""By which gloo and NCCL are told an interface; without it they may take one that leads nowhere."""


def own_addresses() -> dict[str, str]:
    """Address -> interface, of IPv4 and IPv6."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        found.address.partition("%")[0]: name
        for name, addresses in psutil.net_if_addrs().items()
        for found in addresses
        if found.family in families
    }


def address_towards(host: str) -> str:
    """This machine's address on its way to `host`. Sends nothing. Raises OSError if there is no way, or no `host`."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def interface_settings(address: str, addresses: Mapping[str, str]) -> dict[str, str]:
    """Variables that make gloo and NCCL use the interface of `address`; none if `addresses` does not have it.

    Those that are set already stay as they are.
    """
    interface = addresses.get(address)
    unset = [name for name in INTERFACE_VARIABLES if not os.environ.get(name)]
    return dict.fromkeys(unset, interface) if interface else {}


def answers(host: str, port: int, timeout_s: float) -> bool:
    """Whether something listens at `port` of `host`."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError:
        return False
    return True
