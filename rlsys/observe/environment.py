"""This machine: what settings of a run it cannot do, and the environment and lives that a run's folder tells.

`detect` looks at installed packages by their metadata and at devices through torch; it imports none of the libraries
that it names. `lacking` is pure. A default that has no meaning on a machine (CUDA graphs on a CPU) lacks nothing: only
what was asked for is a problem. What one process sees is said of its own machine and of no other: where a model is made,
which may be on one that nobody has looked at, `rlsys.trainer.model.layers` refuses what is lacking there; a search server
does so for its FAISS. What Transformer Engine's attention kernels need was read in its `get_attention_backend` (2.20).

A run's `run.json` has a life for each time it was begun or went on: {"lives": [{"begun": seconds since the epoch,
"after_step", "environment", "commit", "changed", "command"}]}. The environment is the driver's: of the process that was
started to train. Commit, and whether files differ from it, are null where the project is no checkout of git, or git is not
there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from rlsys.config.derived import megatron_groups
from rlsys.config.problems import Problem
from rlsys.config.schema import Attention, Device, Dtype, Layers, Mode, RunConfig
from rlsys.files import parse_json, read_regular, write_atomically

RUN = "run.json"
PACKAGES = (
    *("rlsys", "torch", "megatron-core", "transformer-engine", "sglang", "ray", "transformers"),
    *("faiss-cpu", "faiss-gpu-cu12"),
)
_log = logging.getLogger(__name__)
_PROJECT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 10.0
"""Of another program's answer."""
_GIB = 1024**3
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
    devices: dict[str, Any] = {}
    if torch_version := version_of("torch"):
        import torch

        nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        properties = map(torch.cuda.get_device_properties, range(count))
        oldest = min(((device.major, device.minor) for device in properties), default=None)
        devices = {"cuda_devices": count, "compute_capability": oldest, "nccl": nccl, "cuda": torch.version.cuda}
    return Capabilities(
        **devices,
        torch=torch_version,
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


def version_of(package: str) -> str | None:
    """Version of an installed package; None is absent."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@dataclass(frozen=True, slots=True)
class Life:
    """One time that a run was begun, or went on."""

    begun: float
    """Seconds since the epoch."""
    after_step: int
    """The step that it went on after; 0 for a run that begins."""
    environment: dict[str, str]
    """Of the driver's machine, see `environment`."""
    commit: str | None
    """Of the project."""
    changed: bool | None
    """Whether the project's files differ from the commit."""
    command: list[str]


def environment() -> dict[str, str]:
    """Describe the machine that this process is on, by name; what is not there, and packages not installed, are left out.

    All GPUs of the machine are told, whichever of them a run takes.
    """
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpus": str(os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / _GIB:.1f} GiB",
        **_gpus(shutil.which("nvidia-smi")),
        "python": platform.python_version(),
        **{name: found for name in PACKAGES if (found := version_of(name))},
    }


def changes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Packages with another version than before, a phrase each."""
    names = [name for name in PACKAGES if before.get(name) != now.get(name)]
    return [f"{name} {before.get(name, 'none')} -> {now.get(name, 'none')}" for name in names]


def tree_cpu_seconds() -> float:
    """Seconds of processor time that this process and its living descendants have used so far."""
    root = psutil.Process()
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def begin_life(run_dir: Path, after_step: int) -> None:
    """Add the life that begins now, in this process, to the folder of a run."""
    lives: list[Life] = []
    try:
        lives = read_lives(run_dir)
    except FileNotFoundError:
        pass
    except (OSError, ValueError):
        _log.warning("%s is damaged: the lives that the run had before are lost.", run_dir / RUN)
    commit, changed = commit_of(_PROJECT)
    lives.append(Life(time.time(), after_step, environment(), commit, changed, list(sys.argv)))
    write_atomically(run_dir / RUN, json.dumps({"lives": list(map(asdict, lives))}, indent=2) + "\n")


def commit_of(folder: Path) -> tuple[str | None, bool | None]:
    """The commit that the checkout at `folder` is at, and whether its files differ; None for what is not known."""
    git = ["git", "-C", str(folder), "--no-optional-locks"]  # No locks: somebody may be at work in the checkout.
    commit = _output([*git, "rev-parse", "HEAD"]) if (folder / ".git").exists() else None
    if commit is None:
        return None, None
    status = _output([*git, "status", "--porcelain"])
    return commit.strip(), None if status is None else bool(status)


def read_lives(run_dir: Path) -> list[Life]:
    """Read the lives of a run, in order. Raises OSError without a file, ValueError for one that is damaged."""
    try:
        found: list[dict[str, Any]] = parse_json(read_regular(run_dir / RUN))["lives"]
        return [Life(**life) for life in found]
    except (TypeError, LookupError) as damage:
        raise ValueError(f"{RUN} does not hold the lives of a run.") from damage


@cache
def _gpus(nvidia_smi: str | None) -> dict[str, str]:
    """Names and number of the machine's GPUs, their driver, and the CUDA that torch is built for; empty without any.

    Asked in another process, once: CUDA in this one would take memory of the cards, and a driver may take seconds.
    """
    query = ["--query-gpu=name,driver_version", "--format=csv,noheader"]
    output = _output([nvidia_smi, *query]) if nvidia_smi else None
    rows = [line.rpartition(", ") for line in (output or "").splitlines() if ", " in line]
    if not rows:
        return {}
    # Takes a second, which a machine without GPUs need not wait for.
    from torch.version import cuda

    cards = Counter(name for name, _, _ in rows)
    return {
        "gpus": ", ".join(f"{count} x {name}" for name, count in cards.items()),
        "gpu driver": rows[0][2].strip(),
        **({"cuda of torch": cuda} if cuda else {}),
    }


def _output(command: list[str]) -> str | None:
    """The output of a program; None if it cannot be asked, fails, or takes too long."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
