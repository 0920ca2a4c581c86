"""Tests of the exhaustive search: small scopes, hangs of other systems, and the search itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from bench.check_scheduler import SCOPES, check
from rlsys.apps.planner.virtual_time import HangError
from rlsys.orchestrator.pipeline.rollout_pipeline import RolloutPipeline
from rlsys.orchestrator.supervisor import Supervisor
from rlsys.orchestrator.weight_sync import WeightSync
from tests.orchestrator.pipeline.exhaustive import END, Graph, Scope, Search, explore
from tests.orchestrator.pipeline.fingerprint import Fingerprint
from tests.orchestrator.pipeline.museum import MUSEUM, Exhibit, search
from tests.orchestrator.pipeline.watched import Breach

SMALL = (
    "on-policy, 2 steps of 2 groups",
    "on-policy, 1 step of 2 groups, no spread",
    "on-policy, 2 steps of 1 group, 2 crashes, slow aborts",
    "on-policy, 2 steps of 1 group, resume",
    "on-policy, 2 steps of 1 group, every turn",
    "colocated, 2 steps of 2 groups",
    "staleness 1, 2 steps of 1 group",
    "engine pool, 1 engine, 1 step of 1 group, 2 crashes, 2 restarts",
)
"""Scopes of the default suite: a few seconds together."""


@pytest.mark.parametrize(
    "scope", [pytest.param(scope, marks=() if scope in SMALL else pytest.mark.slow) for scope in SCOPES]
)
def test_every_interleaving_holds_the_properties_and_ends(scope: str) -> None:
    row = check(scope)
    assert not row.violation
    assert row.states > 10


@pytest.mark.parametrize("exhibit", MUSEUM, ids=lambda exhibit: exhibit.issue)
def test_published_hang_is_found(exhibit: Exhibit) -> None:
    with exhibit.planted(), pytest.raises((Breach, HangError)):
        exhibit.find()


DIES: dict[str, Any] = {"pooled": True, "last_may_die": True, "restarts": 2}


@pytest.mark.parametrize(
    "planted",
    [
        Exhibit(
            "a start", "that fails is forgotten", Supervisor._restart,
            "self._engines.lost(one, problem)", "pass", "",
            search(**DIES, sizes=(1,), steps=1, engines=1, deaths=[(1.0, 0), (1.0, 0)]),
        ),
        Exhibit(
            "a newcomer", "wakes no rollout", RolloutPipeline.wake, "self._changed.set()", "pass", "",
            search(**DIES, sizes=(2,), steps=1, slots=1, deaths=[(1.0, 0)]),
        ),
        Exhibit(
            "a newcomer", "takes the weights of a step", WeightSync._resend, "again=True", "again=False", "",
            search(**DIES, sizes=(1,), engines=1, deaths=[(1.0, 0)]),
        ),
    ],
    ids=lambda planted: f"{planted.issue} {planted.hung}",
)  # fmt: skip
def test_bug_in_restarts_is_found(planted: Exhibit) -> None:
    with planted.planted(), pytest.raises((Breach, HangError)):
        planted.find()


class Enumeration(Search):
    """Search that knows no state again, so that it makes every run to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.digests: set[bytes] = set()

    def reach(self, roots: Sequence[Any], timers: Sequence[asyncio.TimerHandle]) -> None:
        self.digests.add(Fingerprint().of(roots, timers))


def test_search_reaches_every_state_that_an_enumeration_of_all_runs_reaches() -> None:
    scope: dict[str, Any] = {"sizes": (2,), "steps": 1, "engines": 1, "slots": 2}
    every = Enumeration()
    runs = explore(Scope(**scope), every).runs
    graph = explore(Scope(**scope))
    assert graph.numbers.keys() == every.digests
    assert runs > 2 * graph.runs


def test_endless_states_by_hand() -> None:
    """0 may end at once, or go round 1 and 2 for ever; 3 and 4 end."""
    assert Graph(edges=[[END, 1], [2], [1, 3], [4, END], [END]]).endless() == [0, 1, 2]
    assert Graph(edges=[[1, 2], [END], [1]]).endless() == []
