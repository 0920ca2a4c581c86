"""Tests of every policy loss: by hand, against its formula by finite differences, with extreme ratios and NaN."""

import math
from dataclasses import fields, replace
from inspect import signature
from itertools import cycle
from typing import Any, get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlsys.algorithms.losses import (
    DIVISOR,
    POLICY_LOSSES,
    LossInputs,
    divisor,
    policy_loss,
    reduce_stats,
    sequence_ratios,
)
from rlsys.config.algorithm import (
    Aggregation,
    AlgorithmConfig,
    FullKl,
    KlPlace,
    LldsConfig,
    LldsGate,
    PpoLoss,
    SampledKl,
)
from rlsys.config.schema import variants
from tests.algorithms.loss_reference import (
    LOSS_LENGTH,
    NAN,
    Episode,
    Flat,
    episodes,
    numeric_gradient,
    poisoned,
    reference_loss,
)

INF = math.inf
KINDS = variants(get_type_hints(AlgorithmConfig)["policy_loss"])
"""Policy losses of the schema by kind."""
CLIPS = {"clip_low": 0.2, "clip_high": 0.28}
LOSSES = [
    loss(**{key: value for key, value in CLIPS.items() if key in get_type_hints(loss)}) for loss in KINDS.values()
]
ESTIMATORS = [SampledKl(name) for name in ("k2", "k3", "k3++", "k4", "k5", "abs")]
CONFIG = AlgorithmConfig(policy_loss=PpoLoss(clip_high=0.28), kl_coef=0.05, entropy_coef=0.01)
GSPO = next(loss for loss in LOSSES if loss.kind == "gspo")


def inputs_of(**columns: list[float]) -> LossInputs:
    """A row of one sequence, whose tokens are all trained and have weight 1."""
    rows: dict[str, Any] = {name: torch.tensor([values]) for name, values in columns.items()}
    shape = rows["advantages"].shape
    return LossInputs(
        **{"ref_logprobs": None, **rows},
        mask=torch.ones(shape, dtype=torch.bool),
        weights=torch.ones(shape),
        sequences=torch.zeros(shape, dtype=torch.int64),
    )


def run(config: AlgorithmConfig, batch: list[Episode], packed: bool = False) -> tuple[Flat, float, dict]:
    """Loss and statistics of a mini-batch in one micro-batch; the returned leaves hold the gradients."""
    flat = Flat(config, batch, packed)
    total, stats = policy_loss(config)(flat.logprobs, flat.entropy, flat.inputs)
    loss = total / divisor(config.aggregation, flat.lengths, LOSS_LENGTH)
    loss.backward()
    return flat, float(loss.detach()), stats


def test_every_policy_loss_of_the_schema_has_a_function_with_its_keys() -> None:
    assert set(KINDS) == set(POLICY_LOSSES)
    for kind, loss in KINDS.items():
        keys = {item.name for item in fields(loss)} - {"kind"}
        parameters = signature(POLICY_LOSSES[kind]).parameters.values()
        assert {one.name for one in parameters if one.kind is one.KEYWORD_ONLY} == keys, kind


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual", "loss", "gradient", "met"),
    [
        (1.1, 2.0, None, -2.2, -2.2, None),
        (1.5, 2.0, None, -2.56, 0.0, "clip_fraction_high"),
        (0.5, 2.0, None, -1.0, -1.0, None),
        (0.5, -2.0, None, 1.6, 0.0, "clip_fraction_low"),
        (1.5, -2.0, None, 3.0, 3.0, None),
        (5.0, -2.0, None, 10.0, 10.0, None),
        (5.0, -2.0, 3.0, 6.0, 0.0, "dual_clip_fraction"),
        (2.0, -2.0, 3.0, 4.0, 4.0, None),
        (0.5, -2.0, 3.0, 1.6, 0.0, "clip_fraction_low"),
        (5.0, 2.0, 3.0, -2.56, 0.0, "clip_fraction_high"),
        (5.0, 0.0, 3.0, 0.0, 0.0, None),
    ],
)
def test_clipped_token_by_hand(
    ratio: float, advantage: float, dual: float | None, loss: float, gradient: float, met: str | None
) -> None:
    config = replace(CONFIG, kl_coef=0.0, entropy_coef=0.0, policy_loss=PpoLoss(clip_high=0.28, dual_clip=dual))
    logprobs = torch.tensor([[ratio / 4]]).log().requires_grad_()
    found, stats = policy_loss(config)(logprobs, None, inputs_of(old_logprobs=[math.log(0.25)], advantages=[advantage]))
    (slope,) = torch.autograd.grad(found, logprobs)
    assert (float(found.detach()), float(slope)) == (pytest.approx(loss, rel=1e-5), pytest.approx(gradient, rel=1e-5))
    bounds = ["clip_fraction_low", "clip_fraction_high", "dual_clip_fraction"]
    assert [name for name in bounds if stats[name]] == ([met] if met else [])
    assert stats["clip_fraction"] == stats["clip_fraction_low"] + stats["clip_fraction_high"]
    assert stats["ratio_max"] == stats["ratio_min"] == pytest.approx(ratio)


def test_tokens_of_a_sequence_share_its_ratio_exactly() -> None:
    """Two sequences and padding in one row, in float32, near GSPO's published bounds of 3e-4."""
    draw = torch.Generator().manual_seed(0)
    old = -30 * torch.rand(1, 9, generator=draw)
    logprobs = old + 1e-3 * torch.randn(1, 9, generator=draw)
    mask = torch.tensor([[False, True, True, False, True, True, True, True, False]])
    sequences = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, -1]])
    ratios = sequence_ratios(logprobs, old, mask, sequences)
    for number in (0, 1):
        mine = mask & (sequences == number)
        mean = (logprobs - old).double()[mine].mean()
        assert len(set(ratios[mine].tolist())) == 1
        torch.testing.assert_close(ratios[mine][0].double(), mean.exp(), rtol=3e-7, atol=0)
    assert ratios[~mask].tolist() == [1.0, 1.0, 1.0]


def test_all_terms_of_one_token_by_hand() -> None:
    # ratio 1.5 with advantage 2: clipped to 1.28 -> -2.56. k3 with w = 0.5: 0.5 - 1 + ln 2.
    inputs = inputs_of(old_logprobs=[math.log(0.4)], ref_logprobs=[math.log(0.3)], advantages=[2.0])
    loss, stats = policy_loss(CONFIG)(torch.tensor([[0.6]]).log(), torch.tensor([[0.9]]), inputs)
    k3 = math.log(2) - 0.5
    assert float(loss) == pytest.approx(-2.56 + 0.05 * k3 - 0.01 * 0.9, rel=1e-5)
    assert {name: float(value) for name, value in stats.items()} == pytest.approx(
        {
            "tokens": 1,
            "ratio": 1.5,
            "ratio_max": 1.5,
            "ratio_min": 1.5,
            "ratio_dev_max": 0.5,
            "clip_fraction": 1,
            "clip_fraction_low": 0,
            "clip_fraction_high": 1,
            "dual_clip_fraction": 0,
            "approx_kl": 0.5 - math.log(1.5),
            "correct": 1,
            "correct_logprob": math.log(0.6),
            "correct_change": math.log(1.5),
            "correct_displaced": 0,
            "policy_loss": -2.56,
            "kl_loss": k3,
            "kl": k3,
            "entropy": 0.9,
        },
        rel=1e-5,
    )


@pytest.mark.parametrize(
    ("kind", "aggregation", "packed", "gate"),
    list(zip(LOSSES, cycle(Aggregation), cycle((False, True)), cycle([None, *LldsGate]), strict=False)),
)
def test_loss_and_gradient_equal_the_formula(
    kind: Any, aggregation: Aggregation, packed: bool, gate: LldsGate | None
) -> None:
    """The gradient is compared with finite differences in which values and gates behind stop-gradients do not change."""
    dual = isinstance(kind, PpoLoss)
    loss = replace(kind, dual_clip=1.3) if isinstance(kind, PpoLoss) else kind
    config = replace(CONFIG, policy_loss=loss, aggregation=aggregation, kl_coef=0.3)
    if packed:
        config = replace(config, use_kl_iw=True, kl_iw_clip_lower=0.9, kl_iw_clip_upper=1.1)
    if gate is not None:
        config = replace(config, llds=LldsConfig(0.5, gate))
    batch = episodes(seed=1, count=12)
    flat, loss, stats = run(config, batch, packed)
    assert gate is None or stats["llds_loss"] > 0
    met = ["clip_fraction_low", "clip_fraction_high"] if kind.kind in ("ppo", "gspo") else []
    met += ["dual_clip_fraction"] if dual else []
    assert all(0 < stats[name] < stats["tokens"] / 2 for name in met), "every bound must apply to some tokens"
    assert loss == pytest.approx(reference_loss(config, batch), rel=1e-12)
    for name, leaf in (("logprob", flat.logprobs), ("entropy", flat.entropy)):
        numeric = numeric_gradient(lambda moved: reference_loss(config, moved, held=batch), batch, name)
        assert flat.trained(leaf.grad) == pytest.approx(numeric, rel=1e-6, abs=1e-9)


def at_random(config: AlgorithmConfig) -> tuple[Tensor, Tensor, LossInputs]:
    """Inputs of one padded, random micro-batch."""
    flat = Flat(config, episodes(seed=7))
    return flat.logprobs, flat.entropy, replace(flat.inputs, divergence=flat.inputs.ref_logprobs)


@pytest.mark.parametrize(
    ("kind", "estimator", "poison"),
    list(zip(cycle(LOSSES), [*ESTIMATORS, FullKl()], cycle([NAN, INF, -INF]), strict=False)),
)
def test_masked_tokens_are_ignored_whatever_they_hold(estimator: Any, kind: Any, poison: float) -> None:
    config = replace(CONFIG, policy_loss=kind, kl_estimator=estimator, use_kl_iw=True, llds=LldsConfig(coef=0.2))

    def result(fill: float) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        logprobs, entropy, inputs = at_random(config)
        inputs = poisoned(inputs, fill)
        if estimator in ESTIMATORS:
            inputs = replace(inputs, divergence=None)
        leaves = [one.detach().masked_fill(~inputs.mask, fill).requires_grad_() for one in (logprobs, entropy)]
        loss, stats = policy_loss(config)(*leaves, inputs)
        gradients = list(torch.autograd.grad(loss, leaves))
        assert all(not one[~inputs.mask].any() for one in gradients)
        return loss, gradients, stats

    clean, dirty = result(0.5), result(poison)
    assert torch.equal(clean[0], dirty[0])
    assert all(torch.equal(*pair) for pair in zip(clean[1], dirty[1], strict=True))
    assert clean[2] == dirty[2]


@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "ref_logprobs", "advantages", "entropy"])
def test_nan_in_a_trained_token_reaches_the_loss(name: str) -> None:
    logprobs, entropy, inputs = at_random(replace(CONFIG, policy_loss=GSPO))
    inputs = replace(inputs, divergence=None)
    broken = {"logprobs": logprobs, "entropy": entropy}
    values = (broken[name] if name in broken else getattr(inputs, name)).detach().clone()
    values[tuple(inputs.mask.nonzero()[3].tolist())] = NAN
    if name in broken:
        broken[name] = values
    else:
        inputs = replace(inputs, **{name: values})
    loss, stats = policy_loss(replace(CONFIG, policy_loss=GSPO))(*broken.values(), inputs)
    assert loss.isnan()
    if name in ("logprobs", "old_logprobs"):
        parts = [{**stats, DIVISOR: 1}, {"tokens": 1.0, "ratio_max": 1.0, "ratio_min": 1.0}]
        for order in (parts, parts[::-1]):
            reduced = reduce_stats(order)
            assert math.isnan(reduced["ratio_max"])
            assert math.isnan(reduced["ratio_min"])


@pytest.mark.parametrize(("kind", "shape"), [(LOSSES[0], (0, 5)), (GSPO, (0, 0)), (GSPO, (2, 5))])
def test_loss_without_trained_tokens_is_zero_and_backpropagates(kind: Any, shape: tuple[int, int]) -> None:
    logprobs, other = torch.full(shape, NAN).requires_grad_(), torch.full(shape, NAN)
    mask, sequences = torch.zeros(shape, dtype=torch.bool), torch.full(shape, -1)
    loss, stats = policy_loss(replace(CONFIG, policy_loss=kind))(
        logprobs, other, LossInputs(other, other, other, mask, other, sequences)
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert not gradient.any()
    assert float(loss) == int(stats["tokens"]) == 0
    # The empty micro-batch does not change the statistics of a micro-batch that has trained tokens.
    full = policy_loss(replace(CONFIG, policy_loss=kind))(*at_random(CONFIG))[1]
    parts = [{**stats, DIVISOR: 0}, {**full, DIVISOR: 3}]
    assert reduce_stats(parts) == reduce_stats(parts[1:])


@settings(max_examples=40)
@given(
    kind=st.sampled_from(LOSSES),
    estimator=st.sampled_from(ESTIMATORS),
    weighted=st.booleans(),
    far=st.lists(st.sampled_from([-1e3, -20.0, 0.0, 20.0, 1e3]), min_size=1, max_size=4),
    advantage=st.sampled_from([-1.0, 0.0, 1.0]),
)
def test_distant_policies_do_not_overflow(
    kind: Any, estimator: SampledKl, weighted: bool, far: list[float], advantage: float
) -> None:
    llds = LldsConfig(0.2, LldsGate.trajectory)
    config = replace(CONFIG, policy_loss=kind, kl_estimator=estimator, use_kl_iw=weighted, llds=llds)
    logprobs = torch.full((1, len(far)), -1.5, requires_grad=True)
    old, ref = ([-1.5 + sign * ratio for ratio in far] for sign in (-1, 1))
    inputs = inputs_of(old_logprobs=old, ref_logprobs=ref, advantages=[advantage] * len(far))
    loss, stats = policy_loss(config)(logprobs, torch.zeros_like(logprobs), inputs)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert all(value.isfinite().all() for value in (loss, gradient, *stats.values()))


def test_given_divergence_is_the_kl_term_and_gets_its_gradient() -> None:
    config = replace(CONFIG, kl_estimator=FullKl(), use_kl_iw=True)
    logprobs, entropy, inputs = at_random(config)
    kl = torch.rand(logprobs.shape, dtype=torch.float64).requires_grad_()
    loss, stats = policy_loss(config)(logprobs, entropy, replace(inputs, divergence=kl))
    without, _ = policy_loss(replace(config, kl_coef=0.0))(logprobs, entropy, inputs)
    weights = inputs.weights.masked_fill(~inputs.mask, 0.0)
    torch.testing.assert_close(loss - without, 0.05 * (weights * kl).sum())
    torch.testing.assert_close(torch.autograd.grad(loss, kl)[0], 0.05 * weights)
    assert float(stats["kl"]) == pytest.approx(float(kl.detach()[inputs.mask].sum()))


def test_kl_in_the_reward_is_only_a_statistic() -> None:
    config = replace(CONFIG, kl_in=KlPlace.reward, kl_estimator=SampledKl("k1"), entropy_coef=0.0)
    logprobs, _, inputs = at_random(config)
    inputs = replace(inputs, divergence=None)
    loss, stats = policy_loss(config)(logprobs, None, inputs)
    assert torch.equal(loss.detach(), stats["policy_loss"])
    assert {"kl_loss", "entropy"}.isdisjoint(stats)
    assert inputs.ref_logprobs is not None
    k1 = (logprobs.detach() - inputs.ref_logprobs)[inputs.mask].sum()
    assert float(stats["kl"]) == pytest.approx(float(k1)) != 0
    bare = policy_loss(config)(logprobs, None, replace(inputs, ref_logprobs=None))[1]
    assert not any(name.startswith("kl") for name in bare)


def test_loss_term_without_its_input_is_refused() -> None:
    logprobs, entropy, inputs = at_random(CONFIG)
    bare = replace(inputs, ref_logprobs=None, divergence=None)
    with pytest.raises(ValueError, match="kl_coef"):
        policy_loss(CONFIG)(logprobs, entropy, bare)
    with pytest.raises(ValueError, match="entropy_coef"):
        policy_loss(CONFIG)(logprobs, None, inputs)
    full = replace(CONFIG, kl_estimator=FullKl("full_forward"))
    with pytest.raises(ValueError, match="full_forward"):
        policy_loss(full)(logprobs, entropy, replace(inputs, divergence=None))
    with pytest.raises(ValueError, match="turns"):
        policy_loss(replace(CONFIG, llds=LldsConfig(coef=0.2)))(logprobs, entropy, replace(inputs, turns=None))
    with pytest.raises(ValueError, match="divisor"):
        reduce_stats([{"tokens": 1.0, "policy_loss": 1.0}])


def test_statistics_are_reduced_over_unequal_parts() -> None:
    parts = [
        {"tokens": 1.0, "divisor": 1, "entropy": 4.0, "policy_loss": 6.0, "ratio_max": 1.1, "ratio_min": 0.9},
        {"tokens": 3.0, "divisor": 2, "entropy": 0.0, "policy_loss": 0.0, "ratio_max": 1.3, "ratio_min": 0.8},
    ]
    means = {"tokens": 4.0, "entropy": 1.0, "policy_loss": 2.0, "ratio_max": 1.3, "ratio_min": 0.8}
    assert reduce_stats(parts) == reduce_stats(parts[::-1]) == means
    assert reduce_stats([]) == {"tokens": 0.0}
