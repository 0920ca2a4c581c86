"""Computes a step of any policy loss in one process, with transformers' models in float64 and autograd.

The sampling policy, the trained policy and the reference differ, so that ratios are clipped and weights are bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlsys.algorithms.kl import SampledLogprobs, TopKKl, shares
from rlsys.algorithms.losses import DIVISOR, LossInputs, divisor, policy_loss, reduce_stats, token_weights
from rlsys.config.algorithm import AlgorithmConfig, OldLogprobs
from rlsys.config.derived import full_kl
from rlsys.data.trajectory import Sample
from tests.support import tiny_configs
from tests.support.tensors import save_model
from tests.support.trajectories import sample
from tests.trainer import reference

LOSS_LENGTH = 13


def _samples() -> list[Sample]:
    """Samples of different lengths with untrained stretches and an advantage per token; one has no trained token."""
    random = np.random.default_rng(5)
    samples = []
    for number, length in enumerate(random.integers(6, 21, size=11)):
        mask = (np.arange(length) >= 3) & (random.random(length) < 0.7) & (number != 4)
        advantages = random.standard_normal(length).astype(np.float32)
        tokens = random.integers(0, tiny_configs.VOCAB, size=length)
        samples.append(sample(tokens.tolist(), mask.tolist(), advantage=advantages.tolist()))
    return samples


SAMPLES = _samples()


@dataclass(frozen=True)
class Policies:
    """Folders of the three policies."""

    sampling: Path
    current: Path
    reference: Path

    @classmethod
    def make(cls, family: str, folder: Path) -> Policies:
        names = [folder / name for name in ("sampling", "current", "reference")]
        reference.make_model(tiny_configs.FAMILIES[family](), names[0])
        for seed, (name, scale) in enumerate(zip(names[1:], (0.01, 0.016), strict=True)):
            model = reference.load(names[0])
            torch.manual_seed(seed)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(scale * torch.randn_like(parameter))
            save_model(model, name)
        return cls(*names)


@dataclass(frozen=True)
class Expected:
    """Expected results of one optimiser step."""

    gradients: dict[str, Tensor]
    divisor: int
    figures: dict[str, float]
    """Reduced statistics of the step."""


class OneProcess:
    """Computes losses of all trained tokens at once, as one row; `tests/algorithms` checks the formulas themselves."""

    def __init__(self, policies: Policies) -> None:
        self.model = _load(policies.current)
        self.log_p = _distributions(self.model)
        with torch.no_grad():
            self.log_old = _distributions(_load(policies.sampling))
            self.log_r = _distributions(_load(policies.reference))
        masks = [one.trajectory.loss_mask for one in SAMPLES]
        self.lengths = np.array([mask.sum() for mask in masks])
        self.episode = torch.tensor(np.arange(len(masks)).repeat(self.lengths))
        runs = [len(list(run)) for mask in masks for trained, run in groupby(mask) if trained]
        self.turn = torch.tensor(np.arange(len(runs)).repeat(runs))
        pairs = list(zip(SAMPLES, masks, strict=True))
        tokens = np.concatenate([one.trajectory.tokens[mask] for one, mask in pairs])
        self.y = torch.tensor(tokens, dtype=torch.int64)
        self.advantage = torch.tensor(np.concatenate([one.advantages[mask] for one, mask in pairs])).double()
        self.p, self.old, self.r = (
            log.gather(1, self.y[:, None])[:, 0] for log in (self.log_p, self.log_old, self.log_r)
        )

    def expected(self, config: AlgorithmConfig) -> Expected:
        old = self.p.detach() if config.old_logprobs is OldLogprobs.actor else self.old
        kl = self._divergence(config, old)
        inputs = LossInputs(
            old_logprobs=old[None],
            ref_logprobs=self.r[None],
            advantages=self.advantage[None],
            mask=torch.ones_like(self.y, dtype=torch.bool)[None],
            weights=torch.tensor(token_weights(config.aggregation, self.lengths))[self.episode][None],
            sequences=self.episode[None],
            divergence=None if kl is None else kl[None],
            turns=self.turn[None],
        )
        entropy = -(self.log_p.exp() * self.log_p).sum(-1)
        loss, stats = policy_loss(config)(self.p[None], entropy[None], inputs)
        whole = divisor(config.aggregation, self.lengths, LOSS_LENGTH)
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        gradients = torch.autograd.grad(loss / whole, parameters, retain_graph=True)
        return Expected(
            reference.by_checkpoint_names(zip(names, gradients, strict=True)),
            whole,
            reduce_stats([{**stats, DIVISOR: whole}]),
        )

    def _divergence(self, config: AlgorithmConfig, old: Tensor) -> Tensor | None:
        """KL term [n] of an estimator that compares distributions, None for other estimators."""
        full = full_kl(config)
        if full is None:
            return None
        forward = full.kind == "full_forward"
        if full.topk_tokens is None:
            return shares(self.log_p, self.log_r, forward).sum(-1)
        # The log-prob group picks tokens by the policy that sampled.
        picks = (self.log_r if forward else self.log_old).topk(full.topk_tokens).indices
        picked = (picks == self.y[:, None]).any(-1)
        assert 0 < picked.sum() < len(picked), "sampled tokens must lie both among the picks and in the tail"
        sampled = SampledLogprobs(self.p, old, self.r, picked)
        return TopKKl(config, full)(self.log_p.gather(1, picks), self.log_r.gather(1, picks), sampled)


def _load(path: Path) -> torch.nn.Module:
    # Fused kernels of experts do not support float64.
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")


def _distributions(model: torch.nn.Module) -> Tensor:
    """Log-probs [n, vocabulary] at each trained token, computed episode by episode."""
    pieces = []
    for one in SAMPLES:
        logits = model(torch.tensor(one.trajectory.tokens, dtype=torch.int64)[None]).logits[0]
        before = torch.tensor(one.trajectory.loss_mask.nonzero()[0] - 1)
        pieces.append(torch.log_softmax(logits[before] / reference.TEMPERATURE, dim=-1))
    return torch.cat(pieces)


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])
