"""Checkpoints are of the moment at which saving began, whole or not there at all, and say what is wrong with them."""

from __future__ import annotations

import os
import random
import shutil
import signal
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from rlsys.config.algorithm import AlgorithmConfig, KlEstimator
from rlsys.config.schema import (
    Dtype,
    Layers,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
)
from rlsys.errors import RunError, UserError
from rlsys.trainer.actor import Actor
from rlsys.trainer.log_prob import ReferencePlan
from rlsys.trainer.model.logprobs import divergence_of
from rlsys.trainer.offload import Offloaded
from rlsys.weights.checkpoint.sharded import Written
from rlsys.weights.checkpoint.store import is_complete
from tests.trainer import reference
from tests.trainer.harness import OBJECTIVE, rendezvous, weights_of
from tests.trainer.hosts import HostedGroup, hosts

DP2, TP2, PP2 = ParallelConfig(), ParallelConfig(tp=2), ParallelConfig(pp=2, pp_layers=[1, 2])
STEPS = [reference.make_batches(4, seed=step) for step in range(4)]
WHOLE_VOCABULARY = AlgorithmConfig(kl_coef=0.1, kl_estimator=KlEstimator.full_reverse)
FOLLOWING = replace(OBJECTIVE, divergence=divergence_of(WHOLE_VOCABULARY), reference=ReferencePlan(0.5, 1, None))
MOMENTS = ("__1_0.distcp", ".complete.json.partial")
"""Files of a checkpoint in the order in which they are opened."""


class Bench:
    """An actor, and the moments at which it is saved."""

    def __init__(
        self, rank: int, world: int, port: int, model: str, parallel: ParallelConfig, follows: bool = False
    ) -> None:
        config = ModelConfig(model, Layers.local, Dtype.float32)
        objective = FOLLOWING if follows else OBJECTIVE
        adam = OptimizerConfig(lr=3e-3, weight_decay=0.1)
        self._actor = Actor(rendezvous(rank, world, port), config, parallel, adam, objective, len(STEPS), seed=1)
        self._actor.load_hf(model)
        self._go_on = Event()
        self.saving, self.finish = self._actor.saving, self._actor.finish_save
        self.load, self.restore = self._actor.load, self._actor.restore

    def offload(self, scratch: str) -> Offloaded:
        self._actor._scratch = scratch
        return self._actor.offload()

    def train(self, *steps: int) -> None:
        for step in steps:
            self._actor.accumulate(STEPS[step][self._actor.place.dp :: self._actor.place.dp_size])
            self._actor.apply()
            self._actor.end_step(step + 1)

    def weights(self) -> dict[str, np.ndarray]:
        """On rank 0."""
        return {name: tensor.numpy() for name, tensor in weights_of(self._actor).items()}

    def hold(self) -> None:
        """Let nothing be written until `go_on`."""
        self._actor._writer._thread.submit(self._go_on.wait)

    def go_on(self) -> None:
        self._go_on.set()

    def begin(self, folder: str) -> None:
        self._actor.begin_save(folder)
        self._copy = weakref.ref(self._actor._writer._jobs[0].planner)

    def save(self, folder: str) -> None:
        self.begin(folder)
        self.finish()

    def keeps_a_copy(self) -> bool:
        """Whether what was saved last is still in memory, when the thread that wrote it has let go of it."""
        self._actor._writer._thread.submit(int).result()
        return self._copy() is not None

    def load_weights(self, folder: str) -> None:
        """The model's alone, as a conversion reads them."""
        self._actor._model.load_checkpoint(folder)

    def fails(self, method: str, *args: Any) -> tuple[str, str]:
        """The class of what a call raises, and what people read."""
        with pytest.raises((UserError, RunError)) as caught:
            getattr(self, method)(*args)
        return type(caught.value).__name__, str(caught.value)

    def draw(self) -> list[float]:
        """One number of each generator; odd many, as some of them draw in pairs."""
        with get_cuda_rng_tracker().fork():
            tracked = float(torch.rand(()))
        return [tracked, float(torch.randn(())), float(np.random.standard_normal()), random.gauss(0.0, 1.0)]

    def pid(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(reference.make_model(reference.tiny_config(), tmp_path_factory.mktemp("model") / "model"))


@pytest.fixture(scope="module")
def pipes() -> Iterator[list[Connection]]:
    """To two processes that stay, and to two for each moment at which they are killed."""
    with hosts(2 + 2 * len(MOMENTS)) as found:
        yield found


async def start(
    pipes: Sequence[Connection], model: str, parallel: ParallelConfig = DP2, follows: bool = False
) -> HostedGroup:
    group = HostedGroup("actor", pipes)
    _, port = await group.free_address(60.0)
    await group.build(Bench, [(rank, 2, port, model, parallel, follows) for rank in range(2)], 60.0)
    return group


async def weights_in(group: HostedGroup) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = (await group.call("weights"))[0]
    return found


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    ("parallel", "follows"),
    [
        pytest.param(DP2, True, id="dp2"),
        pytest.param(TP2, False, id="tp2", marks=pytest.mark.slow),
        pytest.param(PP2, False, id="pp2", marks=pytest.mark.slow),
    ],
)
async def test_what_is_saved_is_the_state_when_saving_began(
    parallel: ParallelConfig, follows: bool, pipes: list[Connection], model: str, tmp_path: Path
) -> None:
    """A run that saves and one that does not are the same, and so is one that goes on from what was saved."""
    folder = str(tmp_path / "saved")
    group = await start(pipes[:2], model, parallel, follows)
    await group.call("train", 0, 1, 2)
    undisturbed = await weights_in(group)

    group = await start(pipes[:2], model, parallel, follows)
    await group.call("train", 0)
    begun = await weights_in(group)
    await group.call("hold")
    await group.call("begin", folder)
    await group.call("train", 1)
    await group.call("offload", str(tmp_path))
    assert await group.call("saving") == [True, True]
    assert not is_complete(folder)
    await group.call("go_on")
    await group.call("restore")
    await group.call("train", 2)
    written = await group.call("finish")
    assert await group.call("saving") == [False, False]
    assert is_complete(folder)
    assert same(await weights_in(group), undisturbed)
    # Every process writes its share.
    assert all(one.bytes > 0.3 * written[0].bytes for one in written)

    group = await start(pipes[:2], model, parallel, follows)
    await group.call("load_weights", folder)
    assert same(await weights_in(group), begun)
    await group.call("train", 3)
    assert await group.call("load", folder) == [True, True]
    assert same(await weights_in(group), begun)
    assert not same(begun, undisturbed)
    await group.call("train", 1, 2)
    assert same(await weights_in(group), undisturbed)


EP2, TP2_SP = ParallelConfig(ep=2), replace(TP2, sequence_parallel=True)


@pytest.mark.parametrize(
    "others", [[EP2, TP2_SP], pytest.param([DP2, PP2], marks=pytest.mark.slow)], ids=["ep2 tp2-sp", "dp2 pp2"]
)
async def test_experts_saved_on_several_ranks_load_on_others(
    others: list[ParallelConfig], pipes: list[Connection], tmp_path: Path
) -> None:
    experts = str(reference.make_model(reference.tiny_qwen3_moe(), tmp_path / "experts"))
    group = await start(pipes[:2], experts, EP2)
    await group.call("train", 0)
    saved = await weights_in(group)
    await group.call("begin", str(tmp_path / "saved"))
    await group.call("train", 1)
    await group.call("finish")
    trained = await weights_in(group)
    for parallel in others:
        group = await start(pipes[:2], experts, parallel)
        assert await group.call("load", str(tmp_path / "saved")) == [parallel is EP2] * 2
        assert same(await weights_in(group), saved)
        await group.call("train", 1)
        for name, tensor in (await weights_in(group)).items():
            tolerance = 0.0 if parallel is EP2 else 2e-5
            np.testing.assert_allclose(tensor, trained[name], rtol=tolerance, atol=tolerance, err_msg=name)


async def test_a_save_waits_for_the_one_before_and_its_copy_goes_when_it_is_complete(
    pipes: list[Connection], model: str, tmp_path: Path
) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    group = await start(pipes[:2], model)
    await group.call("begin", first)
    await group.call("begin", second)
    assert is_complete(first)
    assert not is_complete(second)
    assert await group.call("keeps_a_copy") == [True, True]
    await group.call("finish")
    assert is_complete(second)
    assert await group.call("keeps_a_copy") == [False, False]
    assert await group.call("finish") == [Written(0, 0.0)] * 2
    for kind, said in await group.call("fails", "begin", second):
        assert kind == "UserError"
        assert second in said


async def test_a_full_disk_is_said_on_all_ranks_and_leaves_nothing_that_looks_complete(
    pipes: list[Connection], model: str, tmp_path: Path
) -> None:
    group = await start(pipes[:2], model)
    for number, name in enumerate(MOMENTS):
        full = tmp_path / f"full{number}"
        full.mkdir()
        (full / name).symlink_to("/dev/full")
        await group.call("begin", str(full))
        # The next save says what became of the one before.
        for kind, said in await group.call("fails", *(("begin", str(tmp_path / "other")) if number else ("finish",))):
            assert kind == "RunError"
            assert str(full) in said
            assert "No space left on device" in said
        assert not is_complete(full)
    # It is said once, and the next save is another.
    await group.call("finish")
    await group.call("train", 0)
    await group.call("save", str(tmp_path / "next"))
    assert is_complete(tmp_path / "next")
    (tmp_path / "file").touch()
    for kind, said in await group.call("fails", "begin", str(tmp_path / "file" / "folder")):
        assert kind == "RunError"
        assert "file/folder" in said
    assert await group.call("saving") == [False, False], "nothing has been copied"


async def test_killed_at_any_moment_there_is_no_checkpoint_and_the_one_before_is_as_it_was(
    pipes: list[Connection], model: str, tmp_path: Path
) -> None:
    before = tmp_path / "before"
    group = await start(pipes[:2], model)
    await group.call("train", 0)
    saved = await weights_in(group)
    await group.call("save", str(before))
    bytes_before = {path.name: path.read_bytes() for path in before.iterdir()}
    for number, name in enumerate(MOMENTS):
        killed, after = pipes[2 + 2 * number : 4 + 2 * number], tmp_path / f"after{number}"
        after.mkdir()
        os.mkfifo(after / name)
        unschedulable = await start(killed, model)
        pids = await unschedulable.call("pid")
        for pipe in killed:
            pipe.send(("save", (str(after),)))
        # This opens when the processes come to write that file.
        with (after / name).open("rb"):
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        for pipe in killed:
            # The second of them may have time to say what became of the first.
            with pytest.raises((EOFError, ConnectionResetError)):
                list(iter(pipe.recv, None))
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


async def test_damage_is_one_sentence_that_names_the_file(pipes: list[Connection], model: str, tmp_path: Path) -> None:
    whole, damaged = tmp_path / "whole", tmp_path / "damaged"
    group = await start(pipes[:2], model)
    await group.call("save", str(whole))
    names = {path.name for path in whole.iterdir()}
    shards = {f"__{rank}_0.distcp" for rank in range(2)} | {f"rng_{rank:05}.npz" for rank in range(2)}
    assert names == shards | {".metadata", "common.pt", "metadata.json", "complete.json"}
    for name, damage in [("common.pt", Path.unlink), *((name, _cut) for name in sorted(names - {"rng_00000.npz"}))]:
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(whole, damaged)
        damage(damaged / name)
        if name == "rng_00001.npz":
            _, (kind, said) = await _each(group, ("load", str(damaged)), ("fails", "load", str(damaged)))
        else:
            (kind, said), other = await group.call("fails", "load", str(damaged))
            assert (kind, said) == other
        assert kind == "UserError"
        assert str(damaged / name) in said or (name == "complete.json" and str(damaged) in said)


async def _each(group: HostedGroup, *calls: tuple[Any, ...]) -> list[Any]:
    """What each process answers to a call of its own."""
    for rank, (method, *args) in zip(group.ranks, calls, strict=True):
        rank.pipe.send((method, args))
    answers = [rank.pipe.recv() for rank in group.ranks]
    assert all(well for well, _ in answers), answers
    return [answer for _, answer in answers]


async def test_another_model_is_refused(pipes: list[Connection], model: str, tmp_path: Path) -> None:
    group = await start(pipes[:2], model)
    await group.call("save", str(tmp_path / "tied"))
    shallow = reference.make_model(reference.tiny_config(layers=2), tmp_path / "shallow")
    untied = str(reference.make_model(reference.tiny_config(tied=False), tmp_path / "model"))
    group = await start(pipes[:2], str(shallow))
    ((kind, said), _) = await group.call("fails", "load", str(tmp_path / "tied"))
    assert kind == "UserError"
    assert str(tmp_path / "tied") in said
    group = await start(pipes[:2], untied)
    ((_, said), _) = await group.call("fails", "load", str(tmp_path / "tied"))
    assert "output_layer.weight" in said
    await group.call("save", str(tmp_path / "untied"))
    group = await start(pipes[:2], model)
    ((_, said), _) = await group.call("fails", "load", str(tmp_path / "untied"))
    assert "output_layer.weight" in said, "what would be left over"


async def test_random_generators_go_on_in_the_same_layout_alone(
    pipes: list[Connection], model: str, tmp_path: Path
) -> None:
    folder = str(tmp_path / "saved")
    group = await start(pipes[:2], model)
    await group.call("draw")
    await group.call("begin", folder)
    expected = [await group.call("draw") for _ in range(3)]
    await group.call("finish")
    await group.call("load", folder)
    assert [await group.call("draw") for _ in range(3)] == expected

    group = await start(pipes[:2], model, TP2)
    fresh = await group.call("draw")
    group = await start(pipes[:2], model, TP2)
    assert await group.call("load", folder) == [False, False]
    again = await group.call("draw")
    # Megatron's are seeded by whoever starts a group, the others belong to the process.
    assert [one[0] for one in again] == [one[0] for one in fresh]
    assert [one[1:] for one in again] != [one[1:] for one in expected[0]]
