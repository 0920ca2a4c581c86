"""Addresses of this machine, and the interface that the rest of a cluster reaches it by."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress

import psutil

from rlsys.errors import UserError
from rlsys.weights.sockets import INTERFACE_VARIABLES

RANK = "rlsys-node-"  # How the resource of Ray's begins whose name ends with a machine's rank.
RAY_PORT = 6379  # Of the head of a Ray cluster, where nobody says otherwise.
_LOOPBACK = "127."
_OUTSIDE = "192.0.2.1"  # An address that nobody has (RFC 5737): the way to it is the way out.


def own_addresses() -> dict[str, str]:
    """Address -> interface, of IPv4 and IPv6."""
    entries = [(name, entry) for name, entries in psutil.net_if_addrs().items() for entry in entries]
    families = (socket.AF_INET, socket.AF_INET6)
    return {entry.address.partition("%")[0]: name for name, entry in entries if entry.family in families}


def address_towards(host: str) -> str:
    """This machine's IPv4 address on its way to `host`. Sends nothing. Raises OSError if there is no way, or no `host`."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, 9, socket.AF_INET, socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def address_here(host: str) -> str:
    """The IPv4 address by which others reach this machine, which they know as `host`, a name or an address of it.

    The machine's own name is this machine whatever stands for it here (Debian's /etc/hosts has 127.0.1.1), and so is
    127.0.0.1. Raises UserError if `host` is another machine, or this one has no address for others.
    """
    own = [address for address in own_addresses() if ":" not in address]
    name = socket.gethostname()
    named = host in (name, name.partition(".")[0])
    try:
        meant = [str(entry[4][0]) for entry in socket.getaddrinfo(host, 0, socket.AF_INET, socket.SOCK_STREAM)]
    except OSError as problem:
        if not named:
            raise UserError(f"--head {host} has no IPv4 address ({problem}): give one of {', '.join(own)}.") from None
        meant = []
    outer = [address for address in own if not address.startswith(_LOOPBACK)]
    if here := [address for address in meant if address in outer]:
        return here[0]
    if not named and not all(address.startswith(_LOOPBACK) for address in meant):
        raise UserError(
            f"--head {host} is {', '.join(meant)}, and this machine of rank 0 has {', '.join(own)}: give one of "
            "these on every machine, or start rank 0 on that one."
        )
    with suppress(OSError):  # Of a network without a way out.
        return address_towards(_OUTSIDE)
    if outer:
        return outer[0]
    raise UserError(
        f"--head {host} is this machine, which has no IPv4 address that others could reach it by: connect it, or "
        "run on one machine."
    )


def interface_settings(address: str, addresses: Mapping[str, str]) -> dict[str, str]:
    """Variables that make gloo and NCCL use the interface of `address`; none if `addresses` does not have it.

    Those that are set already stay as they are.
    """
    interface = addresses.get(address)
    if interface is None:
        return {}
    # NCCL takes a bare name for the beginning of one: eth1 would be eth10 too.
    settings = zip(INTERFACE_VARIABLES, (interface, f"={interface}"), strict=True)
    return {name: value for name, value in settings if not os.environ.get(name)}


def promised_port() -> socket.socket:
    """A socket whose port, of all IPv4 addresses, the system gives to nobody who asks for any while it is open.

    Whoever is told the port may listen at it all the same: it is bound with SO_REUSEADDR and never listened at, and Linux
    then lets another socket with that option, which servers set, have it as well.
    """
    promise = socket.socket()
    promise.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    promise.bind(("", 0))
    return promise


def answers(host: str, port: int, timeout_s: float) -> bool:
    """Whether something listens at `port` of `host`."""
    with suppress(OSError):
        require_listener(f"{host}:{port}", timeout_s)
        return True
    return False


def require_listener(address: str, timeout_s: float) -> None:
    """Raise OSError where nobody listens at HOST:PORT of a Ray cluster, which Ray itself takes minutes to say.

    Words of Ray's own, such as auto, are left to Ray.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()
