"""Trains adapters (LoRA) in Megatron processes, which need not import PEFT, for the tests against PEFT."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from rlsys.config.schema import AdamwConfig, LoraConfig, ModelConfig, ParallelConfig
from rlsys.trainer.actor import Actor
from rlsys.trainer.batches import MicroBatch
from rlsys.trainer.export import update_loader
from rlsys.trainer.forward import context_shares, forward
from rlsys.trainer.log_prob import LogProbWorker, ReferencePlan
from rlsys.weights.bucket import Bucket, ChecksumError, unpack
from rlsys.weights.checkpoint.adapters import BaseModel
from rlsys.weights.weight_map import Cut
from tests.support.megatron_processes import Group
from tests.support.tensors import digest_of
from tests.trainer import reference
from tests.trainer.harness import Layout, export, local_model, make_actor, weights_in, weights_of

STEPS = [reference.make_batches(4, seed=step) for step in range(3)]
RATES = [5e-3] * len(STEPS)
# With a large eps, Adam's update depends on the size of the gradient as well as its sign.
OPTIMIZER = AdamwConfig(lr=RATES[0], weight_decay=0.1, eps=1e-2, clip_grad=0.1)
DRAWS = 400
FIXED = ReferencePlan(tau=1.0, update_period=1, reset_period=None)


def load_adapters(actor: Actor, folder: Path) -> None:
    """Load the adapters that PEFT has saved; PEFT saves none for layers that are no targets."""
    saved, loader = load_file(folder / "adapter_model.safetensors"), update_loader(actor._policy)
    shapes = {
        hf: shape
        for entry in actor._policy.adapter_entries
        for hf, shape in zip(entry.hf, entry.rule.shapes, strict=True)
    }
    for name in loader.missing():
        loader.feed(name, saved.pop(name) if name in saved else torch.zeros(shapes[name]))
    assert actor.coords.pp_size > 1 or not saved
    actor._optimizer.reload_weights()


def mine(batches: list[MicroBatch], layout: Layout, dp: int) -> list[MicroBatch]:
    own = batches[dp :: layout.dp]
    return [reference.packed(batch, cp=layout.cp, tp=layout.tp) for batch in own] if layout.cp > 1 else own


def train_and_score(group: Group, layout: Layout, lora: LoraConfig, model: Path, adapters: Path) -> dict[str, Any]:
    optimizer = replace(OPTIMIZER, distributed=layout.distributed)
    actor = make_actor(group, model, layout.parallel, optimizer, recompute=layout.recompute, lora=lora)
    actor.load_hf(model)
    results: dict[str, Any] = {"initial": weights_of(actor)}
    load_adapters(actor, adapters)
    results["loaded"] = weights_of(actor)
    results["applied"] = []
    for batches in STEPS:
        actor.accumulate(mine(batches, layout, actor.coords.dp))
        results["applied"].append(actor.apply())
    results["again"] = weights_of(actor, again=True)
    shared = [entry.name for entry in actor._policy.adapter_entries if entry.rule.cut is Cut.WHOLE]
    results["shared"] = {name: actor._policy.parameters[name].detach().clone() for name in shared}
    results["state"] = sum(tensor.numel() for state in actor._optimizer._members for tensor in _moments(state))
    results["trainable"] = sum(one.numel() for one in actor._policy.trainable.values())
    buckets = export(actor, 50_000)
    results["trained"] = tensors_in(buckets)
    box: list[Any] = [buckets, digest_of(buckets)]
    dist.broadcast_object_list(box, src=0)
    results |= _scored(group, layout, local_model(model, recompute=layout.recompute, lora=lora), *box)
    return results


def _moments(member: Any) -> list[Tensor]:
    return [tensor for state in member.optimizer.state.values() for name, tensor in state.items() if name != "step"]


def _scored(group: Group, layout: Layout, model: ModelConfig, buckets: list[Bucket], digest: str) -> dict[str, Any]:
    """Log-probs of policy and reference before and after the update of `buckets`."""
    worker = LogProbWorker(group.meet(), model, layout.parallel, reference.TEMPERATURE, 1, FIXED)
    assert worker._reference is not None
    assert not hasattr(worker._reference, "model"), "the reference must hold no model of its own"
    probe = mine(STEPS[0], replace(layout, dp=1), 0)
    results = {"before": worker.compute(probe)}
    worker.begin_update()
    for bucket in buckets:
        worker.take_bucket(bucket)
    worker.finish_update(1, digest)
    return results | {"after": worker.compute(probe)}


def sent_alone(group: Group, layout: Layout, lora: LoraConfig, models: list[Path], adapters: Path) -> dict[str, Any]:
    """Tensors of versions that are adapters alone: as the actor sends them, and as the inference group does.

    The second of `models` has other weights; an inference group beside it must refuse the version.
    """
    actor = make_actor(group, models[0], layout.parallel, lora=lora)
    actor.load_hf(models[0])
    load_adapters(actor, adapters)
    digest = BaseModel.of(models[0]).digest
    buckets = export(actor, 8_000, digest)
    box: list[Any] = [buckets, digest_of(buckets, digest)]
    dist.broadcast_object_list(box, src=0)
    results: dict[str, Any] = {"actor": tensors_in(buckets)}
    for parameter in actor._policy.trainable.values():
        parameter.data.add_(1)
    results["again"] = tensors_in(export(actor, 8_000, digest, again=True))
    for model in models:
        worker = LogProbWorker(group.meet(), local_model(model, lora=lora), layout.parallel, 1.0, 1, FIXED)
        worker.begin_update()
        for bucket in box[0]:
            worker.take_bucket(bucket)
        if model == models[0]:
            worker.finish_update(1, box[1])
            results["inference"] = weights_in(worker)
        else:
            with pytest.raises(ChecksumError):
                worker.finish_update(1, box[1])
    return results


def tensors_in(buckets: list[Bucket]) -> dict[str, Tensor]:
    return {record.name: tensor.clone() for bucket in buckets for record, tensor in unpack(bucket)}


def logits_and_gradients(
    group: Group, model: Path, adapters: Path, lora: LoraConfig, batch: MicroBatch
) -> dict[str, Any]:
    actor = make_actor(group, model, ParallelConfig(), lora=lora)
    actor.load_hf(model)
    load_adapters(actor, adapters)
    policy = actor._policy
    shares = context_shares(policy, [batch])
    (logits,) = forward(policy, shares, lambda logits, _: logits)
    with policy.without_adapters():
        (off,) = forward(policy, shares, lambda logits, _: logits)
    actor.accumulate([batch])
    gradients = {
        name: tensor
        for entry in policy.adapter_entries
        for name, tensor in policy.weights.merge(entry, [policy.parameters[entry.name].main_grad])
    }
    frozen = [name for name, one in policy.parameters.items() if not one.requires_grad and one.grad is not None]
    return {"logits": logits, "off": off, "gradients": gradients, "frozen with a gradient": frozen}


def dropped(group: Group, model: Path, lora: LoraConfig) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Output, mean output and standard error of the mean over draws, of the adapters of a layer's attention."""
    actor = make_actor(group, model, ParallelConfig(), lora=lora)
    actor.load_hf(model)
    results = {}
    for name, adapter in list(actor._policy.adapters.items())[:2]:
        inputs = torch.randn(32, 1, adapter.a.shape[1])
        with torch.no_grad():
            adapter.b.normal_()
            drawn = torch.stack([adapter.train()(inputs) for _ in range(DRAWS)])
            results[name] = adapter.eval()(inputs), drawn.mean(0), drawn.std(0) / DRAWS**0.5
    return results
