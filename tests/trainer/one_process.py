"""What a step of any policy loss comes to in one process: transformers' models in float64, and autograd.

The formulas are written out here once more, from their sources, of all trained tokens at a time. Three policies
differ, so that ratios are clipped and weights are cut: the one that sampled, the one that is trained by now, and
the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.linalg import vector_norm
from transformers import AutoModelForCausalLM

from rlsys.config.algorithm import AlgorithmConfig, KlEstimator, KlTail, PolicyLoss
from rlsys.data.trajectory import Sample
from tests.orchestrator.pipeline.build import sample
from tests.trainer import reference

LOSS_LENGTH = 13


def _samples() -> list[Sample]:
    """Episodes of many lengths, with masked stretches and an advantage for each token; one trains nothing."""
    random = np.random.default_rng(5)
    samples = []
    for number, length in enumerate(random.integers(6, 21, size=11)):
        mask = (np.arange(length) >= 3) & (random.random(length) < 0.7) & (number != 4)
        advantages = random.standard_normal(length).astype(np.float32)
        tokens = random.integers(0, reference.VOCAB, size=length)
        samples.append(sample(tokens.tolist(), mask.tolist(), advantage=advantages.tolist()))
    return samples


SAMPLES = _samples()


@dataclass(frozen=True)
class Policies:
    """Folders of three models."""

    sampling: Path
    current: Path
    reference: Path

    @classmethod
    def make(cls, family: str, folder: Path) -> Policies:
        names = [folder / name for name in ("sampling", "current", "reference")]
        reference.make_model(reference.TINY[family](), names[0])
        for seed, (name, scale) in enumerate(zip(names[1:], (0.01, 0.016), strict=True)):
            model = reference.load(names[0])
            torch.manual_seed(seed)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(scale * torch.randn_like(parameter))
            model.save_pretrained(name)
        return cls(*names)


@dataclass(frozen=True)
class Expected:
    """Of one step."""

    gradients: dict[str, Tensor]
    terms: dict[str, float]
    """Norm of the gradient of each term."""
    divisor: int
    figures: dict[str, float]
    """Of the statistics, reduced."""
    happens: dict[str, bool]
    """What the case is about -> whether these samples have it."""


class OneProcess:
    """Losses of all trained tokens, [n] each, by transformers and the formulas' sources."""

    def __init__(self, policies: Policies) -> None:
        self.model = _load(policies.current)
        self.log_p = _distributions(self.model)
        with torch.no_grad():
            self.log_old = _distributions(_load(policies.sampling))
            self.log_r = _distributions(_load(policies.reference))
        masks = [one.trajectory.loss_mask for one in SAMPLES]
        self.episode = torch.tensor([number for number, mask in enumerate(masks) for _ in range(mask.sum())])
        pairs = list(zip(SAMPLES, masks, strict=True))
        tokens = np.concatenate([one.trajectory.tokens[mask] for one, mask in pairs])
        self.y = torch.tensor(tokens, dtype=torch.int64)
        self.advantage = torch.tensor(np.concatenate([one.advantages[mask] for one, mask in pairs])).double()
        self.p, self.old, self.r = (
            log.gather(1, self.y[:, None])[:, 0] for log in (self.log_p, self.log_old, self.log_r)
        )
        self.n = len(self.y)

    def expected(self, config: AlgorithmConfig) -> Expected:
        surrogate, figures, happens = self._surrogate(config)
        means = {"policy_loss": self._aggregated(surrogate, config)[0]}
        terms = {"policy": means["policy_loss"]}
        if config.kl_coef:
            kl, about_kl = self._kl(config)
            happens |= about_kl
            means["kl_loss"] = self._aggregated(kl, config)[0]
            terms["kl"] = config.kl_coef * means["kl_loss"]
        entropy = -(self.log_p.exp() * self.log_p).sum(-1)
        means["entropy"] = entropy.mean()
        if config.entropy_coef:
            terms["entropy"] = -config.entropy_coef * self._aggregated(entropy, config)[0]
        of_terms = {name: self._gradients(term) for name, term in terms.items()}
        return Expected(
            gradients={name: sum(of[name] for of in of_terms.values()) for name in of_terms["policy"]},
            terms={term: float(vector_norm(flat(of))) for term, of in of_terms.items()},
            divisor=self._aggregated(surrogate, config)[1],
            figures={**figures, **{name: float(value.detach()) for name, value in means.items()}},
            happens=happens,
        )

    def _gradients(self, loss: Tensor) -> dict[str, Tensor]:
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
        return reference.by_checkpoint_names(zip(names, gradients, strict=True))

    def _aggregated(self, losses: Tensor, config: AlgorithmConfig) -> tuple[Tensor, int]:
        """One number, and what it was divided by."""
        episodes = [losses[self.episode == number] for number in self.episode.unique()]
        if config.aggregation == "token-mean":
            return losses.mean(), self.n
        if config.aggregation == "seq-mean-token-mean":
            return torch.stack([one.mean() for one in episodes]).mean(), len(episodes)
        mean = torch.stack([one.sum() for one in episodes]).mean()
        if config.aggregation == "fixed-length":
            return mean / LOSS_LENGTH, len(episodes) * LOSS_LENGTH
        return mean, len(episodes)

    def _surrogate(self, config: AlgorithmConfig) -> tuple[Tensor, dict[str, float], dict[str, bool]]:
        advantage, ratio = self.advantage, (self.p - self.old).exp()
        figures = {"ratio_max": float(ratio.detach().max()), "ratio_min": float(ratio.detach().min())}
        if config.policy_loss is PolicyLoss.policy_gradient:
            return -advantage * self.p, figures, {}
        if config.policy_loss is PolicyLoss.gspo:
            means = {int(i): (self.p - self.old)[self.episode == i].mean() for i in self.episode.unique()}
            of_episode = torch.stack([means[int(i)] for i in self.episode]).exp().detach()
            ratio = of_episode * (self.p - self.p.detach()).exp()
        lowest, highest = 1 - config.clip_low, 1 + config.clip_high
        within = ratio.clamp(lowest, highest)
        low, high = ratio < lowest, ratio > highest
        if config.policy_loss is PolicyLoss.cispo:
            loss = -within.detach() * advantage * self.p
        else:
            low, high = low & (advantage < 0), high & (advantage > 0)
            gain = torch.minimum(ratio * advantage, within * advantage)
            if config.dual_clip is not None:
                least = torch.maximum(gain, config.dual_clip * advantage)
                gain = torch.where(advantage < 0, least, gain)
            loss = -gain
        counts = {"clip_fraction_low": low, "clip_fraction_high": high}
        if config.dual_clip is not None:
            counts["dual_clip_fraction"] = (advantage < 0) & (ratio > config.dual_clip)
        happens = {name: bool(mask.any()) for name, mask in counts.items()}
        return loss, figures | {name: float(mask.sum()) / self.n for name, mask in counts.items()}, happens

    def _kl(self, config: AlgorithmConfig) -> tuple[Tensor, dict[str, bool]]:
        weight, happens = torch.ones(()), {}
        if config.use_kl_iw:
            lower, upper = config.kl_iw_clip_lower or 0.0, config.kl_iw_clip_upper or float("inf")
            ratio = (self.p - self.old).exp().detach()
            weight = ratio.clamp(lower, upper)
            happens = {
                "weight below": bool((ratio < lower).any()),
                "weight above": bool((ratio > upper).any()),
            }
        if not config.kl_estimator.startswith("full_"):
            return weight * self._estimate(config.kl_estimator), happens
        forward = config.kl_estimator is KlEstimator.full_forward
        first, second = (self.log_r, self.log_p) if forward else (self.log_p, self.log_r)
        shares = first.exp() * (first - second)
        if config.kl_topk_tokens is None:
            return shares.sum(-1), happens
        # As the log-prob group saw them: its policy is the one that sampled.
        picks = (self.log_r if forward else self.log_old).topk(config.kl_topk_tokens).indices
        picked = (picks == self.y[:, None]).any(-1)
        happens |= {"sampled is picked": bool(picked.any()), "sampled is in the tail": bool((~picked).any())}
        head = shares.gather(1, picks).sum(-1)
        if not config.kl_use_tail_sampling:
            return head, happens
        return head + weight * torch.where(picked, 0.0, self._tail(config.kl_topk_tail, forward)), happens

    def _estimate(self, estimator: str) -> Tensor:
        log_w, unit = self.r - self.p, (self.p - self.p.detach()).exp()
        k3 = log_w.exp() - 1 - log_w
        forms = {
            "k2": log_w**2 / 2,
            "k3": k3.clamp(max=10),
            "k3++": (unit * k3).clamp(max=10),
            "k4": unit * -log_w.detach(),
            "k5": (log_w.exp().detach() * log_w + unit.log()).clamp(max=10),
            "abs": log_w.abs(),
        }
        return forms[estimator]

    def _tail(self, kind: KlTail, forward: bool) -> Tensor:
        log_w, unit = self.r - self.p, (self.p - self.p.detach()).exp()
        if forward:
            value = log_w.exp().detach() * log_w
            return value + unit.log() if kind is KlTail.upstream else value
        return unit * -(log_w.detach() if kind is KlTail.upstream else log_w)


def _load(path: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)


def _distributions(model: torch.nn.Module) -> Tensor:
    """Log-probs [n, vocabulary] in the place of each trained token; each episode by itself."""
    pieces = []
    for one in SAMPLES:
        logits = model(torch.tensor(one.trajectory.tokens, dtype=torch.int64)[None]).logits[0]
        before = torch.tensor(one.trajectory.loss_mask.nonzero()[0] - 1)
        pieces.append(torch.log_softmax(logits[before] / reference.TEMPERATURE, dim=-1))
    return torch.cat(pieces)


def flat(tensors: dict[str, Tensor]) -> Tensor:
    """All as one vector."""
    return torch.cat([tensor.flatten() for tensor in tensors.values()])
