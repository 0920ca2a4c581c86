"""Computes advantages: by how much a token's episode, turn or rest went better than was to be expected.

`credit` says what has a return of its own, here called a unit: the episode, a turn or a trained token. `baseline` says
what a unit's return is compared with, `advantage_scale` what the difference is divided by. A token's advantage is that
of its unit.

| unit | return | peers, whose mean is a baseline |
|---|---|---|
| episode | all rewards, undiscounted | the episodes of the group, or of the mini-batch |
| turn | its own and later turns' rewards, gamma a turn | their turns of the same index |
| token | its own and later tokens' rewards, gamma a token | none |

With a critic the unit is the token whatever `credit` says: GAE settles by gamma and lambda what a token answers for.
The scale `group` is the spread of a unit's peers in the group, `batch` that of all units of the mini-batch less their
baselines; `whiten` works on tokens and centres them once more.

Names for what comes out, as credit, baseline, scale: GRPO (arXiv 2402.03300) trajectory, group, group; Dr. GRPO
(arXiv 2503.20783) trajectory, group, none; RLOO (arXiv 2402.14740) trajectory, leave_one_out, none; REINFORCE++
(arXiv 2501.03262) token, none, whiten, and with a baseline trajectory, group, whiten; Lite PPO (arXiv 2508.08221)
trajectory, group, batch; PPO token, critic, whiten.

Pure numpy in float64. Only tokens of a turn take part: what stands on others, be it NaN, changes nothing, and their
advantage is 0. Which tokens those are is the caller's: with `compat.observations_in_values` observation tokens get the
number of the turn before them, and are then as good as any. A group's part is known with its last episode; the rest
waits for the mini-batch.

Arrays marked [trained] are over the trained tokens of one episode alone, in order: the token after a turn's last is the
next turn's first, and neither gamma nor lambda counts what lies between. Every standard deviation is the sample one,
with n - 1. Values that do not differ by more than rounding deviate by exactly zero, and so does one alone; nothing is
divided where nothing differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from rlsys.config.algorithm import SIBLINGS, AdvantageBaseline, AdvantageScale, AlgorithmConfig, Credit

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
EPS = 1e-6
"""Added to a standard deviation before dividing by it."""
ROUNDING = 1e-12
"""Difference that sums of the same rewards may have, in units of the largest: the mean of equal floats is off by less."""


@dataclass(frozen=True, slots=True)
class RewardedEpisode:
    """One episode as far as advantages follow from it."""

    turn_rewards: Sequence[float]
    """[turns], whose sum is the episode's score; also of turns that have no trained token."""
    turn_of_token: NDArray[np.integer]
    """[seq] index of the turn of a trained token, not falling from one to the next; -1 where untrained."""
    penalties: Floats | None
    """[seq] the KL that is taken off each token's reward, the coefficient multiplied in; None is none."""
    values: NDArray[np.floating] | None
    """[seq] the critic's value before the token was chosen; needed where the baseline is the critic."""


@dataclass(frozen=True, slots=True)
class Units:
    """The parts of an episode that have one return each."""

    values: Floats
    """[units] returns, or the critic's advantages; where siblings are the baseline, less it, over the group's scale."""
    peers: Ints
    """[units] number; units of the same number are compared with each other."""
    of_token: Ints
    """[seq] unit of each token, -1 where untrained."""

    def on_tokens(self, values: Floats) -> Floats:
        """[units] -> [seq], 0 where untrained."""
        tokens, trained = np.zeros(len(self.of_token)), self.of_token >= 0
        tokens[trained] = values[self.of_token[trained]]
        return tokens


@dataclass(frozen=True, slots=True)
class AdvantageEstimate:
    """Advantages of one episode."""

    advantages: Floats
    """[seq], 0 where untrained; final after `group_estimates` unless the config needs the whole mini-batch."""
    returns: Floats | None
    """[seq] what the critic should have said, 0 where untrained: unscaled advantage + value; None without critic."""
    units: Units


def group_estimates(episodes: Sequence[RewardedEpisode], config: AlgorithmConfig) -> list[AdvantageEstimate]:
    """Estimate what the episodes of one question settle alone.

    With credit `trajectory` an episode without trained tokens counts in its siblings' baseline and spread: its
    score was drawn like theirs. An episode without siblings has an advantage of 0 where those are its baseline.

    Raises ValueError if rewards are not finite; if penalties or values of trained tokens are not, or are not
    aligned; if turns fall or have no reward; without values for the critic; with credit `token` and a baseline that
    is a mean, for a token has no peers; and with the scale `group` without siblings as the baseline.
    """
    _refuse_contradictions(config)
    if not episodes:
        return []
    alone = [_units(episode, config) for episode in episodes]
    values = np.concatenate([one.values for one in alone])
    peers = np.concatenate([one.peers for one in alone])
    divisors = spreads(values, peers) if config.advantage_scale is AdvantageScale.group else 1.0
    if config.baseline in SIBLINGS:
        values = centred(values, peers, leave_one_out=config.baseline is AdvantageBaseline.leave_one_out) / divisors
    estimates = []
    for episode, one, own in zip(episodes, alone, _split(values, alone), strict=True):
        returns = None
        if config.baseline is AdvantageBaseline.critic:
            returns = one.on_tokens(one.values + _values(episode))
        estimates.append(AdvantageEstimate(one.on_tokens(own), returns, replace(one, values=own)))
    return estimates


def batch_advantages(groups: Sequence[Sequence[Units]], config: AlgorithmConfig) -> list[list[Floats]]:
    """Advantages [seq] of one whole mini-batch, with what only all of its groups together settle.

    `groups` are the `AdvantageEstimate.units` of each. The scale `batch` is the spread among siblings, not that between
    easy and hard questions, for it is of centred returns: REINFORCE++ with baseline takes it so; Lite PPO's authors' code
    takes it of rewards as they are.
    """
    flat = list(chain.from_iterable(groups))
    if not flat:
        return [[] for _ in groups]
    values = np.concatenate([one.values for one in flat])
    if config.baseline is AdvantageBaseline.batch:
        values = centred(values, np.concatenate([one.peers for one in flat]))
    if config.advantage_scale is AdvantageScale.batch:
        values = values / spread(values)
    tokens = [one.on_tokens(own) for one, own in zip(flat, _split(values, flat), strict=True)]
    if config.advantage_scale is AdvantageScale.whiten:
        tokens = _whitened(tokens, [one.of_token >= 0 for one in flat])
    found = iter(tokens)
    return [[next(found) for _ in group] for group in groups]


def _refuse_contradictions(config: AlgorithmConfig) -> None:
    if config.credit is Credit.token and config.baseline not in (AdvantageBaseline.none, AdvantageBaseline.critic):
        raise ValueError(
            f"algorithm.credit=token has no token of another episode to compare with, which algorithm.baseline="
            f"{config.baseline} does: choose baseline none or critic, or credit turn or trajectory."
        )
    if config.advantage_scale is AdvantageScale.group and config.baseline not in SIBLINGS:
        raise ValueError(
            f"algorithm.advantage_scale=group goes with the mean of siblings, not with algorithm.baseline="
            f"{config.baseline}: choose scale batch, whiten or none."
        )


def _units(episode: RewardedEpisode, config: AlgorithmConfig) -> Units:
    """The units of one episode with their returns, or with the critic their generalised advantages."""
    _check(episode)
    trained = episode.turn_of_token >= 0
    turns = episode.turn_of_token[trained].astype(np.int64)
    penalties = np.zeros(len(turns)) if episode.penalties is None else episode.penalties[trained]
    rewards = placed(episode.turn_rewards, turns) - penalties
    of_trained, peers = np.arange(len(turns)), np.zeros_like(turns)
    if config.baseline is AdvantageBaseline.critic:
        values = generalised_advantages(rewards, _values(episode), config.gamma, config.gae_lambda)
    elif config.credit is Credit.trajectory:
        # Not of the rewards on tokens: an untrained episode's score counts too.
        values = np.array([float(sum(episode.turn_rewards) - penalties.sum())])
        of_trained, peers = np.zeros_like(turns), np.zeros(1, dtype=np.int64)
    elif config.credit is Credit.turn:
        peers, of_trained = np.unique(turns, return_inverse=True)
        of_turns = np.zeros(len(peers))
        np.add.at(of_turns, of_trained, rewards)
        values = to_go(of_turns, config.gamma)
    else:
        values = to_go(rewards, config.gamma)
    of_token = np.full(len(trained), -1, dtype=np.int64)
    of_token[trained] = of_trained
    return Units(values, peers, of_token)


def _check(episode: RewardedEpisode) -> None:
    turns = episode.turn_of_token[episode.turn_of_token >= 0]
    if not np.isfinite(episode.turn_rewards).all():
        raise ValueError(
            f"An episode's rewards must be finite, got {list(episode.turn_rewards)}; check the reward function."
        )
    if (np.diff(turns) < 0).any() or (turns >= len(episode.turn_rewards)).any():
        raise ValueError(
            f"The turns of an episode's trained tokens must not fall and must be among its {len(episode.turn_rewards)} "
            f"turns with a reward, got {np.unique(turns).tolist()}; check turn_of_token."
        )
    for name, given in (("penalties", episode.penalties), ("values", episode.values)):
        if given is None:
            continue
        if given.shape != episode.turn_of_token.shape:
            raise ValueError(
                f"An episode's {name} must be aligned with its {len(episode.turn_of_token)} tokens, got {given.shape}."
            )
        if not np.isfinite(given[episode.turn_of_token >= 0]).all():
            raise ValueError(
                f"An episode's {name} must be finite where a token is trained; check where they come from."
            )


def _values(episode: RewardedEpisode) -> Floats:
    """[trained] what the critic said."""
    if episode.values is None:
        raise ValueError("algorithm.baseline=critic needs values, and an episode has none; let the critic score it.")
    return episode.values[episode.turn_of_token >= 0].astype(np.float64)


def _whitened(tokens: Sequence[Floats], masks: Sequence[NDArray[np.bool_]]) -> list[Floats]:
    """[seq] advantages of each episode, whitened over all that is in the masks; 0 elsewhere."""
    every, mask = np.concatenate(tokens), np.concatenate(masks)
    every[mask] = whitened(every[mask])
    return np.split(every, np.cumsum([len(own) for own in tokens])[:-1])


def _split(values: Floats, episodes: Sequence[Units]) -> list[Floats]:
    """Cut `values` into those of each episode's units."""
    return np.split(values, np.cumsum([len(one.values) for one in episodes])[:-1])


def placed(turn_rewards: Sequence[float], turns: Ints) -> Floats:
    """[turns] rewards -> [trained]: each stands on the last trained token of its turn.

    `turns` [trained] is the turn of each trained token, in order. A turn without trained tokens hands its reward
    to the nearest trained token before it, and if there is none to the first after it; so the sum stays what it
    was, unless no token is trained at all.
    """
    rewards = np.zeros(len(turns))
    if len(turns):
        # The last token of this turn or an earlier one is one before the first of a later turn.
        ends = np.searchsorted(turns, np.arange(len(turn_rewards)), side="right") - 1
        np.add.at(rewards, ends.clip(min=0), np.asarray(turn_rewards, dtype=np.float64))
    return rewards


def to_go(rewards: Floats, discount: float) -> Floats:
    """[n] rewards -> [n] G_t = r_t + discount G_{t+1}, with nothing after the last."""
    backwards = accumulate(reversed(rewards.tolist()), lambda later, now: now + discount * later)
    return np.array(list(backwards), dtype=np.float64)[::-1]


def generalised_advantages(rewards: Floats, values: Floats, gamma: float, gae_lambda: float) -> Floats:
    """[trained] rewards and values -> [trained] generalised advantage estimates (arXiv 1506.02438).

    A_t = d_t + gamma lambda A_{t+1} with d_t = r_t + gamma V_{t+1} - V_t. An episode ends with its last trained
    token, after which the value is 0: also one that a limit cut, for nothing more is paid for it.
    """
    following = np.append(values[1:], 0.0)[: len(values)]
    return to_go(rewards + gamma * following - values, gamma * gae_lambda)


def centred(values: Floats, peers: Ints, *, leave_one_out: bool = False) -> Floats:
    """[n] values -> [n] value - mean, where only those with the same number in `peers` [n] are compared.

    With `leave_one_out` the mean is that of the others (RLOO, arXiv 2402.14740):
    x - mean(others) = (x - mean(all)) n / (n - 1).
    """
    deviations = np.zeros_like(values)
    for peer in np.unique(peers):
        among = peers == peer
        deviations[among] = _deviations(values[among])
        count = int(among.sum())
        if leave_one_out and count > 1:
            deviations[among] *= count / (count - 1)
    return deviations


def spreads(values: Floats, peers: Ints) -> Floats:
    """[n] `spread` of those that share a number in `peers` [n]."""
    found = np.ones_like(values)
    for peer in np.unique(peers):
        among = peers == peer
        found[among] = spread(values[among])
    return found


def spread(values: Floats) -> float:
    """Sample standard deviation of `values` + EPS; 1 where they do not differ."""
    return float(values.std(ddof=1)) + EPS if _differ(values) else 1.0


def whitened(values: Floats) -> Floats:
    """[n] (x - mean) / (std + EPS) over all of `values`; zeros where they do not differ.

    As in REINFORCE++ (arXiv 2501.03262) and codes of PPO, which vary in trifles: veRL and TRL, which Search-R1
    follows, take the sample standard deviation as here, OpenRLHF the population's; all bound the variance by 1e-8.
    """
    return _deviations(values) / spread(values)


def _deviations(values: Floats) -> Floats:
    return values - values.mean() if _differ(values) else np.zeros_like(values)


def _differ(values: Floats) -> bool:
    return bool(values.size) and bool(np.ptp(values) > ROUNDING * np.abs(values).max())
