"""Checkpoints are of the moment at which saving began, whole or not there at all, and say what is wrong with them."""

from __future__ import annotations

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

from rlsys.config.algorithm import AlgorithmConfig, KlEstimator
from rlsys.config.schema import Dtype, ParallelConfig
from rlsys.errors import RunError, UserError
from rlsys.trainer.actor import Actor
from rlsys.trainer.log_prob import ReferencePlan
from rlsys.trainer.model.logprobs import divergence_of
from rlsys.trainer.model.stage_model import PolicyModel
from rlsys.trainer.offload import OffloadStats
from rlsys.weights.checkpoint.sharded import WriteStats
from rlsys.weights.checkpoint.store import CheckpointInfo, is_complete, read_checkpoint_info
from tests.support.megatron_processes import Host, HostedGroup, fresh, pool, rendezvous
from tests.trainer import reference
from tests.trainer.harness import OBJECTIVE, OPTIMIZER, local_model, weights_of

DP2, TP2, CP2, EP2 = ParallelConfig(), ParallelConfig(tp=2), ParallelConfig(cp=2), ParallelConfig(ep=2)
PP2, TP2_SP = ParallelConfig(pp=2, pp_layers=[1, 2]), replace(TP2, sequence_parallel=True)
STEPS = [reference.make_batches(4, seed=step) for step in range(4)]
WHOLE_VOCABULARY = AlgorithmConfig(kl_coef=0.1, kl_estimator=KlEstimator.full_reverse)
FOLLOWING = replace(OBJECTIVE, divergence=divergence_of(WHOLE_VOCABULARY), reference=ReferencePlan(0.5, 1, None))
MOMENTS = ("__1_0.distcp", ".complete.json.partial")
"""Files of a checkpoint in the order in which they are opened."""


class Bench(Actor):
    """An actor whose saves are held up and watched."""

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
        """On rank 0, as float32."""
        return {name: tensor.float().numpy() for name, tensor in weights_of(self).items()}

    def reference_is_half_way(self) -> bool:
        """Tell if the reference lies in the middle between the first weights and those of now."""
        assert self._reference is not None
        weights = zip(self._matrices(self._reference.model), self._initial, self._matrices(self._policy), strict=True)
        return all(torch.allclose(found, (old + new) / 2, rtol=0, atol=1e-6) for found, old, new in weights)

    @staticmethod
    def _matrices(model: PolicyModel) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in model.module.parameters()]

    def hold(self) -> None:
        """Let nothing be written until `go_on`."""
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
        """Tell if the last save is still in memory, when the thread that wrote it has let go of it."""
        self._writer._thread.submit(int).result()
        return self._copy() is not None

    def load_weights(self, folder: str) -> None:
        """The model's alone, as a conversion reads them."""
        self._model.load_checkpoint(folder)

    def fails(self, method: str, *args: Any) -> tuple[str, str]:
        """The class of what a call raises, and what people read; empty if it does not."""
        try:
            getattr(self, method)(*args)
        except (UserError, RunError) as error:
            return type(error).__name__, str(error)
        return "", ""

    def draw(self) -> list[float]:
        """One number of each generator; odd many, as some of them draw in pairs."""
        with get_cuda_rng_tracker().fork():
            tracked = float(torch.rand(()))
        return [tracked, float(torch.randn(())), float(np.random.standard_normal()), random.gauss(0.0, 1.0)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(reference.make_model(reference.tiny_config(), tmp_path_factory.mktemp("model") / "model"))


async def start(
    model: str, parallel: ParallelConfig = DP2, *more: Any, hosts: Sequence[Host] | None = None
) -> HostedGroup:
    group = HostedGroup("actor", hosts or pool(2))
    _, port = await group.free_address(60.0)
    await group.build(Bench, [(rank, port, model, parallel, *more) for rank in range(2)], 60.0)
    return group


async def weights_in(group: HostedGroup) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = (await group.call("weights"))[0]
    return found


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


async def test_what_is_saved_is_the_state_when_saving_began(model: str, tmp_path: Path) -> None:
    """A run that saves and one that does not are the same, and so is one that goes on from what was saved."""
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
    # Every process writes its share.
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
    ("family", "cuts", "dtype", "distributed"),
    [
        pytest.param("qwen3_moe", [EP2, TP2_SP], Dtype.float32, True, id="experts"),
        pytest.param("qwen2", [CP2, TP2], Dtype.float32, True, id="cp2 tp2"),
        pytest.param("qwen3_moe", [EP2, DP2, PP2], Dtype.float32, True, id="experts dp2 pp2", marks=pytest.mark.slow),
        pytest.param(
            "qwen2", [DP2, TP2, PP2], Dtype.bfloat16, False, id="bfloat16, not sharded", marks=pytest.mark.slow
        ),
    ],
)
async def test_a_run_goes_on_exactly_under_its_cut_and_to_rounding_under_another(
    family: str, cuts: list[ParallelConfig], dtype: Dtype, distributed: bool, tmp_path: Path
) -> None:
    model = str(reference.make_model(reference.TINY[family](), tmp_path / "model"))
    group = await start(model, cuts[0], False, dtype, distributed)
    await group.call("train", 0, 1)
    saved = await weights_in(group)
    await group.call("begin", str(tmp_path / "saved"))
    await group.call("train", 2)
    await group.call("finish_save")
    trained = await weights_in(group)
    assert not same(trained, saved)
    for cut in cuts:
        group = await start(model, cut, False, dtype, distributed)
        assert await group.call("load", str(tmp_path / "saved")) == [cut is cuts[0]] * 2
        assert same(await weights_in(group), saved)
        await group.call("train", 2)
        tolerance = 0.0 if cut is cuts[0] else 2e-5 if dtype is Dtype.float32 else 2e-2
        for name, tensor in (await weights_in(group)).items():
            np.testing.assert_allclose(tensor, trained[name], rtol=tolerance, atol=tolerance, err_msg=name)


async def test_a_save_waits_for_the_one_before_and_its_copy_goes_when_it_is_complete(
    model: str, tmp_path: Path
) -> None:
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
    for kind, said in await group.call("fails", "begin", second):
        assert kind == "UserError"
        assert second in said


async def test_a_full_disk_is_said_on_all_ranks_and_leaves_nothing_that_looks_complete(
    model: str, tmp_path: Path
) -> None:
    group = await start(model)
    for number, name in enumerate(MOMENTS):
        full = tmp_path / f"full{number}"
        full.mkdir()
        (full / name).symlink_to("/dev/full")
        await group.call("begin", str(full))
        # The next save says what became of the one before.
        for kind, said in await group.call(
            "fails", *(("begin", str(tmp_path / "other")) if number else ("finish_save",))
        ):
            assert kind == "RunError"
            assert str(full) in said
            assert "No space left on device" in said
        assert not is_complete(full)
    # It is said once, and the next save is another.
    await group.call("finish_save")
    await group.call("train", 0)
    await group.call("save", str(tmp_path / "next"))
    assert is_complete(tmp_path / "next")
    (tmp_path / "file").touch()
    for kind, said in await group.call("fails", "begin", str(tmp_path / "file" / "folder")):
        assert kind == "RunError"
        assert "file/folder" in said
    assert await group.call("saving") == [False, False], "nothing has been copied"


async def test_killed_at_any_moment_there_is_no_checkpoint_and_the_one_before_is_as_it_was(
    model: str, tmp_path: Path
) -> None:
    before = tmp_path / "before"
    group = await start(model)
    await group.call("train", 0)
    saved = await weights_in(group)
    await group.call("save", str(before))
    bytes_before = {path.name: path.read_bytes() for path in before.iterdir()}
    for number, name in enumerate(MOMENTS):
        after = tmp_path / f"after{number}"
        after.mkdir()
        os.mkfifo(after / name)
        with fresh(2) as killed:
            doomed = await start(model, hosts=killed)
            doomed.begin("save", str(after))
            # This opens when the processes come to write that file.
            with (after / name).open("rb"):
                for host in killed:
                    host.kill()
        assert not is_complete(after)
        for kind, said in await group.call("fails", "load", str(after)):
            assert kind == "UserError"
            assert str(after) in said
        assert {path.name: path.read_bytes() for path in before.iterdir()} == bytes_before
    await group.call("train", 1)
    await group.call("load", str(before))
    assert same(await weights_in(group), saved)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


async def test_damage_is_one_sentence_that_names_the_file(model: str, tmp_path: Path) -> None:
    whole, damaged = tmp_path / "whole", tmp_path / "damaged"
    group = await start(model)
    await group.call("save", str(whole))
    names = {path.name for path in whole.iterdir()}
    shards = {f"__{rank}_0.distcp" for rank in range(2)} | {f"rng_{rank:05}.npz" for rank in range(2)}
    assert names == shards | {".metadata", "common.pt", "metadata.json", "complete.json"}
    for name, damage in [("common.pt", Path.unlink), *((name, _cut) for name in sorted(names - {"rng_00000.npz"}))]:
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(whole, damaged)
        damage(damaged / name)
        of_first, (kind, said) = await group.call("fails", "load", str(damaged))
        # A rank reads the generators of its own.
        assert of_first == (("", "") if name == "rng_00001.npz" else (kind, said))
        assert kind == "UserError"
        assert str(damaged / name) in said or (name == "complete.json" and str(damaged) in said)


def test_what_other_versions_say_of_a_checkpoint_is_read(tmp_path: Path) -> None:
    """They say more, or less."""
    file = tmp_path / "complete.json"
    file.write_text('{"step": 5, "optimizer": true, "dtype": "bfloat16", "extra": {}}')
    assert read_checkpoint_info(tmp_path) == CheckpointInfo(step=5, optimizer=True)
    file.write_text('{"step": 0}')
    assert read_checkpoint_info(tmp_path) == CheckpointInfo(
        step=0, optimizer=False, version=0, master=False, layout=None
    )


@pytest.mark.parametrize(
    ("saved", "loading", "named"),
    [
        pytest.param({}, {"layers": 2}, "", id="fewer layers"),
        pytest.param({}, {"tied": False}, "output_layer.weight", id="what is not there"),
        pytest.param({"tied": False}, {}, "output_layer.weight", id="what would be left over"),
    ],
)
async def test_another_model_is_refused(
    saved: dict[str, Any], loading: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = str(tmp_path / "saved")
    models = [reference.make_model(reference.tiny_config(**one), tmp_path / str(one)) for one in (saved, loading)]
    await (await start(str(models[0]))).call("save", folder)
    group = await start(str(models[1]))
    for kind, said in await group.call("fails", "load", folder):
        assert kind == "UserError"
        assert folder in said
        assert named in said


async def test_random_generators_go_on(model: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    group = await start(model)
    await group.call("draw")
    await group.call("begin", folder)
    expected = [await group.call("draw") for _ in range(3)]
    await group.call("finish_save")
    await group.call("load", folder)
    assert [await group.call("draw") for _ in range(3)] == expected
