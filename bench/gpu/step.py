"""Measures speed, utilisation (MFU) and memory of the actor's optimiser step; compares memory with the plan."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from bench.gpu.figures import Figure, Scale
from bench.gpu.trainer import layers_here, make_actor, random_micro_batch
from rlsys.cluster.planning.memory import MicroBatchLoad, group_memory
from rlsys.config.schema import ClusterConfig, Device, Dtype, ModelConfig, RunConfig
from rlsys.observe.spans import peak_flops
from rlsys.weights.flops import flops_of
from rlsys.weights.weight_map import read_architecture

PUBLISHED_MFU = 0.206
"""MFU logged by a published Search-R1 run."""
_BACKWARD = 3
"""Cost of a forward and a backward pass, in forward passes."""


def measure(scale: Scale, device: Device, folder: Path) -> list[Figure]:
    """Return seconds per step, tokens and FLOPs per second; on a GPU also the peak allocation and the MFU."""
    on_gpu = device is Device.gpu
    actor = make_actor(str(folder), device, Dtype.bfloat16 if on_gpu else Dtype.float32, recompute=True)
    architecture = read_architecture(str(folder))
    batches = [random_micro_batch(scale, architecture.vocab, seed) for seed in range(scale.micro_batches)]
    actor.accumulate(batches)
    actor.apply()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    started = _now(on_gpu)
    for _ in range(scale.steps):
        actor.accumulate(batches)
        actor.apply()
    seconds = (_now(on_gpu) - started) / scale.steps
    tokens = scale.micro_batches * scale.sequences * scale.length
    targets = round(scale.trained * scale.length)
    flops = flops_of(architecture).of(scale.length, targets) * scale.micro_batches * scale.sequences * _BACKWARD
    figures = [
        Figure("step", "seconds", seconds, "s"),
        Figure("step", "tokens a second", tokens / seconds, "tokens/s"),
        Figure("step", "rate", flops / seconds / 1e12, "TFLOP/s"),
    ]
    if not on_gpu:
        return figures
    estimate = _estimate(scale, folder)
    held = torch.cuda.max_memory_allocated()
    figures.append(
        Figure(
            "step",
            "memory",
            held / 2**30,
            "GiB",
            "the plan's estimate",
            held / estimate,
            "ratio of 0.9 to 1.1",
        )
    )
    peak = peak_flops([torch.cuda.get_device_name()])
    if peak:
        mfu = flops / seconds / peak
        figures.append(Figure("step", "MFU", mfu, "", "a published run", mfu / PUBLISHED_MFU, "value of 0.5"))
    return figures


def _estimate(scale: Scale, folder: Path) -> float:
    """Return the bytes that the plan estimates for this actor with the layers detected here."""
    config = RunConfig(
        model=ModelConfig(str(folder), layers=layers_here(), recompute=True),
        cluster=ClusterConfig(placement={"actor": "0", "inference": "1", "rollout": "2"}),
    )
    tokens = scale.sequences * scale.length
    load = MicroBatchLoad(tokens, targets=round(scale.trained * scale.length) * scale.sequences, width=scale.length)
    return group_memory(config, read_architecture(str(folder)), "actor", load).total


def _now(on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()
