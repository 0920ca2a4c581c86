"""Tests of the reference policy: against a float64 loop, on parallel layouts, and saved and resumed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlsys.config.schema import Dtype, ParallelConfig
from rlsys.trainer import mesh
from rlsys.trainer.log_prob import LogProbWorker, ReferencePlan, Teacher
from rlsys.trainer.offload import OffloadStats
from rlsys.weights.convert.conversion import megatron_to_hf
from rlsys.weights.hf_io import HfReader
from tests.support import tiny_configs
from tests.support.megatron_processes import HostedGroup, pool, rendezvous
from tests.support.tensors import digest_of, pack
from tests.trainer import reference
from tests.trainer.harness import local_model, weights_in, weights_of

ONE = ParallelConfig()
LAYOUTS = {
    "one": (ONE, 1),
    "tp2": (ParallelConfig(tp=2), 2),
    "dp2": (ONE, 2),
    "tp2 pp2": (ParallelConfig(tp=2, pp=2, pp_layers=[1, 2]), 4),
}
"""(layout, number of processes) by name."""
AVERAGE = ReferencePlan(tau=0.9, update_period=2, reset_period=None)
FIXED = replace(AVERAGE, tau=1.0)


def policy(model: str, version: int, dtype: Dtype, drift: float = 0.02) -> dict[str, Tensor]:
    """Weights of a policy version; each version lies at a different distance along the same direction."""
    reader = HfReader(model)
    generator = torch.Generator().manual_seed(1)
    found = {}
    for name in sorted(reader.names()):
        start = reader.get(name)
        step = torch.randn(start.shape, generator=generator) * drift
        found[name] = (start + step * (version + (version % 3))).to(getattr(torch, dtype))
    return found


def averaged(model: str, dtype: Dtype, plan: ReferencePlan, versions: int, drift: float) -> dict[str, Tensor]:
    """The reference policy in float64 after `versions` versions, by the rules of `plan`."""
    held = {name: tensor.double() for name, tensor in policy(model, 0, dtype, drift).items()}
    for version in range(1, versions + 1):
        new = policy(model, version, dtype, drift)
        if plan.reset_period is not None and version % plan.reset_period == 0:
            held = {name: new[name].double() for name in held}
        elif version % plan.update_period == 0:
            held = {name: plan.tau * held[name] + (1 - plan.tau) * new[name].double() for name in held}
    return held


class SelfUpdatingWorker(LogProbWorker):
    """A log-prob worker that updates itself to versions made by `policy`."""

    def __init__(
        self,
        rendezvous: mesh.Rendezvous,
        model: str,
        parallel: ParallelConfig,
        plan: ReferencePlan | None,
        dtype: Dtype = Dtype.float32,
    ) -> None:
        self._path, self._dtype = model, dtype
        super().__init__(rendezvous, local_model(model, dtype), parallel, reference.TEMPERATURE, 1, plan)

    def offload(self, scratch: str) -> OffloadStats:
        self._scratch = scratch
        return super().offload()

    def updates(self, first: int, last: int, drift: float = 0.02) -> None:
        for version in range(first, last + 1):
            self.begin_update()
            buckets = list(pack(policy(self._path, version, self._dtype, drift).items(), 50_000))
            for bucket in buckets:
                self.take_bucket(bucket)
            self.finish_update(version, digest_of(buckets))

    def save(self, folder: str) -> None:
        self.begin_save(folder)
        self.finish_save()

    def exported(self) -> dict[str, np.ndarray]:
        """Exported tensors of the reference in float32; empty on ranks other than 0."""
        self.begin_export()
        return {name: tensor.float().numpy() for name, tensor in weights_of(self).items()}

    def policy(self) -> dict[str, np.ndarray]:
        """Tensors of the policy in float32; empty on ranks other than 0."""
        return {name: tensor.float().numpy() for name, tensor in weights_in(self).items()}

    def masters(self) -> int:
        """Number of weights of the reference that have a float32 copy."""
        held: Any = self._reference
        return len(held._master)

    def convert(self, checkpoint: str, out: str) -> None:
        """Leave the process group and convert the checkpoint; no other call may follow."""
        mesh.stop()
        megatron_to_hf(checkpoint, out, self._path, processes=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(reference.make_model(tiny_configs.qwen2(), tmp_path_factory.mktemp("model")))


async def start(layout: str, model: str, *more: Any) -> HostedGroup:
    parallel, world = LAYOUTS[layout]
    group = HostedGroup("bench", pool(world))
    _, port = await group.free_address(60)
    await group.build(
        SelfUpdatingWorker, [(rendezvous(rank, world, port), model, parallel, *more) for rank in range(world)], 60
    )
    return group


async def reference_of(group: HostedGroup) -> dict[str, Tensor]:
    return {name: torch.tensor(value) for name, value in (await group.call("exported"))[0].items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name].float()) for name in one)


async def test_bfloat16_average_accumulates_steps_below_its_rounding(model: str) -> None:
    drift, versions = 1e-4, 40
    plan = replace(AVERAGE, update_period=1)
    group = await start("one", model, plan, Dtype.bfloat16)
    await group.call("updates", 1, versions, drift)
    found = await reference_of(group)
    exact = averaged(model, Dtype.bfloat16, plan, versions, drift)
    equal, count = 0, 0
    for name, tensor in exact.items():
        equal += int((found[name] == tensor.bfloat16().float()).sum())
        count += tensor.numel()
        # Only values near the middle between two bfloat16 numbers may be rounded the other way.
        torch.testing.assert_close(found[name].double(), tensor, rtol=2**-8, atol=0, msg=name)
    assert equal > 0.999 * count


@pytest.mark.parametrize(
    ("layout", "other", "dtype"),
    [("tp2", "dp2", Dtype.bfloat16), pytest.param("tp2 pp2", "dp2", Dtype.float32, marks=pytest.mark.slow)],
)
async def test_reference_resumes_under_another_layout(
    layout: str, other: str, dtype: Dtype, model: str, tmp_path: Path
) -> None:
    folder, drift = str(tmp_path / "reference"), 1e-3
    group = await start(layout, model, AVERAGE, dtype)
    await group.call("updates", 0, 5, drift)
    await group.call("save", folder)
    saved = await reference_of(group)
    await group.call("updates", 6, 8, drift)
    uninterrupted = await reference_of(group)
    assert not same(saved, uninterrupted)

    group = await start(other, model, AVERAGE, dtype)
    assert await group.call("load", folder) == [False] * LAYOUTS[other][1]
    assert same(saved, await reference_of(group))
    # A resumed run first sends the weights of a version that the reference already includes.
    await group.call("updates", 4, 4, drift)
    await group.call("offload", str(tmp_path))
    await group.call("restore")
    assert same(saved, await reference_of(group))
    await group.call("updates", 6, 8, drift)
    assert same(uninterrupted, await reference_of(group)), "the master weights must be saved unrounded"

    # A fixed reference loads the weights, and the checkpoint can be converted like any other.
    group = await start("one", model, FIXED, dtype)
    await group.call("load", folder)
    assert same(saved, await reference_of(group))
    await group.call("convert", folder, str(tmp_path / "hf"))
    converted = HfReader(tmp_path / "hf")
    assert same(saved, {name: converted.get(name) for name in converted.names()})


async def test_average_resumes_from_a_checkpoint_without_master_weights(model: str, tmp_path: Path) -> None:
    folder, drift = str(tmp_path / "reference"), 1e-3
    plan = replace(FIXED, reset_period=3)
    group = await start("one", model, plan, Dtype.bfloat16)
    await group.call("updates", 1, 4, drift)
    await group.call("save", folder)
    group = await start("one", model, AVERAGE, Dtype.bfloat16)
    await group.call("load", folder)
    await group.call("updates", 4, 4, drift)
    old, new = (policy(model, version, Dtype.bfloat16, drift) for version in (3, 4))
    for name, tensor in (await reference_of(group)).items():
        exact = 0.9 * old[name].double() + 0.1 * new[name].double()
        torch.testing.assert_close(tensor.double(), exact, rtol=2**-8, atol=0, msg=name)


@pytest.mark.parametrize(
    ("plan", "dtype", "layout"),
    [
        (replace(AVERAGE, update_period=1, reset_period=3), Dtype.bfloat16, "one"),
        (AVERAGE, Dtype.float32, "tp2"),
        (FIXED, Dtype.float32, "one"),
    ],
    ids=["average with resets", "average", "fixed"],
)
async def test_each_version_updates_the_reference_once_by_its_plan(
    plan: ReferencePlan, dtype: Dtype, layout: str, model: str
) -> None:
    group = await start(layout, model, plan, dtype)
    for version in range(5):
        await group.call("updates", version, version)
        found, exact = await reference_of(group), averaged(model, dtype, plan, version, 0.02)
        for name, tensor in exact.items():
            rtol = 1e-6 if dtype is Dtype.float32 else 2**-8
            torch.testing.assert_close(found[name].double(), tensor, rtol=rtol, atol=1e-6, msg=name)
        if version == plan.reset_period or plan is FIXED:
            assert same(found, policy(model, plan.reset_period or 0, dtype))
        await group.call("updates", version, version)
        assert same(found, await reference_of(group)), "a version counts once"


async def test_worker_without_a_reference_returns_nothing_of_one(model: str) -> None:
    group = await start("one", model, None)
    await group.call("updates", 1, 1)
    found_policy = {name: torch.tensor(value) for name, value in (await group.call("policy"))[0].items()}
    assert same(found_policy, policy(model, 1, Dtype.float32)), "bit for bit"
    ((found,),) = await group.call("compute", reference.make_batches(1))
    assert found.reference is found.picks is None


async def test_teacher_of_another_family_and_depth_scores_as_transformers_do(model: str, tmp_path: Path) -> None:
    folder = reference.make_model(tiny_configs.llama3(layers=4), tmp_path)
    batches, teacher = reference.make_batches(2), reference.load(folder)
    group = await start("tp2", model, replace(FIXED, teacher=Teacher(local_model(folder))))
    await group.call("updates", 1, 1)  # The policy moves, and its teacher stays.
    (found,) = [answer for answer in await group.call("compute", batches) if answer is not None]
    for batch, logprobs in zip(batches, found, strict=True):
        with torch.no_grad():
            expected = reference.logprobs_and_entropy(teacher, batch.tokens)[0].numpy()
        np.testing.assert_allclose(logprobs.reference, expected * batch.loss_mask, rtol=2e-5, atol=2e-5)
        assert np.abs(logprobs.policy - logprobs.reference).max() > 0.1


async def test_policy_that_is_its_own_teacher_has_the_same_log_probs_to_the_bit(model: str) -> None:
    group = await start("one", model, replace(FIXED, teacher=Teacher(local_model(model))))
    ((found,),) = await group.call("compute", reference.make_batches(1))
    np.testing.assert_array_equal(found.policy, found.reference)
    assert found.policy.any()


async def test_only_an_average_in_bfloat16_has_master_weights(model: str) -> None:
    found = []
    for case in ((FIXED, Dtype.bfloat16), (AVERAGE, Dtype.float32), (AVERAGE, Dtype.bfloat16)):
        group = await start("one", model, *case)
        found.append((await group.call("masters"))[0] > 0)
    assert found == [False, False, True]
