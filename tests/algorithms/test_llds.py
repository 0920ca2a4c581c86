"""Tests of the measure of lazy likelihood displacement and of its remedy, by hand."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlsys.algorithms.losses import DIVISOR, policy_loss, reduce_stats
from rlsys.config.algorithm import Aggregation, AlgorithmConfig, LldsConfig, LldsGate, PpoLoss
from tests.algorithms.loss_reference import Episode, Flat, Token, episodes

CLIPPED = AlgorithmConfig(policy_loss=PpoLoss(clip_high=0.28), kl_coef=0.0)


def with_llds(gate: LldsGate, **settings: object) -> AlgorithmConfig:
    return replace(CLIPPED, llds=LldsConfig(0.5, gate), **settings)  # type: ignore[arg-type]


def computed(config: AlgorithmConfig, flat: Flat) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted sum and statistics; the leaves of `flat` get its gradients."""
    total, stats = policy_loss(config)(flat.logprobs, None, flat.inputs)
    total.backward()
    return total.detach(), stats


def changed(*turns: tuple[float, ...], advantage: float) -> Episode:
    """An episode whose trained tokens have these changes of their log-prob; an observation follows each turn."""
    episode = [Token(False)]
    for turn in turns:
        episode += [Token(True, -2.0 + change, -2.0, -2.0, 0.0, advantage) for change in turn]
        episode += [Token(False)]
    return episode


HAND = (
    # The first turn falls by 0.3 in total, the second rises by 0.5, so the episode rises.
    changed((-0.5, 0.2), (-0.25, 0.75), advantage=1.0),
    # One turn rises by 0.1, the other falls by 0.2: the episode falls.
    changed((-0.125, 0.225), (-0.3, 0.1), advantage=0.0),
    changed((-1.0,), (-2.0,), advantage=-1.0),
)
PENALISED = {
    LldsGate.turn: [0.5, 0, 0, 0, 0, 0, 0.3, 0, 0, 0],
    LldsGate.trajectory: [0, 0, 0, 0, 0.125, 0, 0.3, 0, 0, 0],
    LldsGate.token: [0.5, 0, 0.25, 0, 0.125, 0, 0.3, 0, 0, 0],
}
"""Penalty of each of the ten trained tokens of `HAND`."""


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("gate", [*LldsGate])
def test_penalty_and_its_gradient_by_hand(gate: LldsGate, packed: bool) -> None:
    """A penalised token is pushed up with the weight of the penalty, all others as without it."""
    plain, found = Flat(CLIPPED, HAND, packed), Flat(CLIPPED, HAND, packed)
    without, _ = computed(CLIPPED, plain)
    loss, stats = computed(with_llds(gate), found)
    penalties = PENALISED[gate]
    assert float(stats["llds_loss"]) == pytest.approx(sum(penalties))
    assert float(loss - without) == pytest.approx(0.5 * sum(penalties))
    slopes = zip(found.trained(found.logprobs.grad), plain.trained(plain.logprobs.grad), strict=True)
    pushed = [own - other for own, other in slopes]
    assert pushed == pytest.approx([-0.5 if penalty else 0.0 for penalty in penalties], abs=1e-15)


@pytest.mark.parametrize("gate", [*LldsGate])
def test_splits_into_micro_batches_change_nothing(gate: LldsGate) -> None:
    config = with_llds(gate, aggregation=Aggregation("seq-mean-token-mean"))
    batch = episodes(seed=3, count=10)
    whole = Flat(config, batch)
    total, stats = computed(config, whole)
    parts = [Flat(config, part, packed) for part, packed in ((batch[:3], True), (batch[3:4], False), (batch[4:], True))]
    found = [computed(config, part) for part in parts]
    assert float(sum(one for one, _ in found)) == pytest.approx(float(total), rel=1e-12)
    assert [slope for part in parts for slope in part.trained(part.logprobs.grad)] == whole.trained(whole.logprobs.grad)
    joined = reduce_stats([{**one, DIVISOR: 4} for _, one in found])
    assert joined == pytest.approx(reduce_stats([{**stats, DIVISOR: 12}]), rel=1e-12)
    assert {"correct_logprob", "correct_change", "correct_displaced", "llds_loss"} < joined.keys()


@pytest.mark.parametrize("gate", [*LldsGate])
def test_equal_policies_have_no_penalty_and_no_gradient_of_it(gate: LldsGate) -> None:
    """The first update of a step is that of the loss alone, to the bit."""
    batch = [[replace(token, logprob=token.old) for token in one] for one in episodes(seed=5)]
    plain, found = Flat(CLIPPED, batch), Flat(CLIPPED, batch)
    assert torch.equal(computed(CLIPPED, plain)[0], computed(with_llds(gate), found)[0])
    assert plain.trained(plain.logprobs.grad) == found.trained(found.logprobs.grad)


def test_token_that_a_correction_drops_from_a_bad_episode_is_not_penalised() -> None:
    """Its advantage is multiplied by 0; a good episode's dropped token, and one without a signal, are penalised."""
    for advantage, count in ((-0.0, 0), (0.0, 1)):
        _, stats = computed(with_llds(LldsGate.turn), Flat(CLIPPED, [changed((-0.5,), advantage=advantage)]))
        assert float(stats["llds_loss"]) == 0.5 * count


def test_measure_by_hand() -> None:
    """Changes of +0.05 and -0.25 a token in the correct episodes; the others do not count."""
    batch = [*HAND, changed((-0.5,), (0.0,), advantage=2.0)]
    _, stats = computed(CLIPPED, Flat(CLIPPED, batch, packed=True))
    found = reduce_stats([{**stats, DIVISOR: 1}])
    assert {name: value for name, value in found.items() if name.startswith("correct")} == pytest.approx(
        {"correct_logprob": -2.1, "correct_change": -0.1, "correct_displaced": 0.5}
    )


def test_updates_without_a_correct_episode_have_no_measure() -> None:
    """A guard must not read 0 / 0 as a sign of collapse."""
    _, stats = computed(CLIPPED, Flat(CLIPPED, HAND[1:]))
    assert stats["correct"] == 0
    assert not any(name.startswith("correct") for name in reduce_stats([{**stats, DIVISOR: 1}]))
