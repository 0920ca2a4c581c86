"""Tests of the records of faults."""

import json
from pathlib import Path

from rlsys.observe.faults import FAULTS, FaultKind, FaultLog, Outcome


def test_faults_are_on_disk_when_they_begin_and_when_they_end(tmp_path: Path) -> None:
    now = iter([100.0, 101.0, 104.5, 109.0])
    log = FaultLog(tmp_path / FAULTS, lambda: next(now))
    log.step = 7
    engine = log.begin("engine 1", FaultKind.died, "SIGKILL; 3 groups run again")
    assert [json.loads(line)["event"] for line in (tmp_path / FAULTS).read_text().splitlines()] == ["began"]

    server = log.begin("search server", FaultKind.unreachable, "connection refused")
    log.end(engine, Outcome.recovered, "restarted")
    log.end(server, Outcome.given_up, "no answer within 5 s")

    assert log.metrics() == {"faults/began": 2, "faults/recovered": 1, "faults/given_up": 1, "faults/recovery_s": 4.5}
    rows = [json.loads(line) for line in (tmp_path / FAULTS).read_text().splitlines()]
    assert [(row["fault"], row["event"], row["time"], row["step"]) for row in rows] == [
        (1, "began", 100.0, 7),
        (2, "began", 101.0, 7),
        (1, "recovered", 104.5, 7),
        (2, "given_up", 109.0, 7),
    ]
    assert (rows[0]["part"], rows[0]["kind"], rows[0]["detail"]) == ("engine 1", "died", "SIGKILL; 3 groups run again")


def test_a_resumed_run_keeps_earlier_faults(tmp_path: Path) -> None:
    for _ in range(2):
        log = FaultLog(tmp_path / FAULTS)
        log.begin("engine 0", FaultKind.hung, "no progress")
        log.close()
    assert len((tmp_path / FAULTS).read_text().splitlines()) == 2
