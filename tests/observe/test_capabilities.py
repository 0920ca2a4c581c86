"""What a machine lacks for a config is said, each thing once, with the key to change; what it has is not."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rlsys.config.schema import (
    Attention,
    ClusterConfig,
    Device,
    Dtype,
    EngineConfig,
    Layers,
    Mode,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
    SyncMode,
)
from rlsys.observe.environment import Capabilities, detect, lacking
from tests.support.capabilities import H100

LAPTOP = Capabilities(torch="2.13.0+cpu")
A100 = replace(H100, compute_capability=(8, 0), flash_attn="2.8.3", flash_attn_4=None)
V100 = replace(H100, compute_capability=(7, 0), flash_attn_4=None)


def config(
    device: Device = Device.gpu,
    mode: Mode = Mode.disaggregated,
    sync: SyncMode = SyncMode.tensor,
    cp: int = 1,
    **model: Any,
) -> RunConfig:
    made = RunConfig(
        model=ModelConfig(path="model", **model),
        cluster=ClusterConfig(device=device, mode=mode, sync_mode=sync),
        rollout=RolloutConfig(engine=EngineConfig(dtype=model.get("dtype", Dtype.bfloat16))),
    )
    made.actor.parallel = ParallelConfig(cp=cp)
    return made


def keys(asked: RunConfig, here: Capabilities) -> list[str]:
    return [problem.key for problem in lacking(asked, here)]


FULL = config(mode=Mode.collocated, sync=SyncMode.ipc, cp=2, layers=Layers.te, attention=Attention.flash, fp8=True)
ANY_FLASH = config(attention=Attention.flash)


@pytest.mark.parametrize(
    ("here", "asked"),
    [
        (H100, config()),
        (H100, FULL),
        (LAPTOP, config(Device.cpu)),
        (LAPTOP, config(Device.cpu, Mode.collocated, SyncMode.broadcast)),
        (V100, config(dtype=Dtype.float32)),
        (H100, config(cp=2, layers=Layers.local)),
        (H100, config(cp=2, layers=Layers.local, dtype=Dtype.float32)),
        # Any FlashAttention of the GPU's generation will do.
        (A100, ANY_FLASH),
        (replace(H100, flash_attn_3="3.0.0", flash_attn_4=None), ANY_FLASH),
        (replace(H100, flash_attn="2.8.3", flash_attn_4=None), ANY_FLASH),
    ],
)
def test_a_machine_that_has_all_lacks_nothing(here: Capabilities, asked: RunConfig) -> None:
    assert keys(asked, here) == []


def test_everything_is_said_at_once() -> None:
    # No device, no NCCL, no kernels of SGLang: three sentences of one key.
    everywhere = ["model.layers", *["cluster.device"] * 3, "cluster.mode"]
    assert keys(config(mode=Mode.collocated, layers=Layers.te, fp8=True), LAPTOP) == everywhere
    assert keys(config(), V100) == ["model.dtype", "rollout.engine.dtype"], "it has no bfloat16"


@pytest.mark.parametrize(
    ("here", "asked", "key"),
    [
        (replace(H100, transformer_engine=None), config(layers=Layers.te), "model.layers"),
        (LAPTOP, config(Device.cpu, layers=Layers.te), "model.layers"),
        (replace(H100, transformer_engine=None), config(attention=Attention.fused), "model.attention"),
        (H100, config(layers=Layers.local, attention=Attention.flash), "model.attention"),
        (H100, config(attention=Attention.flash, dtype=Dtype.float32), "model.attention"),
        (replace(A100, flash_attn=None, flash_attn_4="4"), config(attention=Attention.flash), "model.attention"),
        (H100, config(layers=Layers.local, fp8=True), "model.fp8"),
        (LAPTOP, config(Device.cpu, fp8=True), "model.fp8"),
        (A100, config(fp8=True), "model.fp8"),
        (replace(H100, sglang_kernel=None), config(), "cluster.device"),
        (replace(H100, nccl=False), config(), "cluster.device"),
        (replace(H100, torch_memory_saver=None), config(mode=Mode.collocated), "cluster.mode"),
        (replace(H100, foreign_apex="0.9.10"), config(), "model.fusions"),
        (H100, config(cp=2, attention=Attention.unfused), "actor.parallel.cp"),
        (H100, config(cp=2, dtype=Dtype.float32), "actor.parallel.cp"),
    ],
)
def test_what_is_lacking_is_named(here: Capabilities, asked: RunConfig, key: str) -> None:
    assert keys(asked, here) == [key]


Installed = Callable[..., Capabilities]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    """What is detected where these packages and modules are there besides torch."""

    def installed(packages: dict[str, str], modules: tuple[str, ...] = ()) -> Capabilities:
        def version(name: str) -> str:
            if name in packages:
                return packages[name]
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr("rlsys.observe.environment.version", version)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in modules else None)
        return detect()

    return installed


def test_apex_is_known_by_its_kernels_and_not_by_its_name(installed: Installed) -> None:
    kernels = ("amp_C", "fused_weight_gradient_mlp_cuda")
    theirs = installed({"apex": "0.9.10.dev0"})
    assert (theirs.apex, theirs.foreign_apex) == (False, "0.9.10.dev0")
    nvidia = installed({"apex": "0.1"}, kernels)
    assert (nvidia.apex, nvidia.foreign_apex) == (True, None)
    half = installed({"apex": "0.1"}, kernels[:1])
    assert (half.apex, half.foreign_apex) == (False, None), "NVIDIA's, built without the kernel that is wanted"
    assert installed({}) == Capabilities(), "and without torch nothing is known of devices"


def test_transformer_engine_is_its_part_for_torch(installed: Installed) -> None:
    assert installed({"transformer-engine": "2.20.2"}).transformer_engine is None
    wheels = {"transformer-engine": "2.20.2", "transformer-engine-torch": "2.20.2"}
    assert installed(wheels).transformer_engine == "2.20.2"
    built = installed({"transformer-engine": "2.21.0+abc"}, ("transformer_engine_torch",))
    assert built.transformer_engine == "2.21.0+abc"


def test_auto_layers_are_those_of_transformer_engine_where_it_can_work() -> None:
    assert H100.layers is Layers.te
    assert replace(H100, cuda_devices=0).layers is Layers.local
