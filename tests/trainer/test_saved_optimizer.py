"""Tests of the optimiser's state in a checkpoint: its values, and how they are gathered."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from rlsys.trainer import optimizer as adam
from rlsys.trainer.actor import Actor
from tests.support import tiny_configs
from tests.support.megatron_processes import Group, on_ranks
from tests.trainer import reference
from tests.trainer.harness import OPTIMIZER, make_actor, weights_of

GATHERED, SMALL_BUCKET = 1000, 4000
"""Elements that are gathered at a time, and elements of a bucket: both much smaller than the model."""
STEPS = [reference.make_batches(4, seed=step) for step in range(2)]


def _train(actor: Actor, step: int) -> None:
    actor.accumulate(STEPS[step][actor.coords.dp :: actor.coords.dp_size])
    actor.apply()


def _save(actor: Actor, folder: Path) -> list[int]:
    """Save a checkpoint; return the sizes of what was gathered for it. Other collectives of tensors fail."""
    sizes, gather = [], dist.all_gather_single

    def counted(output: torch.Tensor, *args: object) -> None:
        sizes.append(output.numel())
        gather(output, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adam, "_GATHERED_ELEMENTS", GATHERED)
        patch.setattr(dist, "all_gather_single", counted)
        patch.delattr(dist, "all_gather")
        patch.delattr(dist, "gather")
        actor.begin_save(folder)
    actor.finish_save()
    return sizes


def _saved_in_both_ways(group: Group, model: Path, folder: Path) -> tuple[list[int], set[int], int]:
    """Sizes of what is gathered, parameters that a resume reads, and the number of all parameters."""
    actor = make_actor(group, model)
    actor.load_hf(model)
    _train(actor, 0)
    sizes = _save(actor, folder / "ours")
    reads = actor._optimizer.state_to_load(actor._model.sharded_state(), steps=1)["param_state"].keys()
    for member in actor._optimizer._members:
        member.__class__ = DistributedOptimizer
    actor.begin_save(folder / "megatron")
    actor.finish_save()
    return sizes, {*reads}, len(actor._policy.trainable)


def test_state_is_gathered_in_pieces_saved_as_megatron_saves_it_and_read_by_the_ranks_that_keep_it(
    tmp_path: Path,
) -> None:
    model = reference.make_model(tiny_configs.qwen2(), tmp_path / "model")
    (_, first, count), (_, second, _) = results = on_ranks(_saved_in_both_ways, 2, model, tmp_path)
    assert first | second == {*range(count)}
    assert len(first & second) <= 1, "only the parameter that is cut is read by both"
    for sizes, *_ in results:
        assert set(sizes) == {GATHERED}
        assert len(sizes) > 3 * 10, "weights and two moments, each in pieces"
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / way).glob("*.distcp")} for way in ("ours", "megatron")
    ]
    assert files[0].keys() == {"__0_0.distcp", "__1_0.distcp"}
    assert files[0] == files[1]


def _resumed(group: Group, model: Path, folder: Path) -> list[dict[str, torch.Tensor]]:
    """Weights after two steps, and after the second step again, from a checkpoint before it."""
    small = functools.partial(adam.DistributedDataParallelConfig, bucket_size=SMALL_BUCKET)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adam, "DistributedDataParallelConfig", small)
        actor = make_actor(group, model, optimizer=replace(OPTIMIZER, overlap_grad_reduce=True))
    actor.load_hf(model)
    buckets = [bucket for buffer in actor._wrapped.buffers for bucket in buffer.buckets]
    assert any(one.numel_unpadded < one.grad_data.numel() for one in buckets[:-1]), (
        "the test needs padding between buckets"
    )
    _train(actor, 0)
    _save(actor, folder)
    _train(actor, 1)
    found = [weights_of(actor)]
    actor.load(folder)
    _train(actor, 1)
    return [*found, weights_of(actor)]


def test_state_resumes_exactly_from_buckets_with_padding_between_them(tmp_path: Path) -> None:
    """Megatron-core 0.16.1 would save the parameters of later buckets shifted by the padding before them."""
    model = reference.make_model(tiny_configs.qwen2(), tmp_path / "model")
    undisturbed, resumed = on_ranks(_resumed, 2, model, tmp_path / "saved")[0]
    assert all(torch.equal(undisturbed[name], resumed[name]) for name in undisturbed)


def test_state_exists_before_the_first_step_with_an_optimizer_that_counts_in_its_groups() -> None:
    """Transformer Engine's AdamW has the step in the groups; a checkpoint before its first step needs the moments."""

    class Fused(torch.optim.Adam):
        pass

    weight = torch.nn.Parameter(torch.ones(3))
    for kind, keys in ((Fused, set()), (torch.optim.AdamW, {"step"})):
        optimizer = kind([weight])
        adam._allocate(optimizer)
        assert optimizer.state[weight].keys() == {"exp_avg", "exp_avg_sq"} | keys
