"""Tests of the memory estimate against the bytes of real steps on a CPU, measured by `MemoryMeter`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from rlsys.cluster.planning.memory import GroupMemory, MicroBatchLoad, StageRank, stage_memory
from rlsys.config import schema
from rlsys.config.algorithm import AlgorithmConfig, FullKl, GaeAdvantage, ReturnsAdvantage, TeacherConfig
from rlsys.observe.environment import Capabilities
from rlsys.trainer.actor import Actor, Critic, Learner
from rlsys.trainer.batches import MicroBatch
from rlsys.trainer.log_prob import LogProbWorker
from rlsys.trainer.model import layers
from rlsys.trainer.model.layers import kernel_settings
from rlsys.trainer.offload import gradient_buffers
from rlsys.weights.weight_map import read_architecture
from tests.support.megatron_processes import Group, on_ranks
from tests.trainer.harness import Layout
from tests.trainer.memory_meter import MemoryMeter

PLAIN = Layout()
ALWAYS = ("parameters", "gradients", "optimizer", "reference")
TOLERANCE = 0.1
STEPS = 3
"""Number of measured steps with several processes. The least peak counts, because a thread of gloo may hold the tensors of a
finished collective for another millisecond."""
VOCAB = 2048
LENGTHS = (384, 200, 384, 312)
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
EXPERTS = {
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}
LATENT = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 96,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "pad_token_id": None,
}
SHAPES: dict[str, partial[PretrainedConfig]] = {
    "dense": partial(Qwen2Config, **SIZES),
    "llama": partial(LlamaConfig, **SIZES),
    "gemma3": partial(
        Gemma3TextConfig,
        **SIZES,
        head_dim=32,
        sliding_window=128,
        layer_types=["full_attention", *["sliding_attention"] * 3],
        pad_token_id=None,
    ),
    "gpt_oss": partial(
        GptOssConfig,
        **{**SIZES, "intermediate_size": 128},
        head_dim=32,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=128,
        pad_token_id=None,
    ),
    "moe": partial(Qwen3MoeConfig, **SIZES, **EXPERTS),
    "latent": partial(DeepseekV2Config, **SIZES | LATENT),
}


KL: dict[str, dict[str, Any]] = {
    "sampled": {},
    "whole": {"kl_estimator": FullKl()},
    "top 128": {"kl_estimator": FullKl(topk_tokens=128)},
    "whole, average": {"kl_estimator": FullKl("full_forward"), "ref_policy_ema_tau": 0.9},
    "sampled, average": {"ref_policy_ema_tau": 0.9},
}
"""Kind of KL term -> settings of the algorithm."""
OPTIMIZERS: dict[str, Any] = {
    "sgd, momentum": schema.SgdConfig(momentum=0.9),
    "sgd, decay": schema.SgdConfig(weight_decay=0.1),
    "muon": schema.MuonConfig(),
    "muon, float32": schema.MuonConfig(newton_schulz_dtype=schema.Dtype.float32),
}
"""Optimisers other than AdamW."""


@dataclass(frozen=True)
class Case:
    layout: Layout = PLAIN
    shape: str = "dense"
    group: str = "actor"
    packed: bool = True
    targets: float = 0.5
    """Share of trained tokens in a sequence; they are at its end."""
    micro_batches: int = 1
    dtype: schema.Dtype = schema.Dtype.float32
    kl: str = "sampled"
    optimizer: str = "adamw"
    rank: int = 0
    """Rank of adapters (LoRA)."""
    teacher: bool = False
    """Hold a teacher that is wider and deeper than the policy, in place of the reference."""

    def config(self, path: Path) -> schema.RunConfig:
        """Config of a run whose measured group has the first ranks to itself."""
        layout = self.layout
        packing = schema.Packing.packed if self.packed else schema.Packing.padded
        optimizer = OPTIMIZERS.get(self.optimizer, schema.AdamwConfig(distributed=layout.distributed))
        critic = self.group == "critic"
        placement = {"actor": "100", "inference": "101", "rollout": "102"}
        placement[self.group] = f"0-{layout.processes - 1}"
        return schema.RunConfig(
            model=schema.ModelConfig(
                path=str(path), dtype=self.dtype, recompute=layout.recompute, lora=schema.LoraConfig(self.rank)
            ),
            cluster=schema.ClusterConfig(device=schema.Device.cpu, placement=placement),
            actor=schema.ActorConfig(parallel=layout.parallel, optimizer=optimizer, packing=packing),
            critic=schema.CriticConfig(parallel=layout.parallel, optimizer=optimizer, packing=packing),
            inference=schema.InferenceConfig(parallel=layout.parallel, packing=packing),
            algorithm=AlgorithmConfig(
                kl_coef=0.1,
                advantage=GaeAdvantage() if critic else ReturnsAdvantage(),
                teacher=TeacherConfig(str(path / "teacher") if self.teacher else None),
                **KL[self.kl],
            ),
        )


QUICK = [
    Case(Layout(tp=2, sequence_parallel=True, recompute=True)),
    Case(dtype=schema.Dtype.bfloat16, optimizer="muon"),
    Case(dtype=schema.Dtype.bfloat16, rank=16),
]
LAYOUTS = [
    Layout(),
    Layout(recompute=True),
    Layout(distributed=False),
    Layout(dp=2, tied=False),
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True, tied=False),
    Layout(pp=2, recompute=True),
    Layout(pp=2, pp_layers=(1, 3), tied=False),
]
GRID = [
    *(Case(layout, dtype=dtype) for layout, dtype in zip(LAYOUTS, cycle(schema.Dtype), strict=False)),
    *(Case(layout, packed=False, targets=0.02, dtype=schema.Dtype.bfloat16) for layout in LAYOUTS[::2]),
    *(Case(replace(layout, tied=False), "llama", "critic") for layout in LAYOUTS[1::2]),
    *(Case(replace(layout, tied=False), "moe") for layout in LAYOUTS[::3]),
    Case(Layout(tp=2, ep=2, sequence_parallel=True, tied=False), "moe"),
    Case(Layout(dp=2, ep=2, recompute=True, tied=False), "moe", dtype=schema.Dtype.bfloat16),
    Case(Layout(tied=False), "latent"),
    Case(Layout(tied=False), "latent", "inference", dtype=schema.Dtype.bfloat16),
    Case(Layout(pp=2, pp_layers=(3, 1), tied=False), "latent", packed=False),
    Case(Layout(tp=2, ep=2, sequence_parallel=True, tied=False), "latent", dtype=schema.Dtype.bfloat16),
    Case(Layout(tp=2, ep=2, sequence_parallel=True, tied=False, recompute=True), "latent", optimizer="muon"),
    Case(Layout(tied=False), "gpt_oss"),
    Case(shape="gemma3"),
    Case(Layout(tp=2, sequence_parallel=True, recompute=True), "gemma3", dtype=schema.Dtype.bfloat16),
    Case(shape="gemma3", packed=False, targets=0.02, group="inference"),
    Case(Layout(tp=2, sequence_parallel=True), group="inference", packed=False),
    Case(Layout(tied=False), "moe", "inference", dtype=schema.Dtype.bfloat16),
    Case(Layout(pp=2), packed=False, micro_batches=3),
    Case(Layout(cp=2, recompute=True), dtype=schema.Dtype.bfloat16),
    Case(Layout(recompute=True), kl="whole"),
    Case(Layout(pp=2, recompute=True), kl="whole, average", micro_batches=3, dtype=schema.Dtype.bfloat16),
    Case(Layout(recompute=True), kl="top 128"),
    Case(Layout(dp=2, tied=False), group="critic", shape="llama", optimizer="sgd, decay"),
    Case(group="inference", kl="top 128"),
    Case(dtype=schema.Dtype.bfloat16, optimizer="sgd, momentum"),
    Case(Layout(tp=2), optimizer="muon, float32"),
    Case(Layout(tp=2, ep=2, sequence_parallel=True, tied=False), "moe", optimizer="muon"),
    Case(Layout(tp=2), "llama", "critic", optimizer="muon"),
    Case(Layout(recompute=True), rank=16),
    Case(Layout(tp=2, sequence_parallel=True), rank=16),
    Case(group="inference", rank=16),
    Case(group="inference", kl="sampled, average", dtype=schema.Dtype.bfloat16),
    Case(Layout(tp=2), group="inference", teacher=True),
    Case(group="inference", rank=16, teacher=True, dtype=schema.Dtype.bfloat16),
    Case(Layout(recompute=True), kl="whole", teacher=True),
]


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in GRID)], ids=repr)
def test_estimated_memory_is_near_that_of_a_measured_step(case: Case, tmp_path: Path) -> None:
    shape = SHAPES[case.shape](tie_word_embeddings=case.layout.tied)
    AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).save_pretrained(tmp_path)
    if case.teacher:
        larger = Qwen2Config(**{**SIZES, "hidden_size": 512, "num_hidden_layers": 6})
        AutoModelForCausalLM.from_config(larger, dtype=torch.bfloat16).save_pretrained(tmp_path / "teacher")
    on_ranks(_measure, case.layout.processes, tmp_path, case)


@pytest.mark.parametrize("fusions", [True, False])
def test_memory_estimate_of_local_layers_on_a_gpu_follows_their_kernels(fusions: bool, tmp_path: Path) -> None:
    SHAPES["dense"]().save_pretrained(tmp_path)
    config = Case().config(tmp_path)
    config.cluster.device = schema.Device.gpu
    config.model.layers, config.model.fusions = schema.Layers.local, fusions
    settings = kernel_settings(config.model, schema.Layers.local, Capabilities(cuda_devices=1))
    rank = StageRank(config, read_architecture(config.model.path), "actor", 0, MicroBatchLoad(64, 8, 64))
    assert rank.fused_swiglu == settings.get("bias_activation_fusion", False)
    assert rank.fused_rope == settings.get("apply_rope_fusion", False)


def _measure(group: Group, folder: Path, case: Case) -> None:
    """Run a step to warm up and others under the meter; compare the measured memory with the estimate."""
    config, batch = case.config(folder), _batch(case)
    worker = WORKERS[case.group].from_config(config, group.meet())
    batches = [batch] * case.micro_batches
    steps = range(1 if case.layout.processes == 1 else STEPS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "causal_lower_right", _unmetered(causal_lower_right))
        _step(worker, batches)
        counted = _count_routed(worker)
        always = MemoryMeter(_resident(worker)).alive
        measured = []
        for _ in steps:
            counted.clear()
            measured.append((_peak(worker, partial(_step, worker, batches)), tuple(counted)))
    peak, routed = min(measured)
    load = MicroBatchLoad(
        batch.tokens.size,
        batch.trained_tokens,
        int(batch.lengths.max()) if case.packed else batch.tokens.shape[1],
        case.micro_batches,
        # Only one recomputed layer is in memory at a time.
        (max(routed) if case.layout.recompute else sum(routed) // len(routed)) if routed else None,
    )
    estimate = stage_memory(StageRank(config, read_architecture(config.model.path), case.group, worker.coords.pp, load))
    _check(estimate, always, peak)
    if isinstance(worker, Learner) and case.optimizer.startswith("muon"):
        peaks = []
        for _ in steps:
            worker.accumulate(batches)
            peaks.append(_peak(worker, worker.apply))
        assert estimate.parts["step"] == pytest.approx(min(peaks) - always, rel=TOLERANCE)


def _peak(worker: Learner | LogProbWorker, step: Callable[[], None]) -> int:
    """Return the peak of the bytes in use during `step`, including those that `worker` always holds."""
    with MemoryMeter(_resident(worker)) as meter:
        step()
    return meter.peak


def _unmetered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` outside the meter: it makes a tensor subclass, which torch refuses in a dispatch mode."""

    def called(*arguments: Any) -> Any:
        with _disable_current_modes():
            return function(*arguments)

    return called


def _check(estimate: GroupMemory, always: int, peak: int) -> None:
    constant = sum(estimate.parts.get(part, 0.0) for part in ALWAYS)
    assert constant == pytest.approx(always, rel=0.01)
    assert estimate.total == pytest.approx(peak, rel=TOLERANCE)
    # Without the constant part, whose size would hide an error in the transient part.
    assert estimate.total - constant == pytest.approx(peak - always, rel=TOLERANCE)


WORKERS = {"actor": Actor, "critic": Critic, "inference": LogProbWorker}


def _step(worker: Learner | LogProbWorker, batches: Sequence[MicroBatch]) -> None:
    if isinstance(worker, LogProbWorker):
        worker.compute(batches)
        return
    worker.accumulate(batches)
    worker.apply()


def _count_routed(worker: Learner | LogProbWorker) -> list[int]:
    """Return a list that collects, from now on, the number of tokens routed to the experts of each layer."""
    counts: list[int] = []
    model = worker._policy if isinstance(worker, LogProbWorker) else worker._model
    for name, module in model.module.named_modules():
        if name.endswith("mlp.experts"):
            module.register_forward_pre_hook(lambda _, inputs: counts.append(len(inputs[0])))
    return counts


def _resident(worker: Learner | LogProbWorker) -> list[Tensor]:
    if isinstance(worker, LogProbWorker):
        return list(worker._tensors())
    return [*worker._kept(), *gradient_buffers(worker._wrapped)]


def _batch(case: Case) -> MicroBatch:
    """Sequences of `LENGTHS`, packed or padded to a multiple of 4."""
    lengths = np.array(LENGTHS)
    rows = 1 if case.packed else len(lengths)
    width = int(lengths.sum() if case.packed else lengths.max())
    mask = np.zeros((rows, width), dtype=bool)
    ends = np.cumsum(lengths) if case.packed else lengths
    for number, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        mask[0 if case.packed else number, end - int(length * case.targets) : end] = True
    zeros = np.zeros((rows, width), dtype=np.float32)
    k = getattr(KL[case.kl].get("kl_estimator"), "topk_tokens", None)
    picked = None if k is None else np.tile(np.arange(k, dtype=np.int32), (int(mask.sum()), 1))
    return MicroBatch(
        tokens=np.random.default_rng(0).integers(0, VOCAB, size=(rows, width)),
        lengths=lengths,
        loss_mask=mask,
        advantages=zeros,
        old_logprobs=zeros,
        ref_logprobs=zeros,
        values=zeros,
        returns=zeros,
        pick_tokens=picked,
        pick_logprobs=None if picked is None else np.full(picked.shape, -9.0, dtype=np.float32),
        packed=case.packed,
    )
