"""The figures of a step and the judgement of a group, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlsys.agent.trajectory import Action, Finish, Trajectory, Turn
from rlsys.data.question import Question
from rlsys.pipeline.figures import step_figures
from rlsys.pipeline.group import Group, Sample
from rlsys.pipeline.grouping import judge
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


def test_a_group_is_judged_by_its_own_mean_and_spread() -> None:
    asked = Question("q:1", "?", ("Yes",))

    def answering(text: str) -> Trajectory:
        return trajectory(turns=[replace(ANSWER, content=text)])

    group = judge(asked, [answering("yes"), answering("no"), answering("no"), answering("no")], True)
    assert [sample.reward for sample in group.samples] == [1, 0, 0, 0]
    # Mean 1/4; sample standard deviation sqrt((9/16 + 3/16) / 3) = 1/2.
    assert [sample.advantage for sample in group.samples] == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert group.tokens == 8
    centred = judge(asked, [answering("yes"), answering("no")], False)
    assert [sample.advantage for sample in centred.samples] == [0.5, -0.5]
    alike = judge(asked, [answering("no"), answering("no")], True)
    assert [sample.advantage for sample in alike.samples] == [0, 0]
