"""Measures the actor's optimiser step with Megatron's own layers (`local`) or Transformer Engine's (`te`).

Each size of micro-batch is measured with and without recomputed activations: seconds, tokens per second, utilisation,
and the peak of device memory against the plan. The MFU counts the operations that the model needs, the HFU also the
forward passes that are computed again. Full recomputation therefore limits the MFU to about 0.75 of the HFU. Steps are
timed after a whole step of the same size, because the first micro-batches compile kernels.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from bench.gpu.figures import Figure, Scale, Setting, compared
from bench.gpu.part import in_new_process
from bench.gpu.trainer import make_actor, random_micro_batch
from rlsys.cluster.planning.memory import MicroBatchLoad, group_memory
from rlsys.config.schema import ClusterConfig, Layers, ModelConfig, RunConfig
from rlsys.observe.spans import peak_flops
from rlsys.trainer.actor import Actor
from rlsys.weights.flops import flops_of
from rlsys.weights.weight_map import Architecture, read_architecture

PUBLISHED_MFU = 0.206
"""MFU logged by a published Search-R1 run."""
MFU_AIM = 0.5
"""Target of the MFU with Transformer Engine and without recomputation."""
_BACKWARD = 3
"""Cost of a forward and a backward pass, in forward passes."""


def measure(setting: Setting) -> Iterator[Figure]:
    """Yield the figures of each size, with recomputation and without, the one that takes most memory last."""
    layers = Layers.te if setting.part == "te" else Layers.local
    for recompute in (True, False):
        for sequences in setting.scale.sequences:
            # A process of its own, so that nothing of another actor counts as memory.
            yield from in_new_process(figures, setting, layers, recompute, sequences)


def figures(setting: Setting, layers: Layers, recompute: bool, sequences: int) -> list[Figure]:
    """Return the figures of micro-batches with this many sequences. Call it in a new process."""
    title = f"{sequences * setting.scale.length} tokens, {'recomputed' if recompute else 'kept'}"
    planned = estimate(setting.scale, sequences, layers, recompute)
    actor = make_actor(setting.model, setting.device, setting.dtype, recompute, layers)
    if setting.on_gpu and planned > (room := torch.cuda.mem_get_info()[1]):
        return [Figure(title, f"not measured: {planned / 2**30:.0f} GiB planned, {room / 2**30:.0f} GiB here")]
    seconds, held = _time(actor, setting, sequences)
    found = list(_speeds(title, setting, sequences, recompute, seconds))
    if setting.on_gpu:
        found.append(compared(f"{title}: memory", held / 2**30, "GiB", "the plan", planned / 2**30, (0.9, 1.1)))
    if layers is Layers.te:
        from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends

        found.append(Figure(f"{title}: attention", backend_name(_attention_backends)))
    return found


def _time(actor: Actor, setting: Setting, sequences: int) -> tuple[float, int]:
    """Return the seconds of an optimiser step and the peak of allocated device memory, in bytes (0 on a CPU)."""
    scale, vocab = setting.scale, read_architecture(str(setting.model)).vocab
    seeds = [range(sequences * number, sequences * (number + 1)) for number in range(scale.micro_batches)]
    batches = [random_micro_batch(scale, vocab, of_batch) for of_batch in seeds]

    def steps(count: int) -> float:
        started = _now(setting)
        for _ in range(count):
            actor.accumulate(batches)
            actor.apply()
        return _now(setting) - started

    steps(1)
    if setting.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = steps(scale.steps) / scale.steps
    return seconds, torch.cuda.max_memory_allocated() if setting.on_gpu else 0


def _speeds(title: str, setting: Setting, sequences: int, recompute: bool, seconds: float) -> Iterator[Figure]:
    scale, architecture = setting.scale, read_architecture(str(setting.model))
    model, hardware = operations(architecture, scale, sequences, recompute)
    yield Figure(f"{title}: step", seconds, "s")
    yield Figure(f"{title}: speed", scale.micro_batches * sequences * scale.length / seconds, "tokens/s")
    peak = peak_flops([torch.cuda.get_device_name()]) if setting.on_gpu else None
    if peak is None:
        yield Figure(f"{title}: rate", model / seconds / 1e12, "TFLOP/s")
        return
    mfu, hfu = model / seconds / peak, hardware / seconds / peak
    aimed = {"target": f"at least {MFU_AIM}", "met": mfu >= MFU_AIM} if setting.part == "te" and not recompute else {}
    yield Figure(f"{title}: MFU", mfu, "", "a published run", mfu / PUBLISHED_MFU, **aimed)
    yield Figure(f"{title}: HFU", hfu)


def operations(architecture: Architecture, scale: Scale, sequences: int, recompute: bool) -> tuple[float, float]:
    """Return the floating-point operations of a step: those that the model needs, and those that are computed.

    Recomputation repeats the forward pass of the layers, not that of the output layer.
    """
    cost, count = flops_of(architecture), scale.micro_batches * sequences
    needed = _BACKWARD * count * cost.of(scale.length, round(scale.trained * scale.length))
    return needed, needed + (count * cost.of(scale.length, 0) if recompute else 0.0)


def estimate(scale: Scale, sequences: int, layers: Layers, recompute: bool) -> float:
    """Return the bytes that the plan estimates for the actor."""
    config = RunConfig(
        model=ModelConfig(str(scale.shape), layers=layers, recompute=recompute),
        cluster=ClusterConfig(placement={"actor": "0", "inference": "1", "rollout": "2"}),
    )
    load = MicroBatchLoad(
        tokens=sequences * scale.length,
        targets=round(scale.trained * scale.length) * sequences,
        width=scale.length,
    )
    return group_memory(config, read_architecture(str(scale.shape)), "actor", load).total


def backend_name(chosen: Mapping[str, Any]) -> str:
    """Return the name of the attention kernel in Transformer Engine's record of its last choice."""
    if chosen["use_flash_attention"]:
        return f"flash {chosen['flash_attention_backend']}"
    if chosen["use_fused_attention"]:
        return f"fused (cuDNN, {chosen['fused_attention_backend']})"
    return "unfused" if chosen["use_unfused_attention"] else "none"


def _now(setting: Setting) -> float:
    if setting.on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()
