"""Advantages in exact fractions by loops over tokens, and mini-batches to try them on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

import numpy as np
from hypothesis import strategies as st

from rlsys.algorithms.advantages import RewardedEpisode
from rlsys.config.algorithm import AdvantageBaseline, AdvantageScale, AlgorithmConfig, Credit

Exact = list[Fraction]
GAMMAS = st.sampled_from([Fraction(0), Fraction(1, 2), Fraction(7, 8), Fraction(1)])
"""Such that floats hold them exactly."""


def setting(credit: str, baseline: str, scale: str) -> AlgorithmConfig:
    return AlgorithmConfig(
        credit=Credit(credit), baseline=AdvantageBaseline(baseline), advantage_scale=AdvantageScale(scale)
    )


SETTINGS = [
    setting(credit, baseline, scale)
    for credit, baseline, scale in product(Credit, AdvantageBaseline, AdvantageScale)
    if (credit != "token" or baseline in ("none", "critic"))
    and (scale != "group" or baseline in ("group", "leave_one_out"))
]


def called(value: object) -> str | None:
    """A short name of a setting."""
    if not isinstance(value, AlgorithmConfig):
        return None
    return f"{value.credit}-{value.baseline}-{value.advantage_scale}"


@dataclass(frozen=True)
class ExactEpisode:
    """An episode in fractions: entries of tokens with turn -1 mean nothing."""

    rewards: Exact
    turns: list[int]
    penalties: Exact
    values: Exact

    @property
    def trained(self) -> list[int]:
        return [token for token, turn in enumerate(self.turns) if turn >= 0]

    def episode(self, elsewhere: float = 0.0) -> RewardedEpisode:
        """In floats, with `elsewhere` on tokens that are not trained."""

        def filled(numbers: Exact) -> np.ndarray:
            return np.array(
                [float(own) if turn >= 0 else elsewhere for own, turn in zip(numbers, self.turns, strict=True)]
            )

        return RewardedEpisode(
            [float(reward) for reward in self.rewards],
            np.array(self.turns, dtype=np.int32),
            filled(self.penalties),
            filled(self.values),
        )


@st.composite
def episodes(draw: st.DrawFn) -> ExactEpisode:
    """Prompt, then turns of 0 to 3 trained tokens with observations between; the last turns may be cut away."""
    turns = [-1] * draw(st.integers(0, 2))
    lengths = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=4))
    for turn, (trained, observed) in enumerate(lengths):
        turns += [turn] * trained + [-1] * observed
    hundredths = st.integers(-100, 100).map(lambda value: Fraction(value, 100))
    scores = hundredths | st.sampled_from([Fraction(0), Fraction(1)])
    count = len(lengths) + draw(st.integers(0, 2))
    size = len(turns)
    penalties = (
        draw(st.lists(hundredths, min_size=size, max_size=size)) if draw(st.booleans()) else [Fraction(0)] * size
    )
    return ExactEpisode(
        draw(st.lists(scores, min_size=count, max_size=count)),
        turns,
        penalties,
        draw(st.lists(hundredths, min_size=size, max_size=size)),
    )


def mini_batches() -> st.SearchStrategy[list[list[ExactEpisode]]]:
    return st.lists(st.lists(episodes(), min_size=1, max_size=4), min_size=1, max_size=3)


def oracle(
    batch: list[list[ExactEpisode]], config: AlgorithmConfig
) -> tuple[list[list[list[float]]], list[list[list[float]]]]:
    """Advantages and the critic's targets of each token of each episode of each group."""
    every = [one for group in batch for one in group]
    advantages: list[list[dict[int, Fraction]]] = []
    found: list[list[list[float]]] = []
    targets: list[list[list[float]]] = []
    for group in batch:
        peers = every if config.baseline is AdvantageBaseline.batch else group
        centred = [_less_baseline(one, at, group, peers, config) for at, one in enumerate(group)]
        targets.append(
            [
                [float(own[t] + one.values[t]) if t in own else 0.0 for t in range(len(one.turns))]
                for one, own in zip(group, centred, strict=True)
            ]
        )
        advantages.append(centred)
    flat = _of_units(batch, advantages, config)
    tokens = [own for group in advantages for one in group for own in one.values()]
    for group, group_advantages in zip(batch, advantages, strict=True):
        found.append([])
        for one, own in zip(group, group_advantages, strict=True):
            line = [0.0] * len(one.turns)
            for token, value in own.items():
                if config.advantage_scale is AdvantageScale.group:
                    line[token] = float(value) / _spread(_returns_of_peers(one, token, group, config))
                elif config.advantage_scale is AdvantageScale.batch:
                    line[token] = float(value) / _spread(flat)
                elif config.advantage_scale is AdvantageScale.whiten:
                    line[token] = float(value - sum(tokens) / len(tokens)) / _spread(tokens)
                else:
                    line[token] = float(value)
            found[-1].append(line)
    return found, targets


def _token_rewards(one: ExactEpisode) -> dict[int, Fraction]:
    rewards = {token: -one.penalties[token] for token in one.trained}
    for turn, reward in enumerate(one.rewards):
        until = [token for token in one.trained if one.turns[token] <= turn]
        if one.trained:
            rewards[until[-1] if until else one.trained[0]] += reward
    return rewards


def _total(one: ExactEpisode) -> Fraction:
    return sum(one.rewards, Fraction(0)) - sum((one.penalties[token] for token in one.trained), Fraction(0))


def _return(one: ExactEpisode, token: int, config: AlgorithmConfig) -> Fraction:
    """What `token` answers for."""
    credit, gamma = config.credit, Fraction(config.gamma)
    if credit is Credit.trajectory:
        return _total(one)
    rewards, result = _token_rewards(one), Fraction(0)
    own_turn = one.turns[token]
    for other in one.trained:
        if credit is Credit.token and other >= token:
            result += gamma ** sum(token < t <= other for t in one.trained) * rewards[other]
        if credit is Credit.turn and one.turns[other] >= own_turn:
            between = {one.turns[t] for t in one.trained if own_turn < one.turns[t] <= one.turns[other]}
            result += gamma ** len(between) * rewards[other]
    return result


def _generalised(one: ExactEpisode, token: int, config: AlgorithmConfig) -> Fraction:
    gamma, gae_lambda = Fraction(config.gamma), Fraction(config.gae_lambda)
    rewards, result = _token_rewards(one), Fraction(0)
    following = [t for t in one.trained if t >= token]
    for steps, t in enumerate(following):
        after = one.values[following[steps + 1]] if steps + 1 < len(following) else Fraction(0)
        result += (gamma * gae_lambda) ** steps * (rewards[t] + gamma * after - one.values[t])
    return result


def _return_at_turn(one: ExactEpisode, turn: int, config: AlgorithmConfig) -> Fraction | None:
    tokens = [token for token in one.trained if one.turns[token] == turn]
    return _return(one, tokens[0], config) if tokens else None


def _returns_of_peers(one: ExactEpisode, token: int, peers: list[ExactEpisode], config: AlgorithmConfig) -> Exact:
    if config.credit is Credit.trajectory:
        return [_total(peer) for peer in peers]
    found = [_return_at_turn(peer, one.turns[token], config) for peer in peers]
    return [value for value in found if value is not None]


def _less_baseline(
    one: ExactEpisode,
    at: int,
    group: list[ExactEpisode],
    peers: list[ExactEpisode],
    config: AlgorithmConfig,
) -> dict[int, Fraction]:
    result = {}
    for token in one.trained:
        own = _return(one, token, config)
        if config.baseline is AdvantageBaseline.critic:
            result[token] = _generalised(one, token, config)
        elif config.baseline is AdvantageBaseline.none:
            result[token] = own
        elif config.baseline is AdvantageBaseline.leave_one_out:
            others = _returns_of_peers(one, token, group[:at] + group[at + 1 :], config)
            result[token] = own - sum(others) / len(others) if others else Fraction(0)
        else:
            alike = _returns_of_peers(one, token, peers, config)
            result[token] = own - sum(alike) / len(alike)
    return result


def _of_units(
    batch: list[list[ExactEpisode]],
    advantages: list[list[dict[int, Fraction]]],
    config: AlgorithmConfig,
) -> Exact:
    """One number for each episode, turn or token of the mini-batch, whatever has a return of its own."""
    found: Exact = []
    for group, group_advantages in zip(batch, advantages, strict=True):
        for at, (one, own) in enumerate(zip(group, group_advantages, strict=True)):
            if config.baseline is AdvantageBaseline.critic or config.credit is Credit.token:
                found += own.values()
            elif config.credit is Credit.turn:
                found += {one.turns[token]: value for token, value in own.items()}.values()
            else:
                # Of one token, so that an episode without trained ones has a number too: its score counts.
                whole = ExactEpisode([_total(one)], [0], [Fraction(0)], [Fraction(0)])
                others = [*group[:at], whole, *group[at + 1 :]]
                every = [peer for peers in batch for peer in peers]
                peers = every if config.baseline is AdvantageBaseline.batch else others
                found += _less_baseline(whole, at, others, peers, config).values()
    return found


def _spread(values: Exact) -> float:
    """Sample standard deviation and a little; 1 where nothing differs."""
    if len(set(values)) < 2:
        return 1.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1)) + 1e-6
