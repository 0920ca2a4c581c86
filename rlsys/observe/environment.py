"""Checks a configuration against this machine, and records the environment of each launch in the run folder.

`detect` reads package metadata and queries devices through torch; it imports none of the other packages.
`unmet_requirements` is pure. It reports only settings that were requested; a default that has no effect on this
machine, such as CUDA graphs on a CPU, is no problem. The result holds only for this machine. Workers on other machines
check again: `rlsys.trainer.model.layers` when it builds a model, a search server when it loads FAISS. The requirements
of the attention kernels follow the function `get_attention_backend` of Transformer Engine 2.20.

`run.json` has one entry ("life") for each launch or resume of the run: {"lives": [{"begun": seconds since the epoch,
"after_step", "environment", "commit", "changed", "command"}]}. The environment describes the machine of the driver. `commit`
and `changed` are null outside a git checkout and where git is missing.
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

from rlsys.config.derived import chosen_layers, megatron_groups
from rlsys.config.problems import conflict
from rlsys.config.schema import Attention, Device, Dtype, Layers, Mode, RunConfig, SglangConfig
from rlsys.errors import UserError
from rlsys.files import parse_json, read_regular, write_atomically

RUN = "run.json"
PACKAGES = (
    *("rlsys", "torch", "megatron-core", "transformer-engine", "sglang", "ray", "transformers"),
    *("faiss-cpu", "faiss-gpu-cu12"),
)
_log = logging.getLogger(__name__)
INSTALL = {
    "cpu": "pip install -r requirements/cpu.txt && pip install --no-deps -r requirements/cpu-nodeps.txt",
    "gpu": "./scripts/setup_gpu.sh",
}
"""Profile -> command that installs its packages."""
_PROJECT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 10.0
"""Timeout of a subprocess."""
_GIB = 1024**3
AMPERE, ADA, HOPPER = (8, 0), (8, 9), (9, 0)
"""Compute capabilities: the first with bfloat16, the first with FP8, the first with FlashAttention 3 and 4."""
_APEX_KERNELS = ("amp_C", "fused_weight_gradient_mlp_cuda")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Devices that torch can use here, and versions of installed packages (None: not installed)."""

    cuda_devices: int = 0
    compute_capability: tuple[int, int] | None = None
    """Lowest compute capability of the devices."""
    nccl: bool = False
    """True if torch is built with NCCL."""
    torch: str | None = None
    cuda: str | None = None
    """CUDA version that torch is built for."""
    transformer_engine: str | None = None
    """Version of Transformer Engine's PyTorch extension; rlsys cannot use the core package without the extension."""
    flash_attn: str | None = None
    """FlashAttention 2."""
    flash_attn_3: str | None = None
    flash_attn_4: str | None = None
    apex: bool = False
    """True if NVIDIA's apex is installed with the kernels that accumulate weight gradients."""
    foreign_apex: str | None = None
    """Version of the unrelated PyPI package named apex."""
    sglang_kernel: str | None = None
    torch_memory_saver: str | None = None

    def at_least(self, capability: tuple[int, int]) -> bool:
        """Return True if this machine has devices and each has at least compute `capability`."""
        return self.compute_capability is not None and self.compute_capability >= capability

    @property
    def flash_kernels(self) -> bool:
        """True if an installed FlashAttention runs on these devices."""
        two = self.flash_attn if self.at_least(AMPERE) else None
        three = self.flash_attn_3 if self.compute_capability == HOPPER else None
        four = self.flash_attn_4 if self.at_least(HOPPER) else None
        return (two, three, four) != (None, None, None)


def detect() -> Capabilities:
    """Inspect this machine. On a GPU machine this initialises CUDA, so the process must not fork afterwards."""
    # A source build has one package instead of transformer-engine-torch and its siblings.
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


def unmet_requirements(config: RunConfig, here: Capabilities) -> Iterator[UserError]:
    """Yield a problem, with its fix, for each setting of `config` that the capabilities `here` do not support."""
    yield from _layers(config, here)
    if config.cluster.device is Device.cpu:
        return
    yield from _for_gpu(config, here)
    if here.cuda_devices:
        yield from _attention(config, here)
        yield from _numbers(config, here)


def _layers(config: RunConfig, here: Capabilities) -> Iterator[UserError]:
    layers = chosen_layers(config)
    if layers is Layers.te and config.cluster.device is Device.cpu:
        yield conflict(
            "model.layers=te does not work with cluster.device=cpu: Transformer Engine needs GPUs; use "
            "model.layers=local."
        )
    elif layers is Layers.te and here.transformer_engine is None:
        yield conflict(
            f"model.layers={config.model.layers} needs Transformer Engine on GPUs, which is not installed: install "
            "transformer-engine[pytorch] as in requirements/gpu.txt, or use model.layers=local, whose layers are several "
            "times slower."
        )
    if config.model.attention is not Attention.auto and layers is Layers.local:
        yield conflict(
            f"model.attention={config.model.attention} selects a kernel of Transformer Engine, but the layers are "
            "Megatron's own, which only have torch's attention: use model.attention=auto, or model.layers=te."
        )
    if config.model.fp8 and layers is Layers.local:
        yield conflict(
            "model.fp8=true needs Transformer Engine's layers, but the layers are Megatron's own: use model.layers=te on "
            "GPUs, or model.fp8=false."
        )


def _for_gpu(config: RunConfig, here: Capabilities) -> Iterator[UserError]:
    """Yield a problem for each missing device or package without which a run on GPUs does not start."""
    if not here.cuda_devices:
        build = f"built for CUDA {here.cuda}" if here.cuda else "built without CUDA"
        yield conflict(
            f"cluster.device=gpu needs a CUDA device, and torch {here.torch}, {build}, finds none: run on a machine with "
            "NVIDIA GPUs, check CUDA_VISIBLE_DEVICES and the driver, or set cluster.device=cpu."
        )
    if not here.nccl:
        yield conflict(
            f"cluster.device=gpu needs NCCL, and torch {here.torch} is built without it: install torch as in "
            "requirements/gpu.txt."
        )
    if here.sglang_kernel is None and isinstance(config.rollout.engine, SglangConfig):
        yield conflict(
            "cluster.device=gpu needs SGLang's kernels, which are not installed: install sglang-kernel as in "
            "requirements/gpu.txt."
        )
    saves = isinstance(config.rollout.engine, SglangConfig) and config.cluster.mode is Mode.colocated
    if saves and here.torch_memory_saver is None:
        yield conflict(
            "cluster.mode=colocated needs torch-memory-saver to free the engines' memory while the trainer runs, and it "
            "is not installed: install it as in requirements/gpu.txt, or place the groups on devices of their own."
        )
    if config.model.fusions and here.foreign_apex is not None:
        yield UserError(
            f"The installed package apex {here.foreign_apex} is not NVIDIA's apex but another project of that name: run "
            "`pip uninstall apex`, and build NVIDIA's from source if you want it.",
            code="conflict",
            key="model.fusions",
        )


def _attention(config: RunConfig, here: Capabilities) -> Iterator[UserError]:
    """Yield a problem for each kernel of Transformer Engine that is needed but cannot run on this machine.

    A kernel is needed if it is requested by name or for context parallelism; `auto` needs a fused kernel.
    """
    if chosen_layers(config) is Layers.local:
        return
    asked, dtype = config.model.attention, config.model.dtype
    if asked is Attention.auto and dtype is Dtype.float32:
        yield conflict(
            "model.attention=auto with model.dtype=float32 leaves only Transformer Engine's unfused kernel, which holds "
            "matrices of the squared length: use model.dtype=bfloat16 or model.layers=local, or ask for that kernel with "
            "model.attention=unfused."
        )
    if asked in (Attention.flash, Attention.fused) and dtype is Dtype.float32:
        yield conflict(
            f"model.attention={asked} needs model.dtype=bfloat16, and model.dtype is float32: use "
            "model.attention=unfused."
        )
    if asked is Attention.flash and not here.flash_kernels:
        yield conflict(
            f"model.attention=flash needs a FlashAttention that runs on compute capability {_spoken(here)}, and none is "
            "installed: install flash-attn-4 (9.0 and newer) or flash-attn (8.0 and newer), or use model.attention=auto."
        )
    if asked is Attention.fused and not here.at_least(AMPERE):
        yield conflict(
            f"model.attention=fused needs compute capability 8.0, and this machine has {_spoken(here)}: use "
            "model.attention=unfused."
        )
    # Every FlashAttention supports context parallelism over packed sequences with padding inside each sequence.
    for group, settings in megatron_groups(config).items():
        key, cp = f"{group}.parallel.cp", settings.parallel.cp
        if cp > 1 and asked is Attention.unfused:
            yield conflict(
                f"{key}={cp} needs an attention kernel with context parallelism, and model.attention=unfused has none: "
                "use model.attention=fused with model.dtype=bfloat16, or model.layers=local."
            )


def _numbers(config: RunConfig, here: Capabilities) -> Iterator[UserError]:
    for key, dtype in (("model.dtype", config.model.dtype), ("rollout.engine.dtype", config.rollout.engine.dtype)):
        if dtype is Dtype.bfloat16 and not here.at_least(AMPERE):
            yield conflict(
                f"{key}=bfloat16 needs compute capability 8.0, and this machine has {_spoken(here)}: use float32, or "
                "newer GPUs."
            )
    if config.model.fp8 and not here.at_least(ADA):
        yield conflict(
            f"model.fp8=true needs compute capability 8.9 (Ada, Hopper or newer), and this machine has {_spoken(here)}: "
            "set it to false."
        )


def _spoken(here: Capabilities) -> str:
    return "none" if here.compute_capability is None else ".".join(map(str, here.compute_capability))


def version_of(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a run, fresh or resumed."""

    begun: float
    """Seconds since the epoch."""
    after_step: int
    """Step after which the launch resumed; 0 for a fresh run."""
    environment: dict[str, str]
    """Environment of the driver's machine; see `environment`."""
    commit: str | None
    """Git commit of the project; None if unknown."""
    changed: bool | None
    """True if the project's files differ from the commit; None if unknown."""
    command: list[str]


def environment() -> dict[str, str]:
    """Describe this machine: hardware and package versions by name. Absent hardware and packages are left out.

    Lists all GPUs of the machine, including those that the run does not use.
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
    """Return one phrase per package whose version changed, such as "torch 2.10.0 -> 2.11.0"."""
    names = [name for name in PACKAGES if before.get(name) != now.get(name)]
    return [f"{name} {before.get(name, 'none')} -> {now.get(name, 'none')}" for name in names]


def tree_cpu_seconds() -> float:
    """Return the CPU seconds that this process and its living descendants have used so far."""
    root = psutil.Process()
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def record_launch(run_dir: Path, after_step: int) -> None:
    """Append this launch to the run's run.json."""
    launches: list[Launch] = []
    try:
        launches = read_launches(run_dir)
    except FileNotFoundError:
        pass
    except (OSError, ValueError):
        _log.warning("%s is damaged: the record of earlier launches of this run is lost.", run_dir / RUN)
    commit, changed = commit_of(_PROJECT)
    launches.append(Launch(time.time(), after_step, environment(), commit, changed, list(sys.argv)))
    write_atomically(run_dir / RUN, json.dumps({"lives": list(map(asdict, launches))}, indent=2) + "\n")


def commit_of(folder: Path) -> tuple[str | None, bool | None]:
    """Return the commit of the git checkout at `folder`, and True if files differ from it; None for what is unknown."""
    git = ["git", "-C", str(folder), "--no-optional-locks"]  # No locks: other git commands may run in the checkout.
    commit = _output([*git, "rev-parse", "HEAD"]) if (folder / ".git").exists() else None
    if commit is None:
        return None, None
    status = _output([*git, "status", "--porcelain"])
    return commit.strip(), None if status is None else bool(status)


def read_launches(run_dir: Path) -> list[Launch]:
    """Read the launches of a run, oldest first. Raises OSError without run.json, ValueError if it is damaged."""
    try:
        found: list[dict[str, Any]] = parse_json(read_regular(run_dir / RUN))["lives"]
        return [Launch(**launch) for launch in found]
    except (TypeError, LookupError) as damage:
        raise ValueError(f"{RUN} does not hold the launches of a run.") from damage


@cache
def _gpus(nvidia_smi: str | None) -> dict[str, str]:
    """Return GPU names and counts, driver version and torch's CUDA version; empty without a GPU.

    Runs nvidia-smi as a subprocess, because CUDA in this process would allocate GPU memory. The result is cached,
    because the GPU driver may take seconds to answer.
    """
    query = ["--query-gpu=name,driver_version", "--format=csv,noheader"]
    output = _output([nvidia_smi, *query]) if nvidia_smi else None
    rows = [line.rpartition(", ") for line in (output or "").splitlines() if ", " in line]
    if not rows:
        return {}
    # The import takes a second; machines without GPUs skip it.
    from torch.version import cuda

    cards = Counter(name for name, _, _ in rows)
    return {
        "gpus": ", ".join(f"{count} x {name}" for name, count in cards.items()),
        "gpu driver": rows[0][2].strip(),
        **({"cuda of torch": cuda} if cuda else {}),
    }


def _output(command: list[str]) -> str | None:
    """Return the stdout of a command; None if it does not start, fails or times out."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
