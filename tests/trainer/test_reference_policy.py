"""The reference policy against a float64 loop, on cuts of the model, over saves, and on its way out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlsys.config.schema import (
    Dtype,
    Layers,
    ModelConfig,
    ParallelConfig,
)
from rlsys.errors import RunError
from rlsys.trainer import mesh
from rlsys.trainer.batches import LogProbs, MicroBatch, collate
from rlsys.trainer.log_prob import LogProbWorker, ReferencePlan, TopkPlan
from rlsys.trainer.offload import Offloaded
from rlsys.weights.convert.conversion import megatron_to_hf
from rlsys.weights.hf_io import HfReader
from rlsys.weights.transport import pack
from tests.trainer import reference
from tests.trainer.harness import digest_of, rendezvous, weights_of
from tests.trainer.hosts import HostedGroup, hosts

ONE, TP2, PP2 = ParallelConfig(), ParallelConfig(tp=2), ParallelConfig(pp=2, pp_layers=[1, 2])
TP2_PP2 = replace(PP2, tp=2)
SIZES = {"one": (ONE, 1), "tp2": (TP2, 2), "dp2": (ONE, 2), "tp2 pp2": (TP2_PP2, 4)}
ANY_SIZE = ["tp2", *(pytest.param(size, marks=pytest.mark.slow) for size in ("one", "dp2", "tp2 pp2"))]
AVERAGE = ReferencePlan(tau=0.9, update_period=2, reset_period=None)
FIXED = replace(AVERAGE, tau=1.0)
TORCH = {Dtype.float32: torch.float32, Dtype.bfloat16: torch.bfloat16}


def policy(model: str, version: int, dtype: Dtype, drift: float = 0.02) -> dict[str, Tensor]:
    """The policy's weights at a version: a little further along one direction, and never twice the same."""
    reader = HfReader(model)
    generator = torch.Generator().manual_seed(1)
    found = {}
    for name in sorted(reader.names()):
        start = reader.get(name)
        step = torch.randn(start.shape, generator=generator) * drift
        found[name] = (start + step * (version + (version % 3))).to(TORCH[dtype])
    return found


def averaged(model: str, dtype: Dtype, plan: ReferencePlan, versions: int, drift: float) -> dict[str, Tensor]:
    """The reference after `versions`, in float64: the rules one by one."""
    held = {name: tensor.double() for name, tensor in policy(model, 0, dtype, drift).items()}
    for version in range(1, versions + 1):
        new = policy(model, version, dtype, drift)
        if plan.reset_period is not None and version % plan.reset_period == 0:
            held = {name: new[name].double() for name in held}
        elif version % plan.update_period == 0:
            held = {name: plan.tau * held[name] + (1 - plan.tau) * new[name].double() for name in held}
    return held


class Bench:
    """A log-prob worker that is handed made-up versions of the policy."""

    def __init__(
        self,
        rank: int,
        world: int,
        port: int,
        model: str,
        parallel: ParallelConfig,
        plan: ReferencePlan | None,
        dtype: Dtype = Dtype.float32,
        picks: TopkPlan | None = None,
    ) -> None:
        self._model, self._dtype = model, dtype
        self._config = ModelConfig(model, Layers.local, dtype)
        place = rendezvous(rank, world, port)
        self._worker = LogProbWorker(place, self._config, parallel, reference.TEMPERATURE, 1, plan, picks)
        self.restore, self.load = self._worker.restore, self._worker.load

    def offload(self, scratch: str) -> Offloaded:
        self._worker._scratch = scratch
        return self._worker.offload()

    def update(self, version: int, drift: float = 0.02) -> None:
        tensors = policy(self._model, version, self._dtype, drift)
        self._worker.begin_update()
        buckets = list(pack(tensors.items(), 50_000))
        for bucket in buckets:
            self._worker.take_bucket(bucket)
        self._worker.finish_update(version, digest_of(buckets))

    def save(self, folder: str) -> None:
        self._worker.begin_save(folder)
        self._worker.finish_save()

    def updates(self, first: int, last: int, drift: float = 0.02) -> None:
        for version in range(first, last + 1):
            self.update(version, drift)

    def reference(self) -> dict[str, np.ndarray]:
        """Every exported tensor as float32, on rank 0."""
        return {name: tensor.float().numpy() for name, tensor in weights_of(self._worker).items()}

    def compute(self, batches: Sequence[MicroBatch]) -> list[LogProbs] | None:
        place = self._worker.place
        return self._worker.compute(batches[place.dp :: place.dp_size])

    def refuses(self, kind: type[Exception]) -> None:
        """Every call that needs a reference."""
        for call in (lambda: self.save(""), lambda: self.load(""), self.reference):
            with pytest.raises(kind, match="reference"):
                call()

    def convert(self, checkpoint: str, out: str) -> None:
        """The last thing that is asked for."""
        mesh.stop()
        megatron_to_hf(checkpoint, out, self._model, processes=1)


@pytest.fixture(scope="module")
def pipes() -> Iterator[list[Connection]]:
    with hosts(4) as opened:
        yield opened


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(reference.make_model(reference.tiny_config(), tmp_path_factory.mktemp("model")))


async def start(pipes: Sequence[Connection], size: str, model: str, *more: Any) -> HostedGroup:
    """A group of benches."""
    parallel, world = SIZES[size]
    group = HostedGroup("bench", pipes[:world])
    _, port = await group.free_address(60)
    await group.build(Bench, [(rank, world, port, model, parallel, *more) for rank in range(world)], 60)
    return group


async def reference_of(group: HostedGroup) -> dict[str, Tensor]:
    return {name: torch.tensor(value) for name, value in (await group.call("reference"))[0].items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name].float()) for name in one)


@pytest.mark.parametrize("size", ANY_SIZE)
async def test_a_float32_average_is_the_float64_loops(size: str, model: str, pipes: list[Connection]) -> None:
    group = await start(pipes, size, model, AVERAGE)
    assert same(await reference_of(group), policy(model, 0, Dtype.float32))
    await group.call("updates", 0, 9)
    found, exact = await reference_of(group), averaged(model, Dtype.float32, AVERAGE, 9, 0.02)
    for name, tensor in exact.items():
        torch.testing.assert_close(found[name].double(), tensor, rtol=1e-6, atol=1e-6, msg=name)
    assert not same(found, policy(model, 8, Dtype.float32))


async def test_a_bfloat16_average_moves_although_no_step_of_it_can_be_seen(model: str, pipes: list[Connection]) -> None:
    drift, versions = 1e-4, 40
    group = await start(pipes, "tp2", model, replace(AVERAGE, update_period=1), Dtype.bfloat16)
    await group.call("updates", 1, versions, drift)
    found = await reference_of(group)
    plan = replace(AVERAGE, update_period=1)
    exact = averaged(model, Dtype.bfloat16, plan, versions, drift)
    only_bfloat16 = {name: tensor.clone() for name, tensor in policy(model, 0, Dtype.bfloat16).items()}
    for version in range(1, versions + 1):
        for name, tensor in policy(model, version, Dtype.bfloat16, drift).items():
            only_bfloat16[name] = plan.tau * only_bfloat16[name] + (1 - plan.tau) * tensor
    equal, naively_equal, count = 0, 0, 0
    for name, tensor in exact.items():
        rounded = tensor.bfloat16().float()
        equal += int((found[name] == rounded).sum())
        naively_equal += int((only_bfloat16[name].float() == rounded).sum())
        count += tensor.numel()
        # What is not equal is a rounding the other way, where the exact value is in the midst.
        torch.testing.assert_close(found[name].double(), tensor, rtol=2**-8, atol=0, msg=name)
    assert equal > 0.999 * count
    assert naively_equal < 0.7 * count


@pytest.mark.parametrize(
    ("size", "other", "dtype"),
    [
        ("tp2", "dp2", Dtype.bfloat16),
        pytest.param("tp2 pp2", "dp2", Dtype.float32, marks=pytest.mark.slow),
        pytest.param("one", "tp2 pp2", Dtype.bfloat16, marks=pytest.mark.slow),
    ],
)
async def test_a_reference_goes_on_under_another_cut(
    size: str, other: str, dtype: Dtype, model: str, pipes: list[Connection], tmp_path: Path
) -> None:
    folder, drift = str(tmp_path / "reference"), 1e-3
    group = await start(pipes, size, model, AVERAGE, dtype)
    await group.call("updates", 0, 5, drift)
    await group.call("save", folder)
    saved = await reference_of(group)
    await group.call("updates", 6, 12, drift)
    uninterrupted = await reference_of(group)
    assert not same(saved, uninterrupted)

    group = await start(pipes, other, model, AVERAGE, dtype)
    assert await group.call("load", folder) == [False] * SIZES[other][1]
    assert same(saved, await reference_of(group))
    # The weights that a run sends when it resumes are those of a version that was followed.
    await group.call("update", 4, drift)
    await group.call("offload", str(tmp_path))
    await group.call("restore")
    assert same(saved, await reference_of(group))
    await group.call("updates", 6, 12, drift)
    assert same(uninterrupted, await reference_of(group)), "the master is not the rounding of itself"

    # Without an average it is the weights alone; and the checkpoint is a model's.
    group = await start(pipes, "one", model, FIXED, dtype)
    await group.call("load", folder)
    assert same(saved, await reference_of(group))
    await group.call("convert", folder, str(tmp_path / "hf"))
    converted = HfReader(tmp_path / "hf")
    assert same(saved, {name: converted.get(name) for name in converted.names()})


async def test_a_checkpoint_without_a_master_begins_one(model: str, pipes: list[Connection], tmp_path: Path) -> None:
    folder, drift = str(tmp_path / "reference"), 1e-3
    plan = replace(FIXED, reset_period=3)
    group = await start(pipes, "one", model, plan, Dtype.bfloat16)
    await group.call("updates", 1, 4, drift)
    await group.call("save", folder)
    assert same(await reference_of(group), policy(model, 3, Dtype.bfloat16, drift))
    group = await start(pipes, "tp2", model, AVERAGE, Dtype.bfloat16)
    await group.call("load", folder)
    await group.call("updates", 4, 4, drift)
    old, new = (policy(model, version, Dtype.bfloat16, drift) for version in (3, 4))
    for name, tensor in (await reference_of(group)).items():
        exact = 0.9 * old[name].double() + 0.1 * new[name].double()
        torch.testing.assert_close(tensor.double(), exact, rtol=2**-8, atol=0, msg=name)


def test_what_is_due_goes_by_the_version() -> None:
    both = ReferencePlan(tau=0.5, update_period=3, reset_period=4)
    assert [both.kept_at(version) for version in range(1, 13)] == [1, 1, 0.5, 0, 1, 0.5, 1, 0, 0.5, 1, 1, 0]
    assert ReferencePlan(1.0, 1, None).kept_at(7) == 1


@pytest.mark.parametrize(
    ("plan", "dtype"),
    [
        (replace(AVERAGE, reset_period=4), Dtype.bfloat16),
        (replace(FIXED, reset_period=3), Dtype.float32),
        (FIXED, Dtype.float32),
    ],
    ids=repr,
)
async def test_each_version_does_what_is_due_and_no_more(
    plan: ReferencePlan, dtype: Dtype, model: str, pipes: list[Connection]
) -> None:
    group = await start(pipes, "one", model, plan, dtype)
    for version in range(9):
        await group.call("update", version)
        found, exact = await reference_of(group), averaged(model, dtype, plan, version, 0.02)
        for name, tensor in exact.items():
            rtol = 1e-6 if dtype is Dtype.float32 else 2**-8
            torch.testing.assert_close(found[name].double(), tensor, rtol=rtol, atol=1e-6, msg=name)
        if plan.reset_period is not None and version and version % plan.reset_period == 0:
            assert same(found, policy(model, version, dtype))
        if plan is FIXED:
            assert same(found, policy(model, 0, dtype))
        await group.call("update", version)
        assert same(found, await reference_of(group)), "a version counts once"


async def test_only_an_average_in_bfloat16_takes_memory_beyond_its_weights(
    model: str, pipes: list[Connection], tmp_path: Path
) -> None:
    away = {}
    for plan in (FIXED, replace(FIXED, reset_period=2), AVERAGE):
        group = await start(pipes, "one", model, plan, Dtype.bfloat16)
        away[plan] = (await group.call("offload", str(tmp_path)))[0].bytes
        await group.call("refuses", RunError)
    weights = sum(tensor.nbytes for tensor in policy(model, 0, Dtype.bfloat16).values())
    # Of policy and reference, and of a master of twice the size, all but the ends of tensors.
    plain, reset = away[FIXED], away[replace(FIXED, reset_period=2)]
    assert max(plain, reset) <= 2 * weights
    assert abs(plain - reset) <= 0.05 * weights, "whole pages are given back: where tensors begin decides on their ends"
    assert weights < away[AVERAGE] - away[FIXED] <= 2.2 * weights


async def test_without_a_reference_nothing_is_kept_of_one(model: str, pipes: list[Connection]) -> None:
    group = await start(pipes, "one", model, None)
    ((found, *_),) = await group.call("compute", reference.make_batches(1))
    assert found.reference is None
    assert found.picks is None
    await group.call("refuses", RuntimeError)
    with pytest.raises(AssertionError, match="ValueError"):
        await start(pipes, "one", model, None, Dtype.float32, TopkPlan(3, forward=True))


def dense(model: Path, batch: MicroBatch, padded: Sequence[MicroBatch]) -> Tensor:
    """Log-probs of the whole vocabulary in the place of each trained token, [trained, vocabulary], in float64."""
    network = reference.load(model).double()
    rows = []
    for part in padded:
        logits = network(torch.tensor(part.tokens)).logits.detach() / reference.TEMPERATURE
        before = torch.nn.functional.pad(logits[:, :-1], (0, 0, 1, 0))
        rows.append(before[torch.tensor(part.loss_mask)])
    found = torch.log_softmax(torch.cat(rows), dim=-1)
    assert len(found) == batch.trained_tokens
    return found


@pytest.mark.parametrize("size", ANY_SIZE)
@pytest.mark.parametrize("forward", [False, True], ids=["reverse", "forward"])
async def test_picks_are_those_of_the_whole_vocabulary(
    forward: bool, size: str, model: str, pipes: list[Connection], tmp_path: Path
) -> None:
    k = 7
    padded = [[one] for one in reference.make_batches(2)]
    padded += [reference.make_batches(2, seed=5)]
    filler = collate([], pad_id=0, multiple_of=4)
    batches = [padded[0][0], padded[1][0], reference.packed(*padded[2]), filler]
    group = await start(pipes, size, model, FIXED, Dtype.float32, TopkPlan(k, forward))
    await group.call("update", 3)
    answers = [answer for answer in await group.call("compute", batches) if answer is not None]
    assert len(answers) == (2 if size == "dp2" else 1), "none but the processes that report"
    results = [None] * len(batches)
    for rank, answer in enumerate(answers):
        results[rank :: len(answers)] = answer

    newer = reference.load(Path(model))
    newer.load_state_dict(policy(model, 3, Dtype.float32), strict=False)
    newer.save_pretrained(tmp_path)
    for found, batch, parts in zip(results[:3], batches, padded, strict=False):
        assert found is not None
        of_policy, of_reference = dense(tmp_path, batch, parts), dense(Path(model), batch, parts)
        expected = (of_reference if forward else of_policy).topk(k).indices.sort().values
        tokens, logprobs = found.picks
        assert (tokens.dtype, logprobs.dtype) == (np.int32, np.float32)
        order = np.argsort(tokens, axis=1)
        np.testing.assert_array_equal(np.take_along_axis(tokens, order, 1), expected.numpy())
        np.testing.assert_allclose(
            np.take_along_axis(logprobs, order, 1),
            of_reference.gather(1, expected).numpy(),
            rtol=2e-5,
            atol=2e-5,
        )
        targets = torch.tensor(batch.targets)[:, None]
        for values, whole in ((found.policy, of_policy), (found.reference, of_reference)):
            np.testing.assert_allclose(
                values[batch.loss_mask], whole.gather(1, targets)[:, 0].numpy(), rtol=2e-5, atol=2e-5
            )
        assert not torch.allclose(of_policy, of_reference, atol=0.05)
    assert results[3] is not None
    assert results[3].picks[0].shape == results[3].picks[1].shape == (0, k)
