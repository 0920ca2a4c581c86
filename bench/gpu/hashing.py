"""Checks that the device hash of weights is equal on CPU and GPU and sees every change, and measures its speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bench.gpu.figures import Figure, Setting, compared, holds
from rlsys.trainer.export import copy_gb_s
from rlsys.weights.bucket import DEVICE_PIECE_BYTES, checksum, hash_pieces
from rlsys.weights.transport import await_device

REPEATS = 3
_SIZES = (1, 7, 8, 4097, DEVICE_PIECE_BYTES - 1, DEVICE_PIECE_BYTES, DEVICE_PIECE_BYTES + 1, 2 * DEVICE_PIECE_BYTES + 9)


def measure(setting: Setting) -> Iterator[Figure]:
    """Yield the checks, then GB/s (10^9 bytes) of the device hash and of the host hash."""
    device = torch.device(setting.torch_device)
    draw = torch.Generator().manual_seed(0)
    flats = [torch.randint(256, (size,), dtype=torch.uint8, generator=draw) for size in _SIZES]
    here, there = hash_pieces(flats), hash_pieces([flat.to(device) for flat in flats])
    yield holds("hashes are equal on CPU and device", here == there)
    yield holds("a flipped bit changes the hash", all(_sees_a_flip(flat.to(device)) for flat in flats))
    size = setting.scale.hashed_bytes
    flat = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    fastest = _fastest_s(lambda: hash_pieces([flat]), device)
    yield compared("device hash", size / fastest / 1e9, "GB/s", "a copy on the device", copy_gb_s(size, device))
    host = flat[: setting.scale.bucket_bytes].cpu()
    yield Figure("host hash (XXH3)", host.numel() / _fastest_s(lambda: checksum("", host), device) / 1e9, "GB/s")


def _sees_a_flip(flat: Tensor) -> bool:
    """Return True if flipping the last bit changes the hash of the last piece and of no other."""
    before = hash_pieces([flat])[0]
    flat[-1] ^= 1
    after = hash_pieces([flat])[0]
    return before[:-1] == after[:-1] and before[-1] != after[-1]


def _fastest_s(call: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of the fastest of `REPEATS` calls, after a warm-up."""
    fastest = float("inf")
    for number in range(1 + REPEATS):
        await_device(device)
        started = time.perf_counter()
        call()
        await_device(device)
        if number:
            fastest = min(fastest, time.perf_counter() - started)
    return fastest
