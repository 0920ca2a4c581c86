"""Detects what this machine can do, and refuses settings of a run that need something it lacks, before anything starts.

`detect` looks at installed packages by their metadata and at devices through torch; it imports none of the libraries
that it names. `lacking` is pure. A default that has no meaning on a machine (CUDA graphs on a CPU) lacks nothing: only
what was asked for is a problem. What one process sees is said of its own machine and of no other: where a model is made,
which may be on one that nobody has looked at, `rlsys.trainer.model.layers` refuses what is lacking there; a search server
does so for its FAISS.

What Transformer Engine's attention kernels need was read in its `get_attention_backend` (2.20).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

from rlsys.config.derived import megatron_groups
from rlsys.config.problems import Problem
from rlsys.config.schema import Attention, Device, Dtype, Layers, Mode, RunConfig

AMPERE, ADA, HOPPER = (8, 0), (8, 9), (9, 0)
"""Compute capabilities: the first with bfloat16, the first with FP8, the first with FlashAttention 3 and 4."""
_APEX_KERNELS = ("amp_C", "fused_weight_gradient_mlp_cuda")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Devices that torch can use here, and versions of installed packages; None is absent."""

    cuda_devices: int = 0
    compute_capability: tuple[int, int] | None = None
    """Of the oldest device."""
    nccl: bool = False
    """Whether torch is built with NCCL."""
    torch: str | None = None
    cuda: str | None = None
    """That torch is built for."""
    transformer_engine: str | None = None
    """Its PyTorch part, without which the rest cannot be used here."""
    flash_attn: str | None = None
    """FlashAttention 2."""
    flash_attn_3: str | None = None
    flash_attn_4: str | None = None
    apex: bool = False
    """NVIDIA's apex, with the kernels that add weight gradients to their buffer."""
    foreign_apex: str | None = None
    """Another project that PyPI has under the name of apex."""
    sglang_kernel: str | None = None
    torch_memory_saver: str | None = None

    @property
    def layers(self) -> Layers:
        """Meaning of `model.layers=auto`."""
        return Layers.te if self.transformer_engine is not None and self.cuda_devices else Layers.local

    def at_least(self, capability: tuple[int, int]) -> bool:
        """Whether there is a device, and none older than `capability`."""
        return self.compute_capability is not None and self.compute_capability >= capability

    @property
    def flash_kernels(self) -> bool:
        """Whether Transformer Engine finds a FlashAttention that runs on these devices."""
        two = self.flash_attn if self.at_least(AMPERE) else None
        three = self.flash_attn_3 if self.compute_capability == HOPPER else None
        four = self.flash_attn_4 if self.at_least(HOPPER) else None
        return (two, three, four) != (None, None, None)


def detect() -> Capabilities:
    """Look at this machine. Where torch sees devices it initialises CUDA in this process, which must not fork after that."""
    # Built from source, one package holds all parts of Transformer Engine.
    built = version_of("transformer-engine") if _is_there("transformer_engine_torch") else None
    apex = all(map(_is_there, _APEX_KERNELS))
    return replace(
        _devices(),
        transformer_engine=version_of("transformer-engine-torch") or built,
        flash_attn=version_of("flash-attn"),
        flash_attn_3=version_of("flash-attn-3"),
        flash_attn_4=version_of("flash-attn-4"),
        apex=apex,
        foreign_apex=None if any(map(_is_there, _APEX_KERNELS)) else version_of("apex"),
        sglang_kernel=version_of("sglang-kernel"),
        torch_memory_saver=version_of("torch-memory-saver"),
    )


def lacking(config: RunConfig, here: Capabilities) -> Iterator[Problem]:
    """Every setting of `config` that asks for what a machine with `here` does not have, and what to do."""
    yield from _layers(config, here)
    if config.cluster.device is Device.cpu:
        return
    yield from _for_gpu(config, here)
    if here.cuda_devices:
        yield from _attention(config, here)
        yield from _numbers(config, here)


def _layers(config: RunConfig, here: Capabilities) -> Iterator[Problem]:
    if config.model.layers is Layers.te and config.cluster.device is Device.cpu:
        yield Problem.of(
            "model.layers=te with cluster.device=cpu: Transformer Engine computes on GPUs alone; use "
            "model.layers=local."
        )
    elif config.model.layers is Layers.te and here.transformer_engine is None:
        yield Problem.of(
            "model.layers=te, and Transformer Engine is not installed: install transformer-engine[pytorch] as "
            "requirements/gpu.txt says, or use model.layers=local."
        )
    if config.model.attention is not Attention.auto and _resolved(config, here) is Layers.local:
        yield Problem.of(
            f"model.attention={config.model.attention} chooses among Transformer Engine's kernels, and the layers are "
            "Megatron's own, which have torch's attention alone: use model.attention=auto, or model.layers=te."
        )
    if config.model.fp8 and _resolved(config, here) is Layers.local:
        yield Problem.of(
            "model.fp8=true needs Transformer Engine's layers, and these are Megatron's own: use model.layers=te on "
            "GPUs, or model.fp8=false."
        )


def _for_gpu(config: RunConfig, here: Capabilities) -> Iterator[Problem]:
    """Devices and packages without which the gpu profile, or a part of it, does not start."""
    if not here.cuda_devices:
        build = f"built for CUDA {here.cuda}" if here.cuda else "built without CUDA"
        yield Problem.of(
            f"cluster.device=gpu, and torch {here.torch}, {build}, finds no CUDA device here: run on a machine with "
            "NVIDIA GPUs, look at CUDA_VISIBLE_DEVICES and the driver, or set cluster.device=cpu."
        )
    if not here.nccl:
        yield Problem.of(
            f"cluster.device=gpu, and torch {here.torch} has no NCCL: install torch as requirements/gpu.txt says."
        )
    if here.sglang_kernel is None:
        yield Problem.of(
            "cluster.device=gpu, and SGLang's kernels are not installed: install sglang-kernel as requirements/gpu.txt "
            "says."
        )
    if config.cluster.mode is Mode.collocated and here.torch_memory_saver is None:
        yield Problem.of(
            "cluster.mode=collocated has engines give their memory to the trainer in turns, and torch-memory-saver is "
            "not installed: install it as requirements/gpu.txt says, or place the groups apart."
        )
    if config.model.fusions and here.foreign_apex is not None:
        yield Problem(
            "model.fusions",
            f"The package apex {here.foreign_apex} that is installed is not NVIDIA's, whose name it bears: pip uninstall "
            "apex, and build NVIDIA's from its source if it is wanted.",
        )


def _attention(config: RunConfig, here: Capabilities) -> Iterator[Problem]:
    """Kernels of Transformer Engine that were asked for by name, and those that context parallelism needs."""
    if _resolved(config, here) is Layers.local:
        return
    asked, dtype = config.model.attention, config.model.dtype
    if asked in (Attention.flash, Attention.fused) and dtype is Dtype.float32:
        yield Problem.of(
            f"model.attention={asked} computes in bfloat16, and model.dtype is float32: use model.attention=unfused."
        )
    if asked is Attention.flash and not here.flash_kernels:
        yield Problem.of(
            f"model.attention=flash, and no FlashAttention that runs on compute capability {_spoken(here)} is "
            "installed: install flash-attn-4 (9.0 and newer) or flash-attn (8.0 and newer), or use model.attention=auto."
        )
    if asked is Attention.fused and not here.at_least(AMPERE):
        yield Problem.of(
            f"model.attention=fused needs compute capability 8.0, and this machine has {_spoken(here)}: use "
            "model.attention=unfused."
        )
    # Packed sequences over several ranks, the padding of each a part of it, every FlashAttention takes.
    for group, settings in megatron_groups(config).items():
        key, cp = f"{group}.parallel.cp", settings.parallel.cp
        if cp > 1 and (asked is Attention.unfused or dtype is Dtype.float32):
            yield Problem.of(
                f"{key}={cp}: of Transformer Engine's attention kernels the unfused one, all that there is for "
                f"model.attention={asked} with model.dtype={dtype}, knows no context parallelism: use "
                "model.attention=fused with model.dtype=bfloat16, or model.layers=local."
            )


def _numbers(config: RunConfig, here: Capabilities) -> Iterator[Problem]:
    for key, dtype in (("model.dtype", config.model.dtype), ("rollout.engine.dtype", config.rollout.engine.dtype)):
        if dtype is Dtype.bfloat16 and not here.at_least(AMPERE):
            yield Problem.of(
                f"{key}=bfloat16 needs compute capability 8.0, and this machine has {_spoken(here)}: use float32, or "
                "newer GPUs."
            )
    if config.model.fp8 and not here.at_least(ADA):
        yield Problem.of(
            f"model.fp8=true needs compute capability 8.9 (Ada, Hopper or newer), and this machine has {_spoken(here)}: "
            "set it to false."
        )


def _resolved(config: RunConfig, here: Capabilities) -> Layers:
    """The layers that are used: on a CPU Megatron's own."""
    if config.model.layers is not Layers.auto:
        return config.model.layers
    return Layers.local if config.cluster.device is Device.cpu else here.layers


def _spoken(here: Capabilities) -> str:
    return "none" if here.compute_capability is None else ".".join(map(str, here.compute_capability))


def _devices() -> Capabilities:
    installed = version_of("torch")
    if installed is None:
        return Capabilities()
    import torch

    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.cuda.get_device_properties(index) for index in range(count)]
    oldest = min(((device.major, device.minor) for device in devices), default=None)
    return Capabilities(count, oldest, nccl, torch=installed, cuda=torch.version.cuda)


def version_of(package: str) -> str | None:
    """Version of an installed package; None is absent."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
