"""Tests of saving and resuming: the state when a save begins, whole or absent checkpoints, refused damage."""

import os
import random
import shutil
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from rlsys.config.algorithm import AlgorithmConfig, FullKl
from rlsys.config.schema import Dtype, ParallelConfig
from rlsys.errors import Code, RunError, UserError
from rlsys.trainer.actor import Actor
from rlsys.trainer.log_prob import ReferencePlan
from rlsys.trainer.model.layers import RMSNorm
from rlsys.trainer.model.logprobs import divergence_of
from rlsys.trainer.model.stage_model import PolicyModel
from rlsys.trainer.offload import OffloadStats
from rlsys.weights.checkpoint.store import WriteStats, is_complete
from tests.support import tiny_configs
from tests.support.megatron_processes import Host, HostedGroup, fresh, pool, rendezvous
from tests.trainer import reference
from tests.trainer.harness import OBJECTIVE, OPTIMIZER, local_model, weights_of

DP2, TP2, CP2, EP2 = ParallelConfig(), ParallelConfig(tp=2), ParallelConfig(cp=2), ParallelConfig(ep=2)
PP2, TP2_SP = ParallelConfig(pp=2, pp_layers=[1, 2]), replace(TP2, sequence_parallel=True)
STEPS = [reference.make_batches(4, seed=step) for step in range(4)]
WHOLE_VOCABULARY = AlgorithmConfig(kl_coef=0.1, kl_estimator=FullKl())
FOLLOWING = replace(OBJECTIVE, divergence=divergence_of(WHOLE_VOCABULARY), reference=ReferencePlan(0.5, 1, None))
WRITTEN_FILES = ("__1_0.distcp", ".complete.json.partial")
"""Files of a checkpoint in the order in which they are opened."""


class StatefulNorm(RMSNorm):
    """A norm with a state beside its weight, as Transformer Engine's norms have and the local ones do not."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        assert state is None or state.numel() == 0


class ObservedActor(Actor):
    """An actor whose saves tests can delay and observe."""

    def __init__(
        self,
        rank: int,
        port: int,
        model: str,
        parallel: ParallelConfig,
        follows: bool = False,
        dtype: Dtype = Dtype.float32,
        distributed: bool = True,
    ) -> None:
        place, config = rendezvous(rank, 2, port), local_model(model, dtype)
        adam = replace(OPTIMIZER, distributed=distributed)
        super().__init__(place, config, parallel, adam, FOLLOWING if follows else OBJECTIVE, len(STEPS), seed=1)
        self.load_hf(model)
        self._initial = [tensor.clone() for tensor in self._matrices(self._policy)]
        self._go_on = Event()

    def offload(self, scratch: str) -> OffloadStats:
        self._scratch = scratch
        return super().offload()

    def train(self, *steps: int) -> None:
        for step in steps:
            mine = STEPS[step][self.coords.dp :: self.coords.dp_size]
            cp = self.coords.cp_size
            self.accumulate([reference.packed(batch, cp=cp) for batch in mine] if cp > 1 else mine)
            self.apply()
            self.end_step(step + 1)

    def weights(self) -> dict[str, np.ndarray]:
        """Exported weights in float32; empty on ranks other than 0."""
        return {name: tensor.float().numpy() for name, tensor in weights_of(self).items()}

    def reference_is_half_way(self) -> bool:
        """Tell if the reference's weights are the mean of the first and the current ones."""
        assert self._reference is not None
        weights = zip(self._matrices(self._reference.model), self._initial, self._matrices(self._policy), strict=True)
        return all(torch.allclose(found, (old + new) / 2, rtol=0, atol=1e-6) for found, old, new in weights)

    @staticmethod
    def _matrices(model: PolicyModel) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in model.module.parameters()]

    def hold(self) -> None:
        """Block the writer until `go_on` is called."""
        self._writer._thread.submit(self._go_on.wait)

    def go_on(self) -> None:
        self._go_on.set()

    def begin(self, folder: str) -> None:
        self.begin_save(folder)
        self._copy = weakref.ref(self._writer._jobs[0].planner)

    def save(self, folder: str) -> None:
        self.begin(folder)
        self.finish_save()

    def keeps_a_copy(self) -> bool:
        """Tell if the copy made by the last save is still in memory after the writer has finished."""
        self._writer._thread.submit(int).result()
        return self._copy() is not None

    def give_norms_a_state(self) -> int:
        """Make all norms `StatefulNorm`; return their number."""
        norms = [module for module in self._policy.module.modules() if type(module) is RMSNorm]
        for norm in norms:
            norm.__class__ = StatefulNorm
        return len(norms)

    def load_weights(self, folder: str) -> None:
        """Load only the model's weights, as a conversion does."""
        self._model.load_checkpoint(folder)

    def fails(self, method: str, *args: Any) -> tuple[str, str, Code | None]:
        """Class, message and code of the error that a call raises; empty if it raises none."""
        try:
            getattr(self, method)(*args)
        except (UserError, RunError) as error:
            return type(error).__name__, str(error), error.code
        return "", "", None

    def draw(self) -> list[float]:
        """One number from each random generator."""
        with get_cuda_rng_tracker().fork():
            tracked = float(torch.rand(()))
        return [tracked, float(torch.randn(())), float(np.random.standard_normal()), random.gauss(0.0, 1.0)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(reference.make_model(tiny_configs.qwen2(), tmp_path_factory.mktemp("model") / "model"))


async def start(
    model: str, parallel: ParallelConfig = DP2, *more: Any, hosts: Sequence[Host] | None = None
) -> HostedGroup:
    group = HostedGroup("actor", hosts or pool(2))
    _, port = await group.free_address(60.0)
    await group.build(ObservedActor, [(rank, port, model, parallel, *more) for rank in range(2)], 60.0)
    return group


async def weights_in(group: HostedGroup) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = (await group.call("weights"))[0]
    return found


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


async def test_checkpoint_holds_the_state_at_the_start_of_the_save(model: str, tmp_path: Path) -> None:
    """A run that saves, a run that does not, and a run that resumes from the save end with the same weights."""
    folder = str(tmp_path / "saved")
    group = await start(model, DP2, True)
    await group.call("train", 0, 1, 2)
    undisturbed = await weights_in(group)

    group = await start(model, DP2, True)
    await group.call("train", 0)
    begun = await weights_in(group)
    assert all(await group.call("reference_is_half_way"))
    await group.call("hold")
    await group.call("begin", folder)
    await group.call("train", 1)
    await group.call("offload", str(tmp_path))
    assert await group.call("saving") == [True, True]
    assert not is_complete(folder)
    await group.call("go_on")
    await group.call("restore")
    await group.call("train", 2)
    written = await group.call("finish_save")
    assert await group.call("saving") == [False, False]
    assert is_complete(folder)
    assert same(await weights_in(group), undisturbed)
    # Each process must write a share of about the same size.
    assert all(one.bytes > 0.3 * written[0].bytes for one in written)

    group = await start(model, DP2, True)
    await group.call("load_weights", folder)
    assert same(await weights_in(group), begun)
    await group.call("train", 3)
    assert await group.call("load", folder) == [True, True]
    assert same(await weights_in(group), begun)
    assert not same(begun, undisturbed)
    await group.call("train", 1, 2)
    assert same(await weights_in(group), undisturbed)


@pytest.mark.parametrize(
    ("family", "layouts", "dtype", "distributed"),
    [
        pytest.param("qwen3_moe", [EP2, TP2_SP], Dtype.float32, True, id="experts"),
        pytest.param("qwen2", [CP2, TP2], Dtype.float32, True, id="cp2 tp2"),
        pytest.param(
            "qwen2", [DP2, TP2, PP2], Dtype.bfloat16, False, id="bfloat16, not sharded", marks=pytest.mark.slow
        ),
    ],
)
async def test_run_resumes_exactly_under_its_layout_and_to_rounding_under_another(
    family: str, layouts: list[ParallelConfig], dtype: Dtype, distributed: bool, tmp_path: Path
) -> None:
    model = str(reference.make_model(tiny_configs.FAMILIES[family](), tmp_path / "model"))
    group = await start(model, layouts[0], False, dtype, distributed)
    await group.call("train", 0, 1)
    saved = await weights_in(group)
    await group.call("begin", str(tmp_path / "saved"))
    await group.call("train", 2)
    await group.call("finish_save")
    trained = await weights_in(group)
    assert not same(trained, saved)
    for layout in layouts:
        group = await start(model, layout, False, dtype, distributed)
        assert await group.call("load", str(tmp_path / "saved")) == [layout is layouts[0]] * 2
        assert same(await weights_in(group), saved)
        await group.call("train", 2)
        tolerance = 0.0 if layout is layouts[0] else 2e-5 if dtype is Dtype.float32 else 2e-2
        for name, tensor in (await weights_in(group)).items():
            np.testing.assert_allclose(tensor, trained[name], rtol=tolerance, atol=tolerance, err_msg=name)


async def test_checkpoint_loads_into_layers_with_more_and_with_less_state(model: str, tmp_path: Path) -> None:
    """Local layers and those of Transformer Engine differ in the state beside their weights."""
    local, stateful = str(tmp_path / "local"), str(tmp_path / "stateful")
    group = await start(model)
    await group.call("train", 0)
    await group.call("save", local)
    saved = await weights_in(group)
    await group.call("train", 1)
    trained = await weights_in(group)

    group = await start(model)
    assert all(await group.call("give_norms_a_state"))
    for method in ("load_weights", "load"):
        await group.call("train", 2)
        await group.call(method, local)
        assert same(await weights_in(group), saved)
    await group.call("train", 1)
    assert same(await weights_in(group), trained)
    await group.call("save", stateful)

    group = await start(model)
    await group.call("load", stateful)
    assert same(await weights_in(group), trained)


async def test_save_waits_for_the_previous_one_and_frees_its_copy_when_complete(model: str, tmp_path: Path) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    group = await start(model)
    await group.call("begin", first)
    await group.call("begin", second)
    assert is_complete(first)
    assert not is_complete(second)
    assert await group.call("keeps_a_copy") == [True, True]
    await group.call("finish_save")
    assert is_complete(second)
    assert await group.call("keeps_a_copy") == [False, False]
    assert await group.call("finish_save") == [WriteStats(0, 0.0)] * 2
    for kind, message, _ in await group.call("fails", "begin", second):
        assert kind == "UserError"
        assert second in message


async def test_full_disk_is_reported_on_all_ranks_and_leaves_no_complete_checkpoint(model: str, tmp_path: Path) -> None:
    group = await start(model)
    for number, name in enumerate(WRITTEN_FILES):
        full = tmp_path / f"full{number}"
        full.mkdir()
        (full / name).symlink_to("/dev/full")
        await group.call("begin", str(full))
        # The next `begin_save` or `finish_save` raises the error of the previous save.
        for kind, message, code in await group.call(
            "fails", *(("begin", str(tmp_path / "other")) if number else ("finish_save",))
        ):
            assert (kind, code) == ("RunError", "no_room")
            assert str(full) in message
            assert "No space left on device" in message
        assert not is_complete(full)
    # The error is raised once; the next save succeeds.
    await group.call("finish_save")
    await group.call("train", 0)
    await group.call("save", str(tmp_path / "next"))
    assert is_complete(tmp_path / "next")
    (tmp_path / "file").touch()
    for kind, message, _ in await group.call("fails", "begin", str(tmp_path / "file" / "folder")):
        assert kind == "RunError"
        assert "file/folder" in message
    assert await group.call("saving") == [False, False], "no save may begin"


async def test_kill_during_a_save_leaves_no_checkpoint_and_the_previous_one_intact(model: str, tmp_path: Path) -> None:
    before = tmp_path / "before"
    group = await start(model)
    await group.call("train", 0)
    saved = await weights_in(group)
    await group.call("save", str(before))
    bytes_before = {path.name: path.read_bytes() for path in before.iterdir()}
    for number, name in enumerate(WRITTEN_FILES):
        after = tmp_path / f"after{number}"
        after.mkdir()
        os.mkfifo(after / name)
        with fresh(2) as killed:
            saving = await start(model, hosts=killed)
            saving.begin("save", str(after))
            # Opening the pipe returns when a process starts to write that file.
            with (after / name).open("rb"):
                for host in killed:
                    host.kill()
        assert not is_complete(after)
        for kind, message, _ in await group.call("fails", "load", str(after)):
            assert kind == "UserError"
            assert str(after) in message
        assert {path.name: path.read_bytes() for path in before.iterdir()} == bytes_before
    await group.call("train", 1)
    await group.call("load", str(before))
    assert same(await weights_in(group), saved)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


async def test_damaged_checkpoint_is_refused_by_its_file(model: str, tmp_path: Path) -> None:
    whole, damaged = tmp_path / "whole", tmp_path / "damaged"
    group = await start(model)
    await group.call("save", str(whole))
    names = {path.name for path in whole.iterdir()}
    shards = {f"__{rank}_0.distcp" for rank in range(2)} | {f"rng_{rank:05}.npz" for rank in range(2)}
    assert names == shards | {".metadata", "common.pt", "metadata.json", "complete.json"}
    for name, damage in [
        ("common.pt", Path.unlink),
        *((name, _truncate) for name in sorted(names - {"rng_00000.npz"})),
    ]:
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(whole, damaged)
        damage(damaged / name)
        of_first, of_second = await group.call("fails", "load", str(damaged))
        kind, message, _ = of_second
        # Each rank reads only its own random generators.
        assert of_first == (("", "", None) if name == "rng_00001.npz" else of_second)
        assert kind == "UserError"
        assert str(damaged / name) in message or (name == "complete.json" and str(damaged) in message)


@pytest.mark.parametrize(
    ("saved", "loading", "named"),
    [
        pytest.param({}, {"tied": False}, "output_layer.weight", id="missing tensor"),
        pytest.param({"tied": False}, {}, "output_layer.weight", id="unused tensor"),
    ],
)
async def test_checkpoint_of_another_model_is_refused(
    saved: dict[str, Any], loading: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = str(tmp_path / "saved")
    models = [reference.make_model(tiny_configs.qwen2(**one), tmp_path / str(one)) for one in (saved, loading)]
    await (await start(str(models[0]))).call("save", folder)
    group = await start(str(models[1]))
    for kind, message, _ in await group.call("fails", "load", folder):
        assert kind == "UserError"
        assert folder in message
        assert named in message


async def test_random_generators_resume_from_a_checkpoint(model: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    group = await start(model)
    await group.call("draw")
    await group.call("begin", folder)
    expected = [await group.call("draw") for _ in range(3)]
    await group.call("finish_save")
    await group.call("load", folder)
    assert [await group.call("draw") for _ in range(3)] == expected
