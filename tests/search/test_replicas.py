"""The states of replicas and the choice among them."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from rlsys.search.client import Replica, Replicas, ReplicaState, SearchRequest
from rlsys.search.retrieval import differences, served
from rlsys.search.wire import ReplicaVerdict

URLS = ("http://a", "http://b", "http://c")
HEALTHS = {"silent": None, "mute": {}, "same": {"corpus_sha256": "x"}, "other": {"corpus_sha256": "y"}}


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ("abandoned-mute-same", ReplicaState.healthy),
        ("lost", ReplicaState.suspect),
        ("silent", ReplicaState.suspect),
        ("busy-busy", ReplicaState.healthy),
        ("busy-busy-busy", ReplicaState.suspect),
        ("busy-busy-answered-busy", ReplicaState.healthy),
        ("lost-answered", ReplicaState.healthy),
        ("lost-same", ReplicaState.healthy),
        ("lost-mute-busy", ReplicaState.suspect),  # the health was not true
        ("other-lost-silent-answered", ReplicaState.foreign),
        ("other-same", ReplicaState.healthy),
    ],
)
def test_answers_and_probes_change_the_state_of_a_replica(events: str, state: ReplicaState) -> None:
    replicas = Replicas(URLS, Random(0))
    first, replica, _ = replicas.all
    replicas.probed(first, HEALTHS["same"])
    for event in events.split("-"):
        if event in HEALTHS:
            replicas.probed(replica, HEALTHS[event])
        else:
            replicas.start(replica)
            replicas.end(replica, ReplicaVerdict[event])
    assert replica.state is state


class Histories(RuleBasedStateMachine):
    """Requests and probes in any order, and the choice among the replicas after each."""

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self.replicas = Replicas(URLS, Random(seed))
        self.under_way: list[tuple[Replica, SearchRequest]] = []
        self.trails: list[SearchRequest] = [SearchRequest()]

    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        """Of healthy ones that have not failed it, else of the healthy, else of all: the one that failed longest ago."""
        trail = data.draw(st.sampled_from(self.trails))
        chosen = self.replicas.pick(trail)
        latest = {replica: place for place, replica in enumerate(trail.failed)}
        healthy = [replica for replica in self.replicas.all if replica.state is ReplicaState.healthy]
        rows = [replica for replica in healthy if replica not in latest]
        if not rows:
            known = [replica for replica in self.replicas.all if replica.state is not ReplicaState.foreign]
            usable = [replica for replica in known if replica not in trail.broken]
            rows = [replica for replica in healthy if replica in usable] or usable
            rows = [row for row in rows if latest.get(row, -1) == min(latest.get(other, -1) for other in rows)]
        assert (chosen is None) == (not rows)
        if chosen is not None:
            assert chosen in rows
            assert self.in_flight(chosen) == min(map(self.in_flight, rows))
            self.replicas.start(chosen)
            self.under_way.append((chosen, trail))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), verdict=st.sampled_from(ReplicaVerdict), broken=st.booleans())
    def end(self, data: st.DataObject, verdict: ReplicaVerdict, broken: bool) -> None:
        replica, trail = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        if verdict in (ReplicaVerdict.lost, ReplicaVerdict.busy):
            trail.failed.append(replica)
        if verdict is ReplicaVerdict.lost and broken:
            trail.broken.append(replica)
        self.replicas.end(replica, verdict)

    @rule(row=st.integers(0, len(URLS) - 1), health=st.sampled_from(list(HEALTHS)))
    def probe(self, row: int, health: str) -> None:
        self.replicas.probed(self.replicas.all[row], HEALTHS[health])

    @rule()
    def another_request(self) -> None:
        self.trails = [*self.trails[-4:], SearchRequest()]

    def in_flight(self, replica: Replica) -> int:
        return sum(other is replica for other, _ in self.under_way)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=40, stateful_step_count=40)


def test_equals_are_chosen_by_lot() -> None:
    """3000 choices of three: a fair share is 1000 with a standard deviation of 26."""
    replicas = Replicas(URLS, Random(3))
    chosen = Counter(replica.url for _ in range(3000) if (replica := replicas.pick(SearchRequest())))
    assert set(chosen) == set(URLS)
    assert all(abs(count - 1000) < 5 * 26 for count in chosen.values())


def test_servers_differ_in_what_both_say_besides_counts() -> None:
    one, other = {"encoder": "e", "passages": 7, "queries": 9}, {"passages": 8, "encoder": "f", "queries": 3}
    assert set(differences(served(one), served(other))) == {"encoder", "passages"}
    assert differences(served(one), served({"kind": "dense", "encoder": "e", "status": "ok"})) == []
