"""Computes policy losses by loops over tokens in Python's floats, and builds tensors with NaN on untrained tokens."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlsys.algorithms.losses import LossInputs, token_weights
from rlsys.config.algorithm import Aggregation, AlgorithmConfig

LOSS_LENGTH = 7
NAN = math.nan


@dataclass(frozen=True)
class Token:
    """A token; untrained ones hold NaN."""

    trained: bool
    logprob: float = NAN
    old: float = NAN
    ref: float = NAN
    entropy: float = NAN
    advantage: float = NAN


Episode = list[Token]


def episode(draw: random.Random, trained: Sequence[bool]) -> Episode:
    """Draw an episode; many tokens and whole sequences are far enough from the old policy to be clipped."""
    drift = draw.gauss(0, 0.3)

    def token() -> Token:
        old = -abs(draw.gauss(0, 1)) - 0.1
        new = old + drift + draw.gauss(0, 0.4)
        return Token(True, new, old, new + draw.gauss(0, 0.5), abs(draw.gauss(0, 1)), draw.gauss(0, 1))

    return [token() if one else Token(False) for one in trained]


def episodes(seed: int, count: int = 6, longest: int = 7) -> list[Episode]:
    """Draw episodes of different lengths; the first has no trained token, the second has one."""
    draw = random.Random(seed)
    masks = [[False, False], [False, True]]
    masks += [[draw.random() < 0.7 for _ in range(draw.randint(2, longest))] for _ in range(count - 2)]
    return [episode(draw, mask) for mask in masks]


def surrogate(loss: Any, token: Token, held: Token, ratio: float) -> float:
    """Policy loss of one token; `ratio` is the ratio of the token or, for gspo, of its sequence."""
    advantage = token.advantage
    match loss.kind:
        case "policy_gradient":
            return -advantage * token.logprob
        case "cispo":
            weight = min(max(math.exp(held.logprob - held.old), 1 - loss.clip_low), 1 + loss.clip_high)
            return -weight * advantage * token.logprob
        case "sapo":
            tau = loss.tau_positive if advantage > 0 else loss.tau_negative
            return -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage
        case "ppo" | "gspo":
            if advantage >= 0:
                return -min(ratio, 1 + loss.clip_high) * advantage
            largest = getattr(loss, "dual_clip", None) or math.inf
            return -min(max(ratio, 1 - loss.clip_low), largest) * advantage
    raise LookupError(f"no reference for the policy loss {loss.kind}")


def runs(one: Episode) -> list[int]:
    """Turn of each token: the number of untrained tokens before it, so that consecutive trained tokens share it."""
    return [sum(not before.trained for before in one[:place]) for place in range(len(one))]


def fallen(gate: str, now: Episode, held: Episode) -> list[float]:
    """Penalty of LLDS for each trained token."""

    def counted(fixed: Token) -> bool:
        return fixed.trained and math.copysign(1, fixed.advantage) > 0

    penalties = []
    for place, (token, turn) in enumerate(zip(now, runs(now), strict=True)):
        if not token.trained:
            continue
        places = {"turn": [at for at, other in enumerate(runs(now)) if other == turn], "trajectory": range(len(now))}
        peers = [held[at] for at in places.get(gate, [place]) if counted(held[at])]
        applies = counted(held[place]) and sum(peer.old - peer.logprob for peer in peers) > 0
        penalties.append(max(0.0, token.old - token.logprob) if applies else 0.0)
    return penalties


def token_losses(config: AlgorithmConfig, now: Episode, held: Episode) -> list[float]:
    """Loss of each trained token, with a k3 KL term; terms behind a stop-gradient are computed from `held`."""
    pairs = [(token, fixed) for token, fixed in zip(now, held, strict=True) if token.trained]
    losses = []
    for (token, fixed), fall in zip(pairs, fallen(config.llds.gate, now, held), strict=True):
        ratio = math.exp(token.logprob - token.old)
        if config.policy_loss.kind == "gspo":
            mean = sum(other.logprob - other.old for _, other in pairs) / len(pairs)
            ratio = math.exp(mean) * math.exp(token.logprob - fixed.logprob)
        loss = surrogate(config.policy_loss, token, fixed, ratio) - config.entropy_coef * token.entropy
        loss += config.llds.coef * fall
        if config.kl_coef:
            weight = 1.0
            if config.use_kl_iw:
                weight = math.exp(fixed.logprob - fixed.old)
                weight = min(max(weight, config.kl_iw_clip_lower), config.kl_iw_clip_upper)
            log_w = token.ref - token.logprob
            loss += config.kl_coef * weight * (math.exp(log_w) - 1 - log_w)
        losses.append(loss)
    return losses


def aggregated(aggregation: Aggregation, losses: Sequence[Sequence[float]]) -> float:
    """Loss of a mini-batch from the token losses of each episode."""
    some = [one for one in losses if one]
    if aggregation == "token-mean":
        flat = [value for one in some for value in one]
        return sum(flat) / len(flat)
    totals = [sum(one) for one in some]
    if aggregation == "seq-mean-token-mean":
        totals = [total / len(one) for total, one in zip(totals, some, strict=True)]
    if aggregation == "fixed-length":
        totals = [total / LOSS_LENGTH for total in totals]
    return sum(totals) / len(totals)


def reference_loss(config: AlgorithmConfig, batch: Sequence[Episode], held: Sequence[Episode] | None = None) -> float:
    """Loss of a mini-batch of episodes."""
    held = batch if held is None else held
    losses = [token_losses(config, now, fixed) for now, fixed in zip(batch, held, strict=True)]
    return aggregated(config.aggregation, losses)


def numeric_gradient(loss: Callable[[list[Episode]], float], batch: list[Episode], name: str) -> list[float]:
    """Derivatives for the field `name` of each trained token by central differences, in the order of episodes."""
    step, gradient = 1e-5, []
    for row, one in enumerate(batch):
        for column, token in enumerate(one):
            if not token.trained:
                continue
            sides = []
            for sign in (1, -1):
                moved = [list(other) for other in batch]
                moved[row][column] = replace(token, **{name: getattr(token, name) + sign * step})
                sides.append(loss(moved))
            gradient.append((sides[0] - sides[1]) / (2 * step))
    return gradient


class Flat:
    """A mini-batch as tensors of one micro-batch; the leaves are the log-probs and entropies, [rows, width] each.

    Each episode has its own row, or all share one row if `packed`. Each row ends with at least one column of NaN.
    """

    def __init__(self, config: AlgorithmConfig, batch: Sequence[Episode], packed: bool = False) -> None:
        rows = [[token for one in batch for token in one]] if packed else batch
        width = max(map(len, rows)) + 1
        padded = [[*row, *[Token(False)] * (width - len(row))] for row in rows]

        def table(name: str) -> Tensor:
            return torch.tensor([[getattr(token, name) for token in row] for row in padded], dtype=torch.float64)

        self.logprobs, self.entropy = table("logprob").requires_grad_(), table("entropy").requires_grad_()
        self.lengths = np.array([sum(token.trained for token in one) for one in batch], dtype=np.int64)
        numbers = [[number for number, one in enumerate(batch) for _ in one]]
        numbers = numbers if packed else [[number] * len(one) for number, one in enumerate(batch)]
        sequences = torch.tensor([[*row, *[-1] * (width - len(row))] for row in numbers])
        # Numbers of turns differ between episodes; untrained tokens hold one that must not be read.
        turns = [[100 * number + turn for turn in runs(one)] for number, one in enumerate(batch)]
        order = {number: place for place, number in enumerate(sorted({turn for row in turns for turn in row}))}
        turns = [[turn for row in turns for turn in row]] if packed else turns
        weights = torch.from_numpy(token_weights(config.aggregation, self.lengths))
        self.inputs = LossInputs(
            old_logprobs=table("old"),
            ref_logprobs=table("ref"),
            advantages=table("advantage"),
            mask=torch.tensor([[token.trained for token in row] for row in padded]),
            weights=weights[sequences].where(sequences >= 0, NAN),
            sequences=sequences,
            turns=torch.tensor([[*map(order.__getitem__, row), *[-1] * (width - len(row))] for row in turns]),
        )

    def trained(self, values: Tensor | None) -> list[float]:
        """Entries of `values` [rows, width] at trained tokens, in the order of episodes."""
        assert values is not None
        return values[self.inputs.mask].tolist()


def poisoned(inputs: LossInputs, poison: float) -> LossInputs:
    """A copy whose float tensors hold `poison` at all untrained tokens."""
    floats = {
        one.name: getattr(inputs, one.name).masked_fill(~inputs.mask, poison)
        for one in fields(inputs)
        if one.name not in ("mask", "sequences", "turns") and getattr(inputs, one.name) is not None
    }
    return replace(inputs, **floats)
