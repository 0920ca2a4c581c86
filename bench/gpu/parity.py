"""Compares ways to compute the same thing: Transformer Engine's layers with Megatron's own, sequences that are packed
with sequences alone, and a training step of the gpu profile with one of the cpu profile.

Log-probs of the model with random weights are computed with both kinds of layers, packed (THD) and alone (one padded
row each), in float32 and in bfloat16. In float32 they must agree. In bfloat16 each way has a rounding error, its mean
difference from float32; no way may have twice the error of Megatron's own layers on packed sequences.

float32 means float32: Transformer Engine would use TF32 for its matrix products, and `NVIDIA_TF32_OVERRIDE=0` prevents
it. Each way has a process of its own, because a process that sees a GPU refuses to train on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.gpu.figures import SMALL, Figure, Scale, Setting, at_most
from bench.gpu.part import TE, in_new_process
from bench.gpu.trainer import make_actor, random_micro_batch, score
from rlsys.config.schema import Device, Dtype, Layers
from rlsys.observe.environment import version_of
from rlsys.weights.weight_map import read_architecture

FLOAT32_LIMIT, STEP_LIMIT, ROUNDING_LIMIT = 1e-3, 1e-3, 2.0
"""Largest difference of a log-prob in float32, in nats; largest relative difference of loss and gradient norm; largest
rounding error in bfloat16 over that of Megatron's own layers."""
_EXACT = {"NVIDIA_TF32_OVERRIDE": "0"}
_MICRO_BATCHES = 2


class Way(NamedTuple):
    """A way to compute log-probs."""

    layers: Layers
    dtype: Dtype
    packed: bool

    def __str__(self) -> str:
        return f"{self.layers}, {self.dtype}, {'packed' if self.packed else 'alone'}"


def measure(setting: Setting) -> Iterator[Figure]:
    """Yield the differences between all ways that this machine has, and between the profiles."""
    has_te = setting.on_gpu and all(map(version_of, TE))
    kinds = (Layers.local, Layers.te) if has_te else (Layers.local,)
    if setting.on_gpu and not has_te:
        yield Figure("Transformer Engine", "not measured: not installed")
    found: dict[Way, NDArray[np.float32]] = {}
    for dtype in (Dtype.float32, Dtype.bfloat16) if setting.on_gpu else (Dtype.float32,):
        for layers in kinds:
            packed, alone = in_new_process(log_probs, setting, layers, dtype, environment=_EXACT)
            ways = {Way(layers, dtype, True): packed, Way(layers, dtype, False): alone}
            found |= ways
            yield from differences(
                ways, found[Way(Layers.local, Dtype.float32, True)], found[Way(Layers.local, dtype, True)]
            )
    if setting.on_gpu:
        yield from _profiles(kinds)


def log_probs(setting: Setting, layers: Layers, dtype: Dtype) -> list[NDArray[np.float32]]:
    """Return the log-probs of the trained tokens of some sequences: packed, and alone. Call it in a new process."""
    scale, vocab = setting.scale, read_architecture(str(setting.model)).vocab
    seeds = range(max(scale.sequences))
    alone = [replace(random_micro_batch(scale, vocab, [seed]), packed=False) for seed in seeds]
    return score(setting.model, setting.device, layers, dtype, [[random_micro_batch(scale, vocab, seeds)], alone])


def differences(
    ways: Mapping[Way, NDArray[np.float32]], exact: NDArray[np.float32], own: NDArray[np.float32]
) -> Iterator[Figure]:
    """Yield the checks of `ways`, which have one dtype.

    `exact` and `own` are the log-probs of Megatron's own layers on packed sequences, in float32 and in the same dtype.
    """
    for way, found in ways.items():
        if way.dtype is Dtype.bfloat16:
            error, of_own = (float(np.abs(each - exact).mean()) for each in (found, own))
            yield Figure(f"{way}: mean rounding error", error, "nats")
            if found is not own:
                yield at_most(f"{way}: rounding error over that of own layers", error / of_own, ROUNDING_LIMIT)
        elif found is not own:
            yield at_most(f"{way}: largest difference", float(np.abs(found - exact).max()), FLOAT32_LIMIT, "nats")


def _profiles(kinds: tuple[Layers, ...]) -> Iterator[Figure]:
    """Yield the differences of one training step of the tiny policy, in float32, from the cpu profile's."""
    cpu = in_new_process(one_step, SMALL, Device.cpu, Layers.local, environment={"CUDA_VISIBLE_DEVICES": ""})
    for layers in kinds:
        gpu = in_new_process(one_step, SMALL, Device.gpu, layers, environment=_EXACT)
        for key, there in cpu.items():
            apart = abs(gpu[key] - there) / abs(there)
            yield at_most(f"{layers}: {key} of a training step", apart, STEP_LIMIT, "of the cpu profile's")


def one_step(scale: Scale, device: Device, layers: Layers) -> dict[str, float]:
    """Return loss and gradient norm of the tiny policy on random micro-batches. Call it in a new process."""
    folder: Path = scale.shape
    actor = make_actor(folder, device, Dtype.float32, layers=layers)
    vocab, count = read_architecture(str(folder)).vocab, max(scale.sequences)
    batches = [random_micro_batch(scale, vocab, range(n * count, (n + 1) * count)) for n in range(_MICRO_BATCHES)]
    stats = actor.accumulate(batches).stats
    return {"loss": stats["policy_loss"], "gradient norm": actor.apply().grad_norm}
