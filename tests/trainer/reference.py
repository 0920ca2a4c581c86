"""Independent reference for training: Hugging Face transformers and torch's AdamW in one process, float32."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from rlsys.algorithms.losses import LossFunction, LossInputs, policy_loss
from rlsys.config.algorithm import AlgorithmConfig, PpoLoss
from rlsys.config.schema import AdamwConfig, MuonConfig, SgdConfig
from rlsys.trainer.batches import MicroBatch
from rlsys.weights.hf_io import with_attention_scale
from tests.support.tensors import randomised, save_model
from tests.support.tiny_configs import VOCAB

ALGORITHM = AlgorithmConfig(policy_loss=PpoLoss(clip_high=0.28), kl_coef=0.1, entropy_coef=0.01)
LOSS = policy_loss(ALGORITHM)
TEMPERATURE = 0.7
LOSS_LENGTH = 13
Updates = AdamwConfig | MuonConfig | SgdConfig


def make_model(config: PretrainedConfig, folder: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    save_model(randomised(AutoModelForCausalLM.from_config(config, dtype=torch.float32)), folder)
    return folder


def make_batches(count: int, seed: int = 0) -> list[MicroBatch]:
    """Micro-batches of one to three padded rows, of random lengths, with masked stretches."""
    random = np.random.default_rng(seed)
    batches = []
    for _ in range(count):
        lengths = random.integers(6, 21, size=int(random.integers(1, 4)))
        width = -(-int(lengths.max()) // 4) * 4
        position = np.arange(width)[None, :]
        mask = (position >= 3) & (position < lengths[:, None]) & (random.random((len(lengths), width)) < 0.7)
        normal = random.standard_normal((4, len(lengths), width)).astype(np.float32)
        batches.append(
            MicroBatch(
                tokens=random.integers(0, VOCAB, size=(len(lengths), width)),
                lengths=lengths,
                loss_mask=mask,
                advantages=normal[0] * mask,
                old_logprobs=-4.6 + 0.3 * normal[1],
                ref_logprobs=-4.6 + 0.3 * normal[2],
            )
        )
    return batches


def packed(*batches: MicroBatch, also: Sequence[str] = (), cp: int = 1, tp: int = 1) -> MicroBatch:
    """The sequences of padded micro-batches in one row, padded at its end to a multiple of 4.

    `also` names further fields [rows, width] to pack. With `cp` above 1, every sequence is padded to a multiple of 2
    cp, and the row to a multiple of 2 cp tp.
    """
    pieces = [(batch, row) for batch in batches for row in range(len(batch.lengths))]
    room, wide = (1, 4) if cp == 1 else (2 * cp, 2 * cp * tp)

    def joined(name: str) -> np.ndarray:
        flat = [getattr(batch, name)[row, : batch.lengths[row]] for batch, row in pieces]
        row = np.concatenate([np.pad(values, (0, -len(values) % room)) for values in flat])
        return np.pad(row, (0, -len(row) % wide))[None]

    names = ("tokens", "loss_mask", "advantages", "old_logprobs", "ref_logprobs", *also)
    lengths = np.concatenate([batch.lengths for batch in batches])
    return MicroBatch(lengths=lengths, packed=True, room_multiple=room, **{name: joined(name) for name in names})


def load(path: Path) -> torch.nn.Module:
    """Load a model; `tests/weights/test_hf_io.py` compares the scale of attention with that of DeepSeek-V3."""
    model: torch.nn.Module = with_attention_scale(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    return model


def logprobs_and_entropy(model: torch.nn.Module, tokens: np.ndarray) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies, [batch, seq] each, over the whole vocabulary; column 0 is 0."""
    inputs = torch.tensor(tokens)
    log_p = torch.log_softmax(model(inputs).logits[:, :-1] / TEMPERATURE, dim=-1)
    picked = log_p.gather(-1, inputs[:, 1:, None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    return torch.nn.functional.pad(picked, (1, 0)), torch.nn.functional.pad(entropy, (1, 0))


class Muon(torch.optim.Optimizer):
    """Muon by singular values for the matrices of layers, and AdamW written out for the rest, both in float64."""

    def __init__(self, model: torch.nn.Module, config: MuonConfig) -> None:
        super().__init__([{"params": list(model.parameters())}], {"lr": config.lr})
        self._model, self._config, self._steps = model, config, 0
        self._weights = {name: one.double() for name, one in named_tensors(model).items()}
        self._means = {name: torch.zeros_like(one) for name, one in self._weights.items()}
        self._squares = {name: torch.zeros_like(one) for name, one in self._weights.items()}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        config, rate = self._config, self.param_groups[0]["lr"]
        self._steps += 1
        grads = by_checkpoint_names((name, one.grad.double()) for name, one in self._model.named_parameters())  # type: ignore[union-attr]
        for name, weight in self._weights.items():
            grad, mean, square = grads[name], self._means[name], self._squares[name]
            weight *= 1 - rate * config.weight_decay * (weight.dim() == 2)
            if ".layers." in name and weight.dim() == 2 and not name.endswith(".mlp.gate.weight"):
                mean += (1 - config.momentum) * (grad - mean)
                seen = config.momentum * mean + (1 - config.momentum) * grad
                weight -= rate * 0.2 * max(weight.shape) ** 0.5 * orthogonalised(seen)
                continue
            mean += (1 - config.beta1) * (grad - mean)
            square += (1 - config.beta2) * (grad**2 - square)
            below = (square / (1 - config.beta2**self._steps)).sqrt() + config.eps
            weight -= rate * mean / (1 - config.beta1**self._steps) / below
        for name, tensor in named_tensors(self._model).items():
            tensor.copy_(self._weights[name])


def orthogonalised(matrix: Tensor) -> Tensor:
    """Result of five iterations of Keller Jordan's quintic polynomial, by the singular values of the matrix."""
    left, values, right = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return (left * values) @ right


def optimizer_of(model: torch.nn.Module, config: Updates) -> torch.optim.Optimizer:
    """torch's AdamW or SGD, which decays only matrices, or Muon."""
    if isinstance(config, MuonConfig):
        return Muon(model, config)
    # The biases of stacked experts are no matrices.
    vectors = [name for name, p in model.named_parameters() if p.dim() == 1 or name.endswith("bias")]
    others: dict[str, Any] = {"params": [model.get_parameter(name) for name in vectors], "weight_decay": 0.0}
    groups = [{"params": [p for name, p in model.named_parameters() if name not in vectors]}, others]
    if isinstance(config, SgdConfig):
        return torch.optim.SGD(groups, config.lr, config.momentum, weight_decay=config.weight_decay)
    betas, decay = (config.beta1, config.beta2), config.weight_decay
    return torch.optim.AdamW(groups, config.lr, betas, config.eps, decay)


def train(
    path: Path,
    steps: Sequence[Sequence[MicroBatch]],
    config: Updates,
    rates: Sequence[float],
    aggregation: str = "token-mean",
) -> tuple[torch.nn.Module, list[float]]:
    """Train on each step's micro-batches as one batch; returns the model, and the gradient norms before clipping."""
    model = load(path)
    return model, train_model(model, steps, config, rates, aggregation)


def train_model(
    model: torch.nn.Module,
    steps: Sequence[Sequence[MicroBatch]],
    config: Updates,
    rates: Sequence[float],
    aggregation: str = "token-mean",
) -> list[float]:
    """Train the parameters of `model` that have gradients; as `train`, but returns the norms alone."""
    optimizer = optimizer_of(model, config)
    norms = []
    for batches, rate in zip(steps, rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        aggregated(aggregation, by_sequence(model, batches)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)))
        optimizer.step()
    return norms


def by_sequence(model: torch.nn.Module, batches: Sequence[MicroBatch]) -> list[tuple[Tensor, int]]:
    """(sum of losses, number of trained tokens) of each sequence that has trained tokens, from padded rows."""
    return [(loss_of(model, row), row.trained_tokens) for row in rows_of(batches) if row.trained_tokens]


def rows_of(batches: Iterable[MicroBatch]) -> list[MicroBatch]:
    """One micro-batch per padded row."""
    arrays = ("tokens", "lengths", "loss_mask", "advantages", "old_logprobs", "ref_logprobs")
    return [
        replace(batch, **{name: getattr(batch, name)[row : row + 1] for name in arrays})
        for batch in batches
        for row in range(len(batch.tokens))
    ]


def aggregated(aggregation: str, parts: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Loss of a mini-batch from the results of `by_sequence`."""
    if aggregation == "seq-mean-token-mean":
        return torch.stack([loss / tokens for loss, tokens in parts]).mean()
    divisors = {
        "token-mean": sum(tokens for _, tokens in parts),
        "seq-mean-token-sum": len(parts),
        "fixed-length": len(parts) * LOSS_LENGTH,
    }
    return torch.stack([loss for loss, _ in parts]).sum() / divisors[aggregation]


def loss_of(model: torch.nn.Module, batch: MicroBatch, loss: LossFunction = LOSS) -> Tensor:
    """Sum of the losses of trained tokens in padded rows of one sequence each."""
    logprobs, entropy = logprobs_and_entropy(model, batch.tokens)
    assert batch.old_logprobs is not None
    inputs = LossInputs(
        old_logprobs=torch.tensor(batch.old_logprobs),
        ref_logprobs=torch.tensor(batch.ref_logprobs),
        advantages=torch.tensor(batch.advantages),
        mask=torch.tensor(batch.loss_mask),
        weights=torch.ones(batch.tokens.shape),
        sequences=torch.arange(len(batch.tokens))[:, None].expand(batch.tokens.shape),
    )
    return loss(logprobs, entropy, inputs)[0]


def named_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Tensors by their names in a checkpoint: a tied matrix appears once, experts appear separately."""
    return by_checkpoint_names((name, parameter.detach()) for name, parameter in model.named_parameters())


def by_checkpoint_names(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Parameters of a transformers model, or tensors of their shapes, by checkpoint names; experts are unstacked."""
    every, tensors = dict(parameters), dict[str, Tensor]()
    for name, parameter in every.items():
        experts, _, kind = name.rpartition(".")
        if not experts.endswith("mlp.experts"):
            tensors[name] = parameter
            continue
        if f"{experts}.down_proj_bias" in every:
            tensors |= _of_gpt_oss(experts, kind, parameter)
            continue
        for number, whole in enumerate(parameter):
            parts = {"gate_proj": whole.chunk(2)[0], "up_proj": whole.chunk(2)[1]}
            for part, tensor in (parts if kind == "gate_up_proj" else {"down_proj": whole}).items():
                tensors[f"{experts}.{number}.{part}.weight"] = tensor
    return tensors


def _of_gpt_oss(experts: str, kind: str, stack: Tensor) -> dict[str, Tensor]:
    """Tensors of each expert of a stack [experts, in, out] or [experts, out] of gpt-oss; gate and up alternate."""
    name, ending = kind.removesuffix("_bias"), "bias" if kind.endswith("_bias") else "weight"
    tensors: dict[str, Tensor] = {}
    for number, own in enumerate(stack):
        out = own.transpose(0, 1) if ending == "weight" else own
        parts = {"gate_proj": out[0::2], "up_proj": out[1::2]} if name == "gate_up_proj" else {name: out}
        tensors |= {f"{experts}.{number}.{part}.{ending}": tensor for part, tensor in parts.items()}
    return tensors
