"""Checks that an actor's offload frees its device memory and brings every bit back, and measures its speed.

A colocated run offloads the same memory: parameters, float32 weights, Adam's moments, and gradient buffers. Gradient
buffers are not copied and must be zero again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from bench.gpu.figures import Figure, Setting, at_most, holds
from bench.gpu.trainer import make_actor, random_micro_batch
from rlsys.trainer.offload import gradient_buffers
from rlsys.weights.bucket import hash_pieces
from rlsys.weights.weight_map import read_architecture

ROUNDS = 2
"""The first round pins host memory; later rounds reuse it."""
_AWAY_SHARE = 0.01
"""Largest share of the allocated memory that may stay: tables of positions, and what other libraries hold."""


def measure(setting: Setting) -> Iterator[Figure]:
    """Yield the checks, and seconds and GB/s (10^9 bytes) of each direction."""
    scale, vocab = setting.scale, read_architecture(str(setting.model)).vocab
    actor = make_actor(setting.model, setting.device, setting.dtype, recompute=True)
    batch = random_micro_batch(scale, vocab, range(min(scale.sequences)))
    actor.accumulate([batch])
    actor.apply()
    before, held = _hashes(actor._kept()), _allocated(setting)
    for number in range(1, ROUNDS + 1):
        away = actor.offload()
        if setting.on_gpu:
            share = _allocated(setting) / held
            yield at_most(f"round {number}: share of the memory that stays", share, _AWAY_SHARE)
            yield Figure(f"round {number}: reserved while away", torch.cuda.memory_reserved() / 2**30, "GiB")
        back = actor.restore()
        yield holds(f"round {number}: every bit returns", _hashes(actor._kept()) == before)
        zero = not any(bool(buffer.any()) for buffer in gradient_buffers(actor._wrapped))
        yield holds(f"round {number}: gradients are zero", zero)
        yield Figure(f"round {number}: offloaded", away.bytes / 2**30, "GiB")
        for name, stats in (("offload", away), ("restore", back)):
            yield Figure(f"round {number}: {name}", stats.bytes / stats.seconds / 1e9, "GB/s")
    actor.accumulate([batch])
    actor.apply()  # Raises if the gradient is not finite.
    yield holds("training continues", actor.step == 2)


def _hashes(tensors: Iterable[Tensor]) -> list[list[bytes]]:
    """Return the hashes of all storages behind `tensors`, in order."""
    storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    flats = [torch.empty(0, dtype=torch.uint8, device=each.device).set_(each) for each in storages.values()]
    by_device = {flat.device: [other for other in flats if other.device == flat.device] for flat in flats}
    return [hashes for of_device in by_device.values() for hashes in hash_pieces(of_device)]


def _allocated(setting: Setting) -> int:
    """Return the bytes of allocated device memory; 1 on a CPU."""
    return torch.cuda.memory_allocated() if setting.on_gpu else 1
