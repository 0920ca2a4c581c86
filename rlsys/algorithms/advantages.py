"""Computes the advantages of trained tokens from rewards.

With the kind `returns`, `credit` chooses the unit of credit: the episode, a turn or a trained token. Every unit has a
return. `baseline` is subtracted from the return, and `scale` divides the difference. The result is the advantage of all
trained tokens of the unit.

    unit       return                                              peers (baseline: mean of their returns)
    episode:   all rewards, undiscounted                           episodes of the group, or of the mini-batch
    turn:      rewards of this and later turns, gamma per turn     turns with the same index in these episodes
    token:     rewards of this and later tokens, gamma per token   none

An episode may have several contexts, branches, some of which have a reward of their own. It still has one return, which
counts once in every baseline and scale. The trained tokens of such a branch have the advantage of the episode, plus the
difference of the branch's reward from the episode's, divided by the same `scale`: the branch's reward less the baseline.

A KL penalty in the reward is subtracted from the rewards first. Example: the four episodes of a group earn 1, 0, 0 and
1; `credit` is trajectory and `baseline` is group. The trained tokens of the four episodes then have the advantages

    scale none:    0.5   -0.5   -0.5   0.5     return - mean
    scale group:   0.87  -0.87  -0.87  0.87    the same, divided by the sample standard deviation, 0.577

With the kind `gae` the unit is always the token: a critic, gamma and lambda assign credit, and `whiten` is the only
scale. The scale `group` divides by the standard deviation over a unit's peers in the group. `batch` divides by the
standard deviation over all units of the mini-batch, after their baselines are subtracted. `whiten` subtracts the mean
over all trained tokens of the mini-batch and divides by their standard deviation.

Known methods as credit, baseline, scale:

    GRPO (arXiv 2402.03300)          trajectory, group, group
    Dr. GRPO (arXiv 2503.20783)      trajectory, group, none
    RLOO (arXiv 2402.14740)          trajectory, leave_one_out, none
    REINFORCE++ (arXiv 2501.03262)   token, none, whiten; with a baseline: trajectory, group, whiten
    Lite PPO (arXiv 2508.08221)      trajectory, group, batch
    PPO                              gae, whiten

An estimator from outside of the package gets the episodes of a prompt group, or the groups of a mini-batch if it
declares that it needs the mini-batch, and returns an array [seq] for each episode.

Pure numpy in float64. Tokens with turn -1 are ignored, even if their inputs are NaN, and get advantage 0. The caller
assigns turns: with `compat.observations_in_values`, observation tokens carry the index of the turn before them and
count as trained. `group_estimates` runs when a group is complete, `batch_advantages` when the mini-batch is complete.

Arrays marked [trained] hold the trained tokens of one episode in order. The first token of a turn directly follows the
last token of the turn before; gamma and lambda do not count the untrained tokens in between. Standard deviations are
sample standard deviations (n - 1). If all values are equal up to rounding, or if there is only one value, the
deviations from the mean are exactly zero and are not divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from rlsys.config.algorithm import (
    CRITIC,
    MINI_BATCH,
    SIBLINGS,
    AdvantageBaseline,
    AdvantageScale,
    Credit,
    CustomAdvantage,
    GaeAdvantage,
    ReturnsAdvantage,
)
from rlsys.config.custom import OwnComponent, described

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
AdvantageSettings = ReturnsAdvantage | GaeAdvantage | CustomAdvantage
EPS = 1e-6
"""Added to a standard deviation before dividing by it."""
ROUNDING = 1e-12
"""Relative difference up to which values count as equal; the rounding error of the mean of equal floats is smaller."""


@dataclass(frozen=True, slots=True)
class RewardedEpisode:
    """Data from which the advantages of one episode are computed."""

    turn_rewards: Sequence[float]
    """[turns] rewards, also of turns without a trained token; their sum is the episode's score."""
    turn_of_token: NDArray[np.integer]
    """[seq] turn index of each trained token, non-decreasing; -1 where untrained."""
    penalties: Floats | None
    """[seq] KL penalty subtracted from each token's reward, coefficient included; None for no penalty."""
    values: NDArray[np.floating] | None
    """[seq] critic's value of the state before the token; None without a critic."""
    offsets: Floats | None = None
    """[seq] reward of the token's branch less that of the episode; None if no branch has a reward of its own."""

    @property
    def score(self) -> float:
        """Sum of the episode's rewards, undiscounted, KL penalties subtracted."""
        penalty = 0.0 if self.penalties is None else self.penalties[self.trained].sum()
        return float(sum(self.turn_rewards) - penalty)

    @property
    def trained(self) -> NDArray[np.bool_]:
        """[seq], True where a token is trained."""
        return self.turn_of_token >= 0


@dataclass(frozen=True, slots=True)
class CreditUnits:
    """Units of credit of an episode: the parts of the episode that each have a return."""

    values: Floats
    """[units] returns, or generalised advantages with a critic. `group_estimates` applies group baseline and scale."""
    peers: Ints
    """[units] peer number; units with the same number are peers."""
    of_token: Ints
    """[seq] unit of each token, -1 where untrained."""
    offsets: Floats | None = field(default=None, metadata={"added later": True})
    """[seq] `RewardedEpisode.offsets`, divided as `values` are; None if no branch has a reward of its own."""

    def on_tokens(self, values: Floats) -> Floats:
        """Spread `values` [units] over the tokens and add the offsets: [seq], 0 where untrained."""
        tokens, trained = np.zeros(len(self.of_token)), self.of_token >= 0
        tokens[trained] = values[self.of_token[trained]]
        if self.offsets is not None:
            tokens[trained] += self.offsets[trained]
        return tokens

    def divided(self, values: Floats, divisors: Floats) -> CreditUnits:
        """Return the units with `values` [units], which have been divided by `divisors` [units], as the offsets are."""
        if self.offsets is None:
            return replace(self, values=values)
        offsets, trained = self.offsets.copy(), self.of_token >= 0
        offsets[trained] /= divisors[self.of_token[trained]]
        return replace(self, values=values, offsets=offsets)


@dataclass(frozen=True, slots=True)
class AdvantageEstimate:
    """Advantages of one episode."""

    advantages: Floats
    """[seq], 0 where untrained; final unless the estimator needs the whole mini-batch."""
    returns: Floats | None
    """[seq] targets of the critic: unscaled advantage + value, 0 where untrained; None without a critic."""
    units: CreditUnits | None
    """Input of `batch_advantages`; None with an estimator from outside of the package."""


def group_estimates(episodes: Sequence[RewardedEpisode], estimator: AdvantageSettings) -> list[AdvantageEstimate]:
    """Return the advantages of one prompt group, before baselines and scales that need the whole mini-batch.

    With credit `trajectory`, an episode without trained tokens still counts in the group's baseline and scale: its
    score is a sample like the others. With a group baseline, the only episode of a group has an advantage of 0.

    Raises UserError if an estimator from outside of the package fails, and ValueError for:
    - rewards that are not finite;
    - penalties or values that are misaligned, or not finite on a trained token;
    - turns that decrease or have no reward;
    - missing values with a critic;
    - credit `token` with a mean as baseline, because a token has no peers;
    - the scale `group` without a group baseline.
    """
    for episode in episodes:
        _check(episode)
    if isinstance(estimator, CustomAdvantage):
        return _custom_estimates(episodes, estimator)
    if isinstance(estimator, ReturnsAdvantage):
        _refuse_contradictions(estimator)
    if not episodes:
        return []
    alone = [_units(episode, estimator) for episode in episodes]
    critic = isinstance(estimator, GaeAdvantage)
    units = _compared(alone, estimator) if isinstance(estimator, ReturnsAdvantage) else alone
    return [
        AdvantageEstimate(
            one.on_tokens(one.values), one.on_tokens(one.values + _values(episode)) if critic else None, one
        )
        for episode, one in zip(episodes, units, strict=True)
    ]


def batch_advantages(
    groups: Sequence[Sequence[CreditUnits]], estimator: ReturnsAdvantage | GaeAdvantage
) -> list[list[Floats]]:
    """Return the final advantages [seq] of one mini-batch, for each group and episode.

    `groups` holds each episode's `AdvantageEstimate.units`. Applies whichever of these the estimator chooses: the
    baseline `batch`, the scale `batch` or `whiten`. With a group baseline, the scale `batch` measures differences within
    groups, not between easy and hard prompts, because returns are centred first. REINFORCE++ with baseline does the
    same; the code by the authors of Lite PPO uses raw rewards.
    """
    flat = list(chain.from_iterable(groups))
    if not flat:
        return [[] for _ in groups]
    values = np.concatenate([one.values for one in flat])
    if isinstance(estimator, ReturnsAdvantage):
        if estimator.baseline is AdvantageBaseline.batch:
            values = centred(values, np.concatenate([one.peers for one in flat]))
        if estimator.scale is AdvantageScale.batch:
            divisor = spread(values)
            values = values / divisor
            flat = [one.divided(one.values, np.full(len(one.values), divisor)) for one in flat]
    tokens = [one.on_tokens(own) for one, own in zip(flat, _split(values, flat), strict=True)]
    if estimator.whiten if isinstance(estimator, GaeAdvantage) else estimator.scale is AdvantageScale.whiten:
        tokens = _whitened(tokens, [one.of_token >= 0 for one in flat])
    found = iter(tokens)
    return [[next(found) for _ in group] for group in groups]


def custom_batch_advantages(
    groups: Sequence[Sequence[RewardedEpisode]], settings: CustomAdvantage
) -> list[list[tuple[Floats, Floats | None]]]:
    """Return the advantages [seq] of one mini-batch and the targets of a critic [seq], for each group and episode.

    Raises UserError if the estimator fails.
    """
    own = OwnComponent(settings)
    found = own(groups)
    if not isinstance(found, Sequence) or len(found) != len(groups):
        raise own.error(f"returned {described(found)} instead of a list for each of {len(groups)} groups")
    return [_checked(own, one, group) for one, group in zip(found, groups, strict=True)]


def _custom_estimates(episodes: Sequence[RewardedEpisode], settings: CustomAdvantage) -> list[AdvantageEstimate]:
    if MINI_BATCH in settings.needs:
        return [AdvantageEstimate(np.zeros(len(one.turn_of_token)), None, None) for one in episodes]
    own = OwnComponent(settings)
    return [AdvantageEstimate(*found, None) for found in _checked(own, own(episodes), episodes)]


def _checked(
    own: OwnComponent, found: object, episodes: Sequence[RewardedEpisode]
) -> list[tuple[Floats, Floats | None]]:
    """Return the advantages of a group, and the returns of a critic, with 0 where a token is not trained.

    Raises UserError if the estimator's result does not fit the episodes.
    """
    critic = CRITIC in own.settings.needs
    if not isinstance(found, Sequence) or len(found) != len(episodes):
        raise own.error(
            f"returned {described(found)} instead of a list with one entry for each of {len(episodes)} episodes"
        )
    both = []
    for entry, episode in zip(found, episodes, strict=True):
        if critic and not (isinstance(entry, tuple) and len(entry) == 2):
            raise own.error(f"returned {described(entry)} for an episode instead of (advantages, returns)")
        arrays = [_on_trained(own, array, episode) for array in (entry if critic else (entry,))]
        both.append((arrays[0], arrays[1] if critic else None))
    return both


def _on_trained(own: OwnComponent, array: object, episode: RewardedEpisode) -> Floats:
    trained = episode.trained
    if getattr(array, "shape", None) != trained.shape:
        raise own.error(
            f"returned {described(array)} for an episode instead of an array of shape {list(trained.shape)}"
        )
    try:
        values = np.where(trained, np.asarray(array).astype(np.float64, casting="same_kind"), 0.0)
    except (TypeError, RuntimeError) as error:  # RuntimeError: a tensor that requires a gradient.
        raise own.error(f"returned {described(array)} that is no array of real numbers") from error
    if not np.isfinite(values).all():
        raise own.error("returned a value that is not finite at a trained token")
    return values


def _compared(units: Sequence[CreditUnits], estimator: ReturnsAdvantage) -> Sequence[CreditUnits]:
    """Apply the baseline and the scale that need only the prompt group to the units of its episodes."""
    if estimator.baseline not in SIBLINGS:
        return units
    values, peers = (np.concatenate([getattr(one, name) for one in units]) for name in ("values", "peers"))
    divisors = spreads(values, peers) if estimator.scale is AdvantageScale.group else np.ones_like(values)
    leave_one_out = estimator.baseline is AdvantageBaseline.leave_one_out
    values = centred(values, peers, leave_one_out=leave_one_out) / divisors
    both = zip(units, _split(values, units), _split(divisors, units), strict=True)
    return [one.divided(own, divisor) for one, own, divisor in both]


def _refuse_contradictions(estimator: ReturnsAdvantage) -> None:
    if estimator.credit is Credit.token and estimator.baseline is not AdvantageBaseline.none:
        raise ValueError(
            f"algorithm.advantage.credit=token does not work with baseline={estimator.baseline}, because a token has no "
            "counterpart in other episodes: choose baseline none, or credit turn or trajectory."
        )
    if estimator.scale is AdvantageScale.group and estimator.baseline not in SIBLINGS:
        raise ValueError(
            f"algorithm.advantage.scale=group needs a baseline of the group, not baseline={estimator.baseline}: "
            "choose scale batch, whiten or none, or baseline group or leave_one_out."
        )


def _units(episode: RewardedEpisode, estimator: ReturnsAdvantage | GaeAdvantage) -> CreditUnits:
    """Return the units of one episode. Their values are returns, or generalised advantages with a critic."""
    trained = episode.trained
    turns = episode.turn_of_token[trained].astype(np.int64)
    penalties = np.zeros(len(turns)) if episode.penalties is None else episode.penalties[trained]
    rewards = placed(episode.turn_rewards, turns) - penalties
    of_trained, peers = np.arange(len(turns)), np.zeros_like(turns)
    if isinstance(estimator, GaeAdvantage):
        values = generalised_advantages(rewards, _values(episode), estimator.gamma, estimator.gae_lambda)
    elif estimator.credit is Credit.trajectory:
        # Sum the turn rewards: `rewards` is empty for an episode without trained tokens, whose score counts too.
        values = np.array([episode.score])
        of_trained, peers = np.zeros_like(turns), np.zeros(1, dtype=np.int64)
    elif estimator.credit is Credit.turn:
        peers, of_trained = np.unique(turns, return_inverse=True)
        of_turns = np.zeros(len(peers))
        np.add.at(of_turns, of_trained, rewards)
        values = to_go(of_turns, estimator.gamma)
    else:
        values = to_go(rewards, estimator.gamma)
    of_token = np.full(len(trained), -1, dtype=np.int64)
    of_token[trained] = of_trained
    return CreditUnits(values, peers, of_token, episode.offsets)


def _check(episode: RewardedEpisode) -> None:
    turns = episode.turn_of_token[episode.turn_of_token >= 0]
    if not np.isfinite(episode.turn_rewards).all():
        raise ValueError(
            f"An episode's rewards must be finite, got {list(episode.turn_rewards)}: check the reward function."
        )
    if (np.diff(turns) < 0).any() or (turns >= len(episode.turn_rewards)).any():
        raise ValueError(
            f"turn_of_token must not decrease and must stay below {len(episode.turn_rewards)}, the episode's number of "
            f"turn rewards; it has turns {np.unique(turns).tolist()}: check turn_of_token."
        )
    for name in ("penalties", "values", "offsets"):
        given = getattr(episode, name)
        if given is None:
            continue
        if given.shape != episode.turn_of_token.shape:
            raise ValueError(
                f"An episode's {name} must be aligned with its {len(episode.turn_of_token)} tokens, got {given.shape}."
            )
        if not np.isfinite(given[episode.turn_of_token >= 0]).all():
            raise ValueError(f"An episode's {name} must be finite on trained tokens: check their source.")


def _values(episode: RewardedEpisode) -> Floats:
    """Return the critic's values [trained]. Raises ValueError if the episode has none."""
    if episode.values is None:
        raise ValueError(
            "algorithm.advantage.kind=gae needs values, but an episode has none: score it with the critic."
        )
    return episode.values[episode.turn_of_token >= 0].astype(np.float64)


def _whitened(tokens: Sequence[Floats], masks: Sequence[NDArray[np.bool_]]) -> list[Floats]:
    """Return the advantages [seq] of each episode, whitened over all tokens in `masks`; other tokens keep their 0."""
    every, mask = np.concatenate(tokens), np.concatenate(masks)
    every[mask] = whitened(every[mask])
    return np.split(every, np.cumsum([len(own) for own in tokens])[:-1])


def _split(values: Floats, episodes: Sequence[CreditUnits]) -> list[Floats]:
    """Split `values` [all units] by episode."""
    return np.split(values, np.cumsum([len(one.values) for one in episodes])[:-1])


def placed(turn_rewards: Sequence[float], turns: Ints) -> Floats:
    """Place each turn's reward on the last trained token of the turn: [turns] -> [trained].

    `turns` [trained] is the turn of each trained token, in order. A turn without trained tokens places its reward on
    the nearest trained token before it, else on the first trained token after it. The sum is preserved unless no token
    is trained.

        rewards 1, 2, 4; turns 0 0 2   ->   0 3 4
    """
    rewards = np.zeros(len(turns))
    if len(turns):
        # For each turn: index of the last token that belongs to this turn or an earlier turn.
        ends = np.searchsorted(turns, np.arange(len(turn_rewards)), side="right") - 1
        np.add.at(rewards, ends.clip(min=0), np.asarray(turn_rewards, dtype=np.float64))
    return rewards


def to_go(rewards: Floats, discount: float) -> Floats:
    """Return the discounted sums G_t = r_t + discount G_{t+1}, with G = 0 after the last reward: [n] -> [n]."""
    backwards = accumulate(reversed(rewards.tolist()), lambda later, now: now + discount * later)
    return np.array(list(backwards), dtype=np.float64)[::-1]


def generalised_advantages(rewards: Floats, values: Floats, gamma: float, gae_lambda: float) -> Floats:
    """Return generalised advantage estimates (arXiv 1506.02438) [trained] from rewards and values [trained].

    A_t = d_t + gamma lambda A_{t+1} with d_t = r_t + gamma V_{t+1} - V_t. The value after the last trained token is 0,
    also for a truncated episode, which earns no further reward.
    """
    following = np.append(values[1:], 0.0)[: len(values)]
    return to_go(rewards + gamma * following - values, gamma * gae_lambda)


def centred(values: Floats, peers: Ints, *, leave_one_out: bool = False) -> Floats:
    """Subtract from each value the mean of its peers: the values with the same number in `peers`.

    Both arrays and the result are [n]. With `leave_one_out` the mean excludes the value itself (RLOO, arXiv
    2402.14740): x - mean(others) = (x - mean(all)) n / (n - 1).
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
    """Return for each value the `spread` of its peers: the values with the same number in `peers`.

    Both arrays and the result are [n].
    """
    found = np.ones_like(values)
    for peer in np.unique(peers):
        among = peers == peer
        found[among] = spread(values[among])
    return found


def spread(values: Floats) -> float:
    """Return the sample standard deviation of `values`, plus EPS; 1 if all values are equal up to rounding."""
    return float(values.std(ddof=1)) + EPS if _differ(values) else 1.0


def whitened(values: Floats) -> Floats:
    """Return (x - mean) / (std + EPS) for each x of `values` [n]; zeros if all values are equal up to rounding.

    Source: REINFORCE++ (arXiv 2501.03262) and PPO implementations, which differ in details. veRL and TRL (Search-R1
    follows them) also use the sample standard deviation; OpenRLHF uses the population standard deviation. All three
    keep the variance away from 0 by 1e-8 instead of adding EPS.
    """
    return _deviations(values) / spread(values)


def _deviations(values: Floats) -> Floats:
    return values - values.mean() if _differ(values) else np.zeros_like(values)


def _differ(values: Floats) -> bool:
    return bool(values.size) and bool(np.ptp(values) > ROUNDING * np.abs(values).max())
