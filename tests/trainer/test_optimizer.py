"""Tests of the optimiser: SGD, Muon, overlapped communication, the learning rate, and parameters that are treated apart."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlsys.config.schema import AdamwConfig, Dtype, LrDecay, MuonConfig, OptimizerConfig, SgdConfig
from rlsys.trainer import optimizer as adam
from rlsys.trainer.actor import Actor
from rlsys.trainer.model.stage_model import PolicyModel, TargetLogitsModel
from rlsys.weights.weight_map import WeightMap, architecture_of
from tests.support import tiny_configs
from tests.support.megatron_processes import Group, on_ranks
from tests.trainer import reference
from tests.trainer.harness import TOTAL_STEPS, Layout, make_actor, weights_of

SMALL_BUCKET = 4000
"""Numbers per bucket, few enough that a small model has several buckets."""
STEPS = 2
# Without momentum and with a large epsilon, an Adam step is nearly the gradient.
PLAIN = AdamwConfig(lr=0.3, beta1=0.0, beta2=0.0, eps=1.0, clip_grad=1e9, weight_decay=0.0)
WAYS = {
    "plain": replace(PLAIN, distributed=False),
    "sums": replace(PLAIN, distributed=False, overlap_grad_reduce=True),
    "distributed-sums": replace(PLAIN, overlap_grad_reduce=True),
    "distributed-both": replace(PLAIN, overlap_grad_reduce=True, overlap_param_gather=True),
}


def _trained(group: Group, layout: Layout, model: Path, way: OptimizerConfig, marked: bool) -> dict[str, Any]:
    """Results of `STEPS` steps of several calls each; with `marked`, the last call of a step says that it is last."""
    actor = make_actor(group, model, layout.parallel, way, recompute=layout.recompute)
    actor.load_hf(model)
    wrapped = actor._wrapped
    buckets = [*wrapped.bucket_groups, *wrapped.expert_parallel_bucket_groups]
    norms, in_flight = [], []
    for step in range(STEPS):
        batches = reference.make_batches(4, seed=step)[actor.coords.dp :: actor.coords.dp_size]
        calls = [batches[:1], [], batches[1:]]
        for number, call in enumerate(calls, 1):
            actor.accumulate(call, last=marked and number == len(calls))
            in_flight.append(sum(one.grad_reduce_handle is not None for one in buckets))
        norms.append(actor.apply().grad_norm)
    return {"norms": norms, "in_flight": in_flight, "weights": weights_of(actor), "buckets": len(buckets)}


def _in_group(group: Group, layout: Layout, model: Path) -> dict[str, Any]:
    small = functools.partial(adam.DistributedDataParallelConfig, bucket_size=SMALL_BUCKET)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adam, "DistributedDataParallelConfig", small)
        results = {name: _trained(group, layout, model, way, marked=True) for name, way in WAYS.items()}
        return results | {"unmarked": _trained(group, layout, model, WAYS["distributed-both"], marked=False)}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(dp=2), id="dp2"),
        pytest.param(Layout(dp=2, pp=2, recompute=True), id="dp2-pp2", marks=pytest.mark.slow),
        pytest.param(Layout(dp=2, ep=2), id="dp2-experts", marks=pytest.mark.slow),
    ],
)
def test_overlapped_communication_changes_no_step(layout: Layout, tmp_path: Path) -> None:
    make = tiny_configs.qwen3_moe if layout.ep > 1 else tiny_configs.qwen2
    model = reference.make_model(make(layers=2, tied=layout.tied), tmp_path / "model")
    ranks = on_ranks(_in_group, layout.processes, layout, model)
    plain = ranks[0]["plain"]
    before = reference.named_tensors(reference.load(model))
    assert any((plain["weights"][key] - tensor).abs().max() > 1e-3 for key, tensor in before.items())
    for way, found in ranks[0].items():
        assert found["norms"] == pytest.approx(plain["norms"], rel=1e-5), way
        for key, tensor in plain["weights"].items():
            torch.testing.assert_close(found["weights"][key], tensor, rtol=1e-5, atol=1e-6, msg=f"{way} {key}")
    # After the last call of a step, sums are in flight, except in the first step, where Megatron learns their order.
    for way, found in [item for rank in ranks for item in rank.items()]:
        overlaps = way not in ("plain", "unmarked")
        assert found["in_flight"] == [0] * 5 + [found["buckets"] if overlaps else 0], way
    # On later pipeline stages, Megatron puts all gradients in one bucket.
    assert ranks[0]["sums"]["buckets"] > 1


@pytest.mark.parametrize(
    ("decay", "warmup_fraction", "expected"),
    [
        (LrDecay.constant, 0.0, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        (LrDecay.constant, 1 / 3, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        (LrDecay.linear, 1 / 3, [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),
        (LrDecay.cosine, 1 / 3, [0.5, 1.0, 1.0, 0.882843, 0.6, 0.317157, 0.2]),
    ],
)
def test_learning_rate_warms_up_and_decays_to_its_minimum(
    decay: LrDecay, warmup_fraction: float, expected: list[float]
) -> None:
    config = AdamwConfig(lr=1.0, min_lr=0.2, decay=decay, warmup_fraction=warmup_fraction)
    assert [adam.learning_rate(step, 6, config) for step in range(7)] == pytest.approx(expected, abs=1e-6)


SGD = SgdConfig(lr=0.05, momentum=0.9, weight_decay=0.1, clip_grad=2.0, decay=LrDecay.linear)
MUON = MuonConfig(
    lr=0.02, newton_schulz_dtype=Dtype.float32, weight_decay=0.1, eps=1e-2, clip_grad=2.0, decay=LrDecay.linear
)
"""Muon whose rounding stays small: a large epsilon keeps AdamW from magnifying that of tiny gradients."""
BATCHES = [reference.make_batches(4, seed=step) for step in range(STEPS)]


def _take(actor: Actor, step: int) -> float:
    batches, cp = BATCHES[step][actor.coords.dp :: actor.coords.dp_size], actor.coords.cp_size
    actor.accumulate(batches if cp == 1 else [reference.packed(one, cp=cp) for one in batches])
    return actor.apply().grad_norm


def _steps(
    group: Group, layout: Layout, model: Path, dtype: Dtype, optimizer: OptimizerConfig, folder: Path
) -> dict[str, Any]:
    """Train, saving before every step, and once more from each checkpoint."""

    def new() -> Actor:
        return make_actor(group, model, layout.parallel, optimizer, dtype=dtype, recompute=layout.recompute)

    actor = new()
    actor.load_hf(model)
    norms = []
    for step in range(STEPS):
        actor.begin_save(folder / str(step))
        norms.append(_take(actor, step))
        actor.finish_save()
    results = {"norms": norms, "trained": weights_of(actor), "resumed": []}
    # The actor that has trained takes up the state as of its beginning, new ones that of each step.
    for step in (0, *range(STEPS)):
        assert actor.load(folder / str(step))
        for later in range(step, STEPS):
            _take(actor, later)
        results["resumed"].append(weights_of(actor))
        actor = new()
    return results


@pytest.mark.parametrize(
    ("optimizer", "layout", "dtype"),
    [
        pytest.param(SGD, Layout(tp=2, sequence_parallel=True), Dtype.float32, id="sgd, tp2"),
        pytest.param(SGD, Layout(), Dtype.bfloat16, id="sgd, bfloat16"),
        pytest.param(SGD, Layout(dp=2, pp=2, recompute=True), Dtype.float32, id="sgd, dp2-pp2", marks=pytest.mark.slow),
        pytest.param(SGD, Layout(dp=2, ep=2, tied=False), Dtype.float32, id="sgd, experts", marks=pytest.mark.slow),
        pytest.param(MUON, Layout(tp=2, sequence_parallel=True), Dtype.float32, id="muon, tp2"),
        pytest.param(MUON, Layout(pp=2, pp_layers=(2, 1)), Dtype.float32, id="muon, pp2"),
        pytest.param(MUON, Layout(cp=2), Dtype.float32, id="muon, cp2", marks=pytest.mark.slow),
        pytest.param(MUON, Layout(), Dtype.bfloat16, id="muon, bfloat16", marks=pytest.mark.slow),
        pytest.param(MUON, Layout(dp=2, ep=2, tied=False), Dtype.float32, id="muon, experts", marks=pytest.mark.slow),
        pytest.param(
            MUON,
            Layout(tp=2, ep=2, sequence_parallel=True, tied=False),
            Dtype.float32,
            id="muon, tp2-experts",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_steps_equal_those_of_a_reference_and_resume_exactly(
    optimizer: reference.Updates, layout: Layout, dtype: Dtype, tmp_path: Path
) -> None:
    """The references are torch's SGD in float32, and Muon by singular values in float64."""
    make = tiny_configs.qwen3_moe if layout.ep > 1 else tiny_configs.qwen2
    path = reference.make_model(make(layers=sum(layout.pp_layers or (2,)), tied=layout.tied), tmp_path / "model")
    ranks = on_ranks(_steps, layout.processes, layout, path, dtype, optimizer, tmp_path)
    found = ranks[0]
    for resumed in found["resumed"]:
        assert all(torch.equal(resumed[name], tensor) for name, tensor in found["trained"].items())
    if dtype is Dtype.bfloat16:
        return
    rates = [adam.learning_rate(step, TOTAL_STEPS, optimizer) for step in range(STEPS)]
    before, model = reference.named_tensors(reference.load(path)), reference.load(path)
    norms = reference.train_model(model, BATCHES, optimizer, rates)
    assert found["norms"] == pytest.approx(norms, rel=1e-4)
    assert max(norms) > optimizer.clip_grad, "clipping must take effect"
    for name, tensor in reference.named_tensors(model).items():
        torch.testing.assert_close(found["trained"][name], tensor, rtol=2e-5, atol=2e-5, msg=name)
    assert any((found["trained"][name] - tensor).abs().max() > 1e-3 for name, tensor in before.items())


@pytest.mark.parametrize("family", tiny_configs.FAMILIES)
def test_muon_steps_the_matrices_of_layers_but_the_router(family: str) -> None:
    config = tiny_configs.FAMILIES[family](layers=2, tied=False)
    model = AutoModelForCausalLM.from_config(config)
    linears = {f"{name}.weight" for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    experts = {name for name in reference.named_tensors(model) if ".experts." in name and not name.endswith(".bias")}
    entries = WeightMap(architecture_of(config)).entries()
    found = {name for entry in entries if entry.rule.of_matrices for name in entry.hf}
    routers = {name for name in linears if name.endswith(".mlp.gate.weight")}  # A linear layer in some models only.
    assert found == linears - {"lm_head.weight"} - routers | experts


def _last_step(group: Group, model: Path, folder: Path) -> dict[str, torch.Tensor]:
    actor = make_actor(group, model, optimizer=MUON)
    actor.load(folder)
    _take(actor, STEPS - 1)
    return weights_of(actor)


@pytest.mark.slow
def test_momentum_of_shards_resumes_in_one_process(tmp_path: Path) -> None:
    layout = Layout(tp=2, pp=2, pp_layers=(2, 1), tied=False)
    path = reference.make_model(tiny_configs.qwen2(layers=3, tied=False), tmp_path / "model")
    trained = on_ranks(_steps, 4, layout, path, Dtype.float32, MUON, tmp_path)[0]["trained"]
    (resumed,) = on_ranks(_last_step, 1, path, tmp_path / str(STEPS - 1))
    for name, tensor in trained.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=2e-5, atol=2e-5, msg=name)


class Probed(TargetLogitsModel):
    """A model with a matrix that Hugging Face's lacks, and with a norm that is not trained."""

    beside = ("probe.",)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.probe = torch.nn.Linear(self.config.hidden_size, self.config.hidden_size, bias=False)
        torch.nn.init.zeros_(self.probe.weight)
        self.decoder.final_layernorm.requires_grad_(False)

    def read_out(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().read_out(hidden + self.probe(hidden))


def _apart(group: Group, model: Path, folder: Path) -> None:
    probe, frozen = "probe.weight", "decoder.final_layernorm.weight"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PolicyModel, "_MODULE", Probed)
        actor = make_actor(group, model, optimizer=SGD)
    actor.load_hf(model)
    policy = actor._policy
    assert policy.parameters.keys() - policy.trainable.keys() == {frozen}
    assert policy.parameters.keys() - policy.exported.keys() == {probe}
    assert len(policy.checkpointed) == len(policy.parameters)
    before = weights_of(actor)
    assert before.keys() == reference.named_tensors(reference.load(model)).keys()
    norm = policy.parameters[frozen].clone()
    _take(actor, 0)
    held = list(actor._optimizer.tensors())
    assert sum(one.numel() for one in held) == 2 * sum(one.numel() for one in policy.trainable.values())
    assert torch.equal(policy.parameters[frozen], norm)
    assert policy.parameters[probe].abs().max() > 1e-4
    assert not torch.equal(weights_of(actor)["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    actor.begin_save(folder)
    _take(actor, 1)
    actor.finish_save()
    trained = {name: parameter.clone() for name, parameter in policy.parameters.items()}
    actor.load(folder)
    assert not torch.equal(policy.parameters[probe], trained[probe])
    _take(actor, 1)
    assert all(torch.equal(policy.parameters[name], parameter) for name, parameter in trained.items())


def test_frozen_parameter_is_exported_and_one_beside_the_weight_map_is_trained_and_saved(tmp_path: Path) -> None:
    model = reference.make_model(tiny_configs.qwen2(layers=2), tmp_path / "model")
    on_ranks(_apart, 1, model, tmp_path / "saved")
