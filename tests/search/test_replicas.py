"""The choice of a replica, held against a plain reference over random histories."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlsys.search.client import Replica, Replicas, ReplicaState, SearchRequest
from rlsys.search.retrieval import differences, served
from rlsys.search.wire import ReplicaVerdict

URLS = ("http://a", "http://b", "http://c")
ROWS = st.integers(0, len(URLS) - 1)


class Histories(RuleBasedStateMachine):
    """Requests and probes in any order; the reference is kept in lists and plain rules."""

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self.replicas = Replicas(URLS, Random(seed))
        self.under_way: list[tuple[Replica, SearchRequest]] = []
        self.trails: list[SearchRequest] = [SearchRequest()]
        self.state = [ReplicaState.healthy] * 3
        self.busy = [0] * 3
        self.suspicions = [0] * 3
        self.reference: str | None = None

    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        """Of healthy ones that have not failed it, else of the healthy, else of all: the one that failed longest ago."""
        trail = data.draw(st.sampled_from(self.trails))
        chosen = self.replicas.pick(trail)
        failures = [URLS.index(replica.url) for replica in trail.failed]
        latest = {row: place for place, row in enumerate(failures)}
        broken = [URLS.index(replica.url) for replica in trail.broken]
        healthy = [row for row in range(3) if self.state[row] is ReplicaState.healthy]
        known = [row for row in range(3) if self.state[row] is not ReplicaState.foreign and row not in broken]
        rows = [row for row in healthy if row not in latest]
        if not rows:
            rows = [row for row in healthy if row in known] or known
            rows = [row for row in rows if latest.get(row, -1) == min(latest.get(other, -1) for other in rows)]
        if not rows:
            assert chosen is None
            return
        assert chosen is not None
        row = URLS.index(chosen.url)
        assert row in rows
        assert self.in_flight(row) == min(map(self.in_flight, rows))
        self.replicas.start(chosen)
        self.under_way.append((chosen, trail))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), verdict=st.sampled_from(ReplicaVerdict), broken=st.booleans())
    def end(self, data: st.DataObject, verdict: ReplicaVerdict, broken: bool) -> None:
        replica, trail = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        row = URLS.index(replica.url)
        if verdict in (ReplicaVerdict.lost, ReplicaVerdict.busy):
            trail.failed.append(replica)
        if verdict is ReplicaVerdict.lost and broken:
            trail.broken.append(replica)
        self.replicas.end(replica, verdict)
        if verdict is ReplicaVerdict.answered:
            self.busy[row] = self.suspicions[row] = 0
            if self.state[row] is ReplicaState.suspect:
                self.state[row] = ReplicaState.healthy
        self.busy[row] += verdict is ReplicaVerdict.busy
        gone = verdict is ReplicaVerdict.lost or (verdict is ReplicaVerdict.busy and self.busy[row] >= 3)
        if gone and self.state[row] is ReplicaState.healthy:
            self.state[row] = ReplicaState.suspect
            self.suspicions[row] += 1

    @rule(row=ROWS, corpus=st.sampled_from([None, "", "x", "y"]))
    def probe(self, row: int, corpus: str | None) -> None:
        """None: no answer. The empty one: no word of the corpus."""
        replica = self.replicas.all[row]
        self.replicas.probed(replica, None if corpus is None else {"corpus_sha256": corpus} if corpus else {})
        if corpus is None:
            self.suspicions[row] += 1
            if self.state[row] is ReplicaState.healthy:
                self.state[row] = ReplicaState.suspect
            return
        self.reference = self.reference or corpus or None
        if corpus and corpus != self.reference:
            self.state[row] = ReplicaState.foreign
        elif self.state[row] is not ReplicaState.healthy:
            self.state[row], self.busy[row] = ReplicaState.healthy, 2

    @rule()
    def another_request(self) -> None:
        self.trails = [*self.trails[-4:], SearchRequest()]

    @invariant()
    def states_are_those_of_the_reference(self) -> None:
        if hasattr(self, "replicas"):
            assert [replica.state for replica in self.replicas.all] == self.state
            for row, replica in enumerate(self.replicas.all):
                assert replica.in_flight == self.in_flight(row)
                wait_s = min(0.1 * 2 ** max(0, self.suspicions[row] - 1), 10.0)
                if self.state[row] is ReplicaState.foreign:
                    wait_s = 10.0
                assert wait_s <= self.replicas.probe_after_s(replica) <= 1.5 * wait_s

    def in_flight(self, row: int) -> int:
        return sum(replica.url == URLS[row] for replica, _ in self.under_way)


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
