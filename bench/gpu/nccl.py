"""Checks the process group of `cluster.sync_mode=broadcast` with one member: opening, sending, leaving, and again.

NCCL needs a GPU for every member. One GPU can show that the installed torch takes the group's options, that buckets pass
the staging memory, and that a member leaves at once, even with a broadcast in flight. On a CPU, the group uses gloo.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from bench.gpu.figures import Figure, Setting, at_most, holds
from rlsys.config.schema import SyncMode
from rlsys.weights.bucket import checksum, pack_into
from rlsys.weights.transport import Meeting, TransportSpec, await_device, open_sender

OPENINGS, BUCKETS = 2, 3
_TIMEOUT_S, _LEAVING_S = 30.0, 10.0


def measure(setting: Setting) -> Iterator[Figure]:
    """Yield the seconds of opening and of leaving, the GB/s (10^9 bytes) of buckets, and the checks."""
    device = torch.device(setting.torch_device)
    weight = torch.randn(setting.scale.bucket_bytes // 4, device=device)
    expected = checksum("weight", weight)
    for number in range(1, OPENINGS + 1):
        meeting = Meeting("127.0.0.1")
        spec = TransportSpec(
            *(SyncMode.broadcast, 0, ("the actor",), weight.nbytes, _TIMEOUT_S, setting.device),
            *(meeting.address, ""),
        )
        started = time.perf_counter()
        sender = open_sender(spec)
        yield Figure(f"opening {number}", time.perf_counter() - started, "s")
        bucket = pack_into(sender.next_slot(), [("weight", weight)])
        yield holds(f"opening {number}: a bucket is packed whole", bucket.records[0].checksum == expected)
        await_device(device)
        started = time.perf_counter()
        for _ in range(BUCKETS):
            sender.release(sender.send(bucket).number)
        yield Figure(f"opening {number}: buckets", BUCKETS * weight.nbytes / _since(started) / 1e9, "GB/s")
        started = time.perf_counter()
        sender.close()
        yield at_most(f"leaving {number}, with a broadcast in flight", _since(started), _LEAVING_S, "s")


def _since(started: float) -> float:
    return time.perf_counter() - started
