"""Trains the tiny policy with supervision: warm-up, constant learning rate, linear decay.

The loss is the weighted mean of the targets' cross-entropies. Only a random quarter of the context's targets (prompt
and observations) is scored: they are easy to learn, and their logits cost as much as those of other targets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Qwen2Config, Qwen2ForCausalLM

from examples.searchr1.tiny.batches import Batch

CONTEXT_SCORED = 0.25
LOG_EVERY = 50
MUON_FACTOR = 7.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps and learning rate: linear warm-up over `warm_up` steps, linear decay to 0 over the last `decay` steps."""

    steps: int
    learning_rate: float
    warm_up: int
    decay: int

    def factor(self, step: int) -> float:
        """Return the factor of the learning rate at `step`, counted from 0."""
        return min(1.0, (step + 1) / self.warm_up, (self.steps - step) / self.decay)


def new_model(vocabulary: int, end_of_text: int, padding: int) -> Qwen2ForCausalLM:
    """Return a Qwen2 model of 1.3 million parameters with tied embeddings."""
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end_of_text,
        pad_token_id=padding,
    )
    return Qwen2ForCausalLM(config)


def weighted_loss(
    model: Qwen2ForCausalLM, backbone: Callable[..., Any], batch: Batch, generator: torch.Generator
) -> Tensor:
    """Return the scalar loss of a batch; `generator` draws which of the context's targets are scored.

    `backbone` is the model without its head, compiled or not; its matrix products use bfloat16.
    """
    targets, weights = batch.tokens[:, 1:], batch.weights[:, 1:]
    drawn = torch.rand(weights.shape, generator=generator) < CONTEXT_SCORED
    scored = (weights == 1) | ((weights > 0) & drawn)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = backbone(input_ids=batch.tokens[:, :-1]).last_hidden_state
        logits = model.lm_head(hidden[scored])
    losses = cross_entropy(logits.float(), targets[scored], reduction="none")
    chosen = torch.where(weights == 1, weights, weights / CONTEXT_SCORED)[scored]
    return (losses * chosen).sum() / chosen.sum()


def new_optimizers(model: Qwen2ForCausalLM, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices and AdamW for embedding, norms and biases.

    Muon's updates are orthogonal, so its rate is a multiple of AdamW's. With only AdamW, the attention patterns that
    copy take several times as many steps to form.
    """
    layers = [p for p in model.model.layers.parameters() if p.ndim == 2]
    known = {id(parameter) for parameter in layers}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in known]
    return [
        torch.optim.Muon(layers, lr=MUON_FACTOR * learning_rate, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def train(
    model: Qwen2ForCausalLM,
    source: Callable[[int], Iterator[Batch]],
    schedule: Schedule,
    seed: int,
    every: int,
    report: Callable[[int], None],
) -> None:
    """Train `model` in place. Every `every` steps, `source(step)` gives the next batches and `report` is called."""
    generator = torch.Generator().manual_seed(seed)
    optimizers = new_optimizers(model, schedule.learning_rate)
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    backbone = torch.compile(model.model, dynamic=True)
    started, losses = time.monotonic(), []
    model.train()
    for step in range(schedule.steps):
        if step % every == 0:
            batches = source(step)
        for optimizer, full in zip(optimizers, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, full, strict=True):
                group["lr"] = rate * schedule.factor(step)
        loss = weighted_loss(model, backbone, next(batches), generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
        if (step + 1) % LOG_EVERY == 0:
            mean = sum(losses[-LOG_EVERY:]) / LOG_EVERY
            logger.info("step %d loss %.3f elapsed %.0f s", step + 1, mean, time.monotonic() - started)
        if (step + 1) % every == 0 or step + 1 == schedule.steps:
            report(step + 1)
            model.train()
