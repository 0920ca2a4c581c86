"""Compares training and log-probs on a parallel layout with those of Hugging Face transformers in one process."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlsys.config.schema import AdamwConfig, Dtype, LrDecay
from rlsys.trainer.batches import MicroBatch, collate
from rlsys.trainer.log_prob import LogProbWorker, ReferencePlan
from rlsys.trainer.offload import HostBlocks
from rlsys.trainer.optimizer import learning_rate
from rlsys.weights.bucket import Bucket, ChecksumError, unpack
from rlsys.weights.weight_map import largest_tensor_bytes, read_architecture
from tests.support.megatron_processes import Group, on_ranks
from tests.support.tensors import digest_of
from tests.trainer import reference
from tests.trainer.harness import TOTAL_STEPS, Layout, export, local_model, make_actor, weights_of

STEPS, PER_STEP = 2, 6
FIXED = ReferencePlan(tau=1.0, update_period=1, reset_period=None)
OPTIMIZER = AdamwConfig(
    lr=5e-3,
    decay=LrDecay.cosine,
    weight_decay=0.1,
    # Large, so that Adam's update depends on the size of the gradient as well as its sign.
    eps=1e-2,
    clip_grad=2.0,
)


def _steps() -> list[list[MicroBatch]]:
    return [reference.make_batches(PER_STEP, seed=step) for step in range(STEPS)]


def _half_packed(batches: list[MicroBatch], layout: Layout) -> list[MicroBatch]:
    """The same micro-batches, every second one packed; with context parallelism, all are packed."""
    return [
        reference.packed(batch, cp=layout.cp, tp=layout.tp) if index % 2 or layout.cp > 1 else batch
        for index, batch in enumerate(batches)
    ]


def _in_group(group: Group, layout: Layout, model: Path, family: str | None) -> dict[str, Any]:
    results: dict[str, Any] = {}
    optimizer = replace(OPTIMIZER, distributed=layout.distributed)
    actor = make_actor(group, model, layout.parallel, optimizer, recompute=layout.recompute, family=family)
    place = actor.coords
    assert actor._exported is not None
    actor._exported._blocks = HostBlocks(10_000)  # A parameter has parts in several.
    actor.load_hf(model)
    results["initial"] = weights_of(actor)
    results["applied"] = []
    for step, batches in enumerate(_steps()):
        mine = _half_packed(batches[place.dp :: place.dp_size], layout)
        # Each step splits its batches differently over calls, which must change nothing. One batch has no trained
        # token, so that no rank has a logit to compute.
        filler = layout.filler or collate([], pad_id=0, multiple_of=4, packed=bool(step % 2))
        for piece in (mine[:step], [*mine[step : step + 1], filler], mine[step + 1 :]):
            actor.accumulate(piece)
            if step == 1:
                results["again"] = weights_of(actor, again=True)
        results["applied"].append(actor.apply())
    buckets = export(actor, largest_tensor_bytes(read_architecture(model, family), Dtype.float32))
    assert group.rank or len(buckets) > 3
    results["trained"] = {r.name: t.clone() for b in buckets for r, t in unpack(b)}
    box: list[Any] = [buckets, digest_of(buckets)]
    torch.distributed.broadcast_object_list(box, src=0)
    config = local_model(model, recompute=layout.recompute, family=family)
    worker = LogProbWorker(group.meet(), config, layout.parallel, reference.TEMPERATURE, 1, FIXED)
    probe = _half_packed(_steps()[0][:3], layout)
    results["before"] = worker.compute(probe)
    _update(worker, 1, box[0][:1], box[1], refused=True)
    _update(worker, 1, box[0], "0" * 32, refused=True)
    with pytest.raises(RuntimeError, match="weights"):
        worker.compute(probe)
    with pytest.raises(RuntimeError, match="begin_update"):
        worker.take_bucket(box[0][0])
    _update(worker, 2, box[0], box[1])
    assert worker.version == 2
    results["after"] = worker.compute(probe)
    place = group.meet()
    only = LogProbWorker(place, config, layout.parallel, reference.TEMPERATURE, 1, FIXED, recompute=False)
    results["reference only"] = only.compute(probe)
    with pytest.raises(RuntimeError, match="no policy"):
        only.begin_update()
    return results


def _update(worker: LogProbWorker, version: int, buckets: list[Bucket], digest: str, refused: bool = False) -> None:
    worker.begin_update()
    for bucket in buckets:
        worker.take_bucket(bucket)
    with pytest.raises(ChecksumError) if refused else nullcontext():
        worker.finish_update(version, digest)


def _close(actual: Any, expected: Any, tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def _of_trained(values: np.ndarray, batch: MicroBatch) -> np.ndarray:
    """Return the values of trained tokens, row by row; asserts that all other values are 0."""
    assert not values[~batch.loss_mask].any()
    return values[batch.loss_mask]


def check_training(layout: Layout, model: Path, family: str | None = None) -> None:
    """Assert that training and log-probs of a model equal those of transformers; `family` is as in `model.family`."""
    ranks = on_ranks(_in_group, layout.processes, layout, model, family)
    first, reporting = ranks[0], ranks[layout.reporting[0]]

    untrained = reference.load(model)
    expected = reference.named_tensors(untrained)
    assert first["initial"].keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(first["initial"][name], tensor), name
        assert torch.equal(first["again"][name], tensor), "the export is repeated within a later step"

    rates = [learning_rate(step, TOTAL_STEPS, OPTIMIZER) for step in range(STEPS)]
    trained, norms = reference.train(model, _steps(), OPTIMIZER, rates)
    for step, applied in enumerate(first["applied"]):
        assert applied.divisor == sum(b.trained_tokens for b in _steps()[step])
        assert applied.lr == rates[step]
        _close(applied.grad_norm, norms[step], 1e-4)
    assert min(norms) > OPTIMIZER.clip_grad, "clipping must take effect"
    for name, tensor in reference.named_tensors(trained).items():
        _close(first["trained"][name], tensor, 2e-5)

    with torch.no_grad():
        for index, (padded, batch) in enumerate(zip(_steps()[0], _half_packed(_steps()[0][:3], layout), strict=False)):
            before = reference.logprobs_and_entropy(untrained, padded.tokens)[0].numpy()[padded.loss_mask]
            after = reference.logprobs_and_entropy(trained, padded.tokens)[0].numpy()[padded.loss_mask]
            for when, policy, tolerance in (("before", before, 2e-5), ("after", after, 1e-4)):
                found = reporting[when][index]
                _close(_of_trained(found.policy, batch), policy, tolerance)
                _close(_of_trained(found.reference, batch), before, 2e-5)
            alone = reporting["reference only"][index]
            assert alone.policy is None
            _close(_of_trained(alone.reference, batch), before, 2e-5)
            assert np.abs(after - before).max() > 0.05
