"""Computes advantages in exact fractions by loops over tokens, and generates mini-batches for tests."""

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

import numpy as np
from hypothesis import strategies as st

from rlsys.algorithms.advantages import RewardedEpisode
from rlsys.config.algorithm import AdvantageBaseline, AdvantageScale, Credit, GaeAdvantage, ReturnsAdvantage

Exact = list[Fraction]
GAMMAS = st.sampled_from([Fraction(0), Fraction(1, 2), Fraction(7, 8), Fraction(1)])
"""Discounts that floats hold exactly."""


Settings = ReturnsAdvantage | GaeAdvantage


def setting(credit: str, baseline: str, scale: str) -> ReturnsAdvantage:
    return ReturnsAdvantage(credit=Credit(credit), baseline=AdvantageBaseline(baseline), scale=AdvantageScale(scale))


SETTINGS: list[Settings] = [
    setting(credit, baseline, scale)
    for credit, baseline, scale in product(Credit, AdvantageBaseline, AdvantageScale)
    if (credit != "token" or baseline == "none") and (scale != "group" or baseline in ("group", "leave_one_out"))
]
SETTINGS += [GaeAdvantage(whiten=whiten) for whiten in (False, True)]


def scale_of(config: Settings) -> AdvantageScale:
    if isinstance(config, GaeAdvantage):
        return AdvantageScale.whiten if config.whiten else AdvantageScale.none
    return config.scale


def credit_of(config: Settings) -> Credit:
    return Credit.token if isinstance(config, GaeAdvantage) else config.credit


@dataclass(frozen=True)
class ExactEpisode:
    """An episode in fractions; tokens of turn -1 are untrained, and their penalties and values are ignored."""

    rewards: Exact
    turns: list[int]
    penalties: Exact
    values: Exact

    @property
    def trained(self) -> list[int]:
        return [token for token, turn in enumerate(self.turns) if turn >= 0]

    def episode(self, elsewhere: float = 0.0) -> RewardedEpisode:
        """Return the episode in floats, with the number `elsewhere` at untrained tokens."""

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
    """Draw a prompt, then turns of 0 to 3 trained tokens with observations between; the last turns may be empty."""
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


Numbers = list[list[list[float]]]
"""Numbers by group, episode and token."""


def oracle(batch: list[list[ExactEpisode]], config: Settings) -> tuple[Numbers, Numbers]:
    """Return the advantages and the critic's targets."""
    spread_of_batch = _spread(_of_units(batch, config))
    tokens = [_centred(one, token, group, batch, config) for group in batch for one in group for token in one.trained]
    mean, spread_of_tokens = sum(tokens) / max(1, len(tokens)), _spread(tokens)
    advantages: Numbers = []
    targets: Numbers = []
    for group in batch:
        advantages.append([])
        targets.append([])
        for one in group:
            line, target = [0.0] * len(one.turns), [0.0] * len(one.turns)
            for token in one.trained:
                value = _centred(one, token, group, batch, config)
                target[token] = float(value + one.values[token])
                if scale_of(config) is AdvantageScale.group:
                    line[token] = float(value) / _spread(_returns_of(group, one, token, config))
                elif scale_of(config) is AdvantageScale.batch:
                    line[token] = float(value) / spread_of_batch
                elif scale_of(config) is AdvantageScale.whiten:
                    line[token] = float(value - mean) / spread_of_tokens
                else:
                    line[token] = float(value)
            advantages[-1].append(line)
            targets[-1].append(target)
    return advantages, targets


def _token_rewards(one: ExactEpisode) -> dict[int, Fraction]:
    rewards = {token: -one.penalties[token] for token in one.trained}
    for turn, reward in enumerate(one.rewards):
        until = [token for token in one.trained if one.turns[token] <= turn]
        if one.trained:
            rewards[until[-1] if until else one.trained[0]] += reward
    return rewards


def _return(one: ExactEpisode, token: int | None, config: Settings) -> Fraction:
    """Compute the return of a token, or of the whole episode if `token` is None."""
    if token is None or credit_of(config) is Credit.trajectory:
        return sum(one.rewards, Fraction(0)) - sum((one.penalties[t] for t in one.trained), Fraction(0))
    rewards, result = _token_rewards(one), Fraction(0)
    own_turn, gamma = one.turns[token], Fraction(config.gamma)
    for other in one.trained:
        if credit_of(config) is Credit.token and other >= token:
            result += gamma ** sum(token < t <= other for t in one.trained) * rewards[other]
        if credit_of(config) is Credit.turn and one.turns[other] >= own_turn:
            between = {one.turns[t] for t in one.trained if own_turn < one.turns[t] <= one.turns[other]}
            result += gamma ** len(between) * rewards[other]
    return result


def _generalised(one: ExactEpisode, token: int, config: Settings) -> Fraction:
    assert isinstance(config, GaeAdvantage)
    gamma, gae_lambda = Fraction(config.gamma), Fraction(config.gae_lambda)
    rewards, result = _token_rewards(one), Fraction(0)
    following = [t for t in one.trained if t >= token]
    for steps, t in enumerate(following):
        after = one.values[following[steps + 1]] if steps + 1 < len(following) else Fraction(0)
        result += (gamma * gae_lambda) ** steps * (rewards[t] + gamma * after - one.values[t])
    return result


def _returns_of(peers: list[ExactEpisode], one: ExactEpisode, token: int | None, config: Settings) -> Exact:
    """Return the returns that a token's baseline averages: of each peer's whole episode, or of the peer's same turn."""
    if token is None or credit_of(config) is Credit.trajectory:
        return [_return(peer, None, config) for peer in peers]
    alike = [[t for t in peer.trained if peer.turns[t] == one.turns[token]] for peer in peers]
    return [_return(peer, tokens[0], config) for peer, tokens in zip(peers, alike, strict=True) if tokens]


def _centred(
    one: ExactEpisode,
    token: int | None,
    group: list[ExactEpisode],
    batch: list[list[ExactEpisode]],
    config: Settings,
) -> Fraction:
    """Subtract the baseline from the return of a token, or of the whole episode if `token` is None."""
    if isinstance(config, GaeAdvantage):
        assert token is not None
        return _generalised(one, token, config)
    own = _return(one, token, config)
    if config.baseline is AdvantageBaseline.none:
        return own
    every = [peer for peers in batch for peer in peers]
    peers = {
        AdvantageBaseline.leave_one_out: [peer for peer in group if peer is not one],
        AdvantageBaseline.group: group,
        AdvantageBaseline.batch: every,
    }[config.baseline]
    returns = _returns_of(peers, one, token, config)
    return own - sum(returns) / len(returns) if returns else Fraction(0)


def _of_units(batch: list[list[ExactEpisode]], config: Settings) -> Exact:
    """Return the centred returns of the mini-batch, one for each unit of credit: episode, turn or token."""
    found: Exact = []
    for group in batch:
        for one in group:
            tokens: list[int | None] = [*one.trained]
            if credit_of(config) is Credit.turn:
                tokens = [*{one.turns[token]: token for token in one.trained}.values()]
            elif credit_of(config) is Credit.trajectory:
                tokens = [None]  # The score of an episode without trained tokens counts too.
            found += [_centred(one, token, group, batch, config) for token in tokens]
    return found


def _spread(values: Exact) -> float:
    """Sample standard deviation plus 1e-6, or 1 if all values are equal."""
    if len(set(values)) < 2:
        return 1.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1)) + 1e-6
