"""Small worker for tests of the cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rlsys.errors import PeerLost, UserError


class Toy:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls: list[int] = []

    def pid(self) -> int:
        """Return the id of this process."""
        return os.getpid()

    def node(self) -> str:
        """Return the Ray node id of this process."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def add(self, value: int) -> tuple[int, list[int]]:
        self.calls.append(value)
        return self.rank, list(self.calls)

    def hold(self, size: int) -> int:
        """Keep `size` bytes of memory from now on."""
        self.held = os.urandom(size)
        return len(self.held)

    def wait_for(self, file: Path) -> None:
        while self.rank == 1 and not file.exists():
            time.sleep(0.02)

    def raise_on(self, rank: int) -> None:
        """Raise on one rank; the others do not answer for an hour."""
        if self.rank == rank:
            raise ValueError("the tensor is upside down")
        time.sleep(3600)

    def fail(self, error: Exception) -> None:
        raise error

    def write_to_full_disk(self) -> None:
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(b"x")

    def refuse(self) -> None:
        raise UserError("some.key=3 must be 2.", code="out_of_range", key="some.key")

    def niceness(self) -> int:
        return os.nice(0)

    def visible_gpus(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "all")

    def nccl_settings(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith("NCCL_") and "IFNAME" not in name}

    def meet(self, address: tuple[str, int], size: int) -> None:
        """Join a gloo group."""
        import torch.distributed as dist

        store = dist.TCPStore(*address, size, is_master=self.rank == 0)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=size)

    def reduce(self) -> None:
        """Wait in a collective for rank 1, which stops."""
        import torch

        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        torch.distributed.all_reduce(torch.ones(1))

    def spawn(self) -> int:
        """Start a process in its own session, so that it would outlive this worker; return its id."""
        return subprocess.Popen(["sleep", "3600"], start_new_session=True).pid

    def die_on(self, rank: int) -> None:
        """End the process of one rank without telling Ray; the others do not answer for an hour."""
        if self.rank == rank:
            print("about to fall over", file=sys.stderr, flush=True)
            os._exit(3)
        time.sleep(3600)

    def lose(self, rank: int, noticed: Path, known: bool) -> None:
        """End the process of one rank when the file `noticed` tells that the failure of the other ranks is known.

        They fail as they do when they lose a peer; with `known`, they know that they did.
        """
        if self.rank != rank:
            raise PeerLost("a peer has left") if known else ConnectionError("closed by peer")
        while not noticed.exists():
            time.sleep(0.02)
        os._exit(3)
