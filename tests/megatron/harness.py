"""Runs a function in several processes that form one Megatron group over gloo."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

from rlsys.config.schema import Device
from rlsys.megatron.parallel import Rendezvous


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def rendezvous(rank: int, world_size: int, port: int) -> Rendezvous:
    return Rendezvous(rank, world_size, "127.0.0.1", port, Device.CPU, timeout_s=120.0)


def run_group(function: Callable[..., None], world_size: int, *args: Any) -> None:
    """Call `function(rank, world_size, *args)` in each of `world_size` processes; raise what one raises."""
    os.environ["OMP_NUM_THREADS"] = "1"
    mp.spawn(function, args=(world_size, *args), nprocs=world_size)
