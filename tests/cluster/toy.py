"""Workers small enough to reason about, for the cluster's tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time


class Toy:
    """Answers, sleeps, raises or dies, as told."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls: list[int] = []

    def add(self, value: int) -> tuple[int, list[int]]:
        """Remember the order of calls."""
        self.calls.append(value)
        return self.rank, list(self.calls)

    def sleep(self, seconds: float) -> None:
        """Rank 1 is slow."""
        if self.rank == 1:
            time.sleep(seconds)

    def raise_on(self, rank: int) -> None:
        """Fail on one rank, while the others wait."""
        if self.rank == rank:
            raise ValueError("the tensor is upside down")
        time.sleep(30)

    def visible_gpus(self) -> str:
        """What CUDA would see."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "all")

    def spawn(self) -> int:
        """Start a process that would outlive this one, in a session of its own; its id."""
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

    def die_on(self, rank: int) -> None:
        """End the process without a word to Ray, while the others wait."""
        if self.rank == rank:
            print("about to fall over", file=sys.stderr, flush=True)
            os._exit(3)
        time.sleep(30)

    def lose(self, rank: int) -> None:
        """End the process of one rank a second after the others have failed for it."""
        if self.rank != rank:
            raise ConnectionError("closed by peer")
        time.sleep(1)
        os._exit(3)
