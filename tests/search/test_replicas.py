"""Tests of the states of replicas, and of how a replica is picked."""

from random import Random

import pytest

from rlsys.search.client import Replicas, ReplicaState, SearchRequest
from rlsys.search.wire import ReplicaVerdict

URLS = ("http://a", "http://b", "http://c")
STATES = {"H": ReplicaState.healthy, "S": ReplicaState.suspect, "F": ReplicaState.foreign}
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
        ("lost-mute-busy", ReplicaState.suspect),  # after a probe, a single busy answer is enough
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


@pytest.mark.parametrize(
    ("states", "in_flight", "failed", "broken", "picked"),
    [
        pytest.param("HHH", (2, 1, 2), "", "", "b", id="least busy"),
        pytest.param("SHH", (0, 2, 1), "", "", "c", id="healthy before suspect"),
        pytest.param("SHF", (0, 0, 0), "b", "", "b", id="failed but healthy before suspect"),
        pytest.param("HHH", (0, 5, 0), "ac", "", "b", id="not yet failed, though busier"),
        pytest.param("HHH", (0, 0, 0), "bac", "", "b", id="failed first"),
        pytest.param("SHF", (0, 0, 0), "b", "b", "a", id="never twice after an invalid answer"),
        pytest.param("FFF", (0, 0, 0), "", "", None, id="never foreign"),
    ],
)
def test_the_best_replica_is_picked(
    states: str, in_flight: tuple[int, ...], failed: str, broken: str, picked: str | None
) -> None:
    replicas = Replicas(URLS, Random(0))
    by_name = dict(zip("abc", replicas.all, strict=True))
    for replica, state, requests in zip(replicas.all, states, in_flight, strict=True):
        replica.state, replica.in_flight = STATES[state], requests
    request = SearchRequest(failed=[by_name[name] for name in failed], broken=[by_name[name] for name in broken])
    assert replicas.pick(request) is (by_name[picked] if picked else None)
