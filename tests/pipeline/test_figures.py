"""The figures of a step, worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rlsys.agent.trajectory import Action, Finish, Turn
from rlsys.config.schema import CorrectionLevel
from rlsys.pipeline.figures import correction_figures, staleness_figures, step_figures
from rlsys.pipeline.group import Group, Sample
from tests.pipeline.build import question, trajectory

SEARCH = Turn("a", Action.SEARCH, "q", "found", 6, 10, 4, 0.1, 0.5)
FAILED = Turn("b", Action.SEARCH, "q", "failed", 2, 20, 16, 0.1, 1.5, search_error="timeout")
INVALID = Turn("c", Action.INVALID, "", "no", 3, 30, 10, 0.1, 0.0)
ANSWER = Turn("d", Action.ANSWER, "yes", "", 1, 40, 0, 0.1, 0.0)

RIGHT = trajectory(range(10), turns=[SEARCH, FAILED, ANSWER], rollout_logprobs=[np.nan] + [-1.0] * 9)
WRONG = trajectory(range(4), turns=[INVALID], finish=Finish.TURN_LIMIT, tokens_differing=2)
GROUPS = [
    Group(
        question(1),
        (
            Sample(RIGHT, 1.0, 0.7, old_logprobs=np.array([0.0] + [-1.0] * 8 + [-1.25], dtype=np.float32)),
            # Its tokens changed on the way, so its log-probs have nothing to be compared with.
            Sample(WRONG, 0.0, -0.7, old_logprobs=np.full(4, -9.0, dtype=np.float32)),
        ),
    ),
    Group(question(2), (Sample(WRONG, 0.0, 0.0), Sample(replace(WRONG, finish=Finish.ABORTED), 0.0, 0.0))),
]


def test_every_figure_by_hand() -> None:
    assert step_figures(GROUPS) == {
        "reward/mean": 0.25,
        "reward/groups_without_spread": 0.5,
        "rollout/episodes": 4,
        "rollout/generated_tokens": 6 + 2 + 1 + 3 * 3,
        "rollout/trained_tokens": 9 + 3 * 3,
        "rollout/tokens_mean": (10 + 3 * 4) / 4,
        "rollout/turns_mean": 6 / 4,
        "rollout/searches_mean": 2 / 4,
        "rollout/search_errors": 1,
        "rollout/search_s_mean": 1.0,
        "rollout/invalid_share": 3 / 6,
        "rollout/finished_share": 1 / 4,
        "rollout/aborted": 1,
        "rollout/cached_prompt_share": pytest.approx((4 + 16 + 0 + 3 * 10) / (10 + 20 + 40 + 3 * 30)),
        "tokens/differing": 6,
        "tokens/differing_share": pytest.approx(6 / 18),
        "logprob/max_diff": 0.25,
    }


def with_versions(versions: Sequence[int], mask: Sequence[bool] | None = None) -> Sample:
    """A sample of tokens that these versions sampled; all but the first are trained unless `mask` says."""
    one = trajectory(range(len(versions)), mask)
    return Sample(replace(one, versions=np.array(versions, dtype=np.int32)), 0.0, 0.0)


def test_the_age_of_every_trained_token_by_hand() -> None:
    groups = [
        # An episode that went on through an update, ended by a token that nothing sampled.
        Group(question(1), (with_versions([-1, 5, 5, 7, -1]),)),
        # A version on a token that is not trained counts for nothing.
        Group(question(2), (with_versions([-1, 2, 7, 4], [False, False, True, True]),)),
    ]
    assert staleness_figures(groups, version=7) == {
        "staleness/lag_0": 2 / 5,
        "staleness/lag_1": 0,
        "staleness/lag_2": 2 / 5,
        "staleness/lag_3": 1 / 5,
        "staleness/max": 3,
        "staleness/mean": pytest.approx((0 + 2 + 2 + 0 + 3) / 5),
        "staleness/unversioned_tokens": 1,
    }


def test_tokens_without_any_version_have_no_age() -> None:
    assert staleness_figures([Group(question(1), (with_versions([-1, -1]),))], version=3) == {
        "staleness/lag_0": 0,
        "staleness/max": 0,
        "staleness/mean": 0,
        "staleness/unversioned_tokens": 1,
    }


def test_a_token_cannot_come_from_the_future() -> None:
    with pytest.raises(ValueError, match="version 4 cannot be trained on by version 3"):
        staleness_figures([Group(question(1), (with_versions([-1, 4]),))], version=3)


def test_log_probs_are_compared_where_one_policy_gave_both() -> None:
    late = replace(RIGHT, versions=np.array([-1] + [3] * 5 + [4] * 4, dtype=np.int32))
    old = np.array([0.0] + [-1.5] * 5 + [-1.0] * 3 + [-1.25], dtype=np.float32)
    groups = [Group(question(1), (Sample(late, 1.0, 0.0, old_logprobs=old),))]
    assert step_figures(groups, version=4)["logprob/max_diff"] == 0.25
    assert step_figures(groups, version=5)["logprob/max_diff"] == 0.0
    assert step_figures(groups)["logprob/max_diff"] == 0.5


def weighed(old: Sequence[float], rollout: Sequence[float], weights: Sequence[float] | None) -> Sample:
    """A sample with the probabilities given; all tokens but the first are trained."""
    one = trajectory(range(len(old)), rollout_logprobs=np.log(rollout).tolist())
    given = None if weights is None else np.array(weights, dtype=np.float32)
    return Sample(one, 0.0, 0.0, np.log(old).astype(np.float32), None, given)


def test_what_token_weights_did_by_hand() -> None:
    groups = [
        # Ratios 1.5 and 3, the second cut to 2.
        Group(question(1), (weighed([0.9, 0.6, 0.6], [0.1, 0.4, 0.2], [1, 1.5, 2]),)),
        # Ratio 0.25, and a token that nothing sampled; a sample without weights counts for nothing.
        Group(
            question(2),
            (weighed([0.9, 0.1, 0.5], [0.1, 0.4, np.nan], [1, 0.25, 1]), weighed([0.9], [0.1], None)),
        ),
    ]
    assert correction_figures(groups, CorrectionLevel.token) == pytest.approx(
        {
            "correction/ess": 3.75**2 / (3 * (2.25 + 4 + 0.0625)),
            "correction/clipped_share": 1 / 3,
            "correction/cut_mass": 1 / 4.75,
            "correction/uncorrected_share": 1 / 4,
            "correction/abs_log_ratio": math.log(1.5 * 3 * 4) / 3,
            "correction/kl_k1": -math.log(1.5 * 3 / 4) / 3,
            "correction/kl_k3": (0.5 + 2 - 0.75 - math.log(1.5 * 3 / 4)) / 3,
        },
        rel=1e-5,
    )


def test_sequence_weights_are_compared_with_the_sequences_ratio() -> None:
    # Ratios 1.5 and 3: 4.5 together, cut to 2.
    groups = [Group(question(1), (weighed([0.9, 0.6, 0.6], [0.1, 0.4, 0.2], [1, 2, 2]),))]
    figures = correction_figures(groups, CorrectionLevel.sequence)
    assert figures["correction/clipped_share"] == 1
    assert figures["correction/ess"] == 1
    assert figures["correction/cut_mass"] == pytest.approx(5 / 9, rel=1e-6)


def test_without_weights_there_are_no_correction_figures() -> None:
    assert correction_figures(GROUPS, CorrectionLevel.token) == {}


@pytest.mark.parametrize("level", [None, CorrectionLevel.token])
def test_a_step_has_the_figures_that_it_is_asked_for(level: CorrectionLevel | None) -> None:
    groups = [Group(question(1), (weighed([0.9, 0.6], [0.1, 0.4], [1, 1.5]),))]
    figures = step_figures(groups, version=2, level=level)
    staleness = staleness_figures(groups, 2)
    assert figures.items() >= staleness.items()
    assert staleness["staleness/lag_2"] == 1
    found = {key: value for key, value in figures.items() if key.startswith("correction/")}
    assert found == (correction_figures(groups, level) if level else {})
    assert all(isinstance(value, int | float) for value in figures.values()), "trackers leave others out"
