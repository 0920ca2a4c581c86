"""Tests of the records of faults."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.config.schema import ClusterConfig
from rlsys.observe.faults import (
    FAULTS,
    Change,
    FaultKind,
    FaultLog,
    Outcome,
    RecordedChange,
    Restarts,
    changes_of,
    fault_summary,
    faults_of,
    read_fault_row,
    read_faults,
)
from rlsys.observe.run_folder import open_run
from tests.support.damage import DAMAGES
from tests.support.jsonl import read_rows
from tests.support.made_run import Maker, Size, add_faults, made_run


def test_faults_are_on_disk_when_they_begin_and_when_they_end(tmp_path: Path) -> None:
    now = iter([100.0, 101.0, 104.5, 109.0])
    log = FaultLog(tmp_path / FAULTS, lambda: next(now))
    log.step = 7
    engine = log.begin("engine 1", FaultKind.died, "SIGKILL; 3 groups run again")
    assert [row["event"] for row in read_rows(tmp_path / FAULTS)] == ["began"]

    server = log.begin("search server", FaultKind.unreachable, "connection refused")
    log.end(engine, Outcome.recovered, "restarted")
    log.end(server, Outcome.given_up, "no answer within 5 s")

    assert log.metrics() == {"faults/began": 2, "faults/recovered": 1, "faults/given_up": 1, "faults/recovery_s": 4.5}
    rows = read_rows(tmp_path / FAULTS)
    assert [(row["fault"], row["event"], row["time"], row["step"]) for row in rows] == [
        (1, "began", 100.0, 7),
        (2, "began", 101.0, 7),
        (1, "recovered", 104.5, 7),
        (2, "given_up", 109.0, 7),
    ]
    assert (rows[0]["part"], rows[0]["kind"], rows[0]["detail"]) == ("engine 1", "died", "SIGKILL; 3 groups run again")


def test_faults_are_said_in_printable_lines_when_they_begin_and_end(tmp_path: Path) -> None:
    said: list[str] = []
    now = iter([1.0, 3.5])
    log = FaultLog(tmp_path / FAULTS, lambda: next(now), said.append)
    log.end(log.begin("engine 1", FaultKind.hung, "in \x1b[2J"), Outcome.recovered, "restarted\u202e")
    assert len(said) == 2
    assert all(word in said[0] for word in ("engine 1", "hangs", r"\x1b[2J"))
    assert all(word in said[1] for word in ("engine 1", "2.5 s", r"\u202e"))
    assert not set("".join(said)) & {"\x1b", "\u202e"}


def test_rows_are_paired_within_the_process_that_wrote_them(tmp_path: Path) -> None:
    """A resumed run numbers its faults from 1 again; the open fault of the killed process stays open."""
    for ends in (False, True):
        times = iter([10.0, 12.0])
        log = FaultLog(tmp_path / FAULTS, lambda times=times: next(times))  # type: ignore[misc]
        fault = log.begin("engine 0", FaultKind.died, "no progress")
        if ends:
            log.end(fault, Outcome.recovered, "restarted")
        log.close()
    first, second = read_faults(tmp_path / FAULTS)
    assert (first.outcome, first.recovery_s) == (None, None)
    assert (second.outcome, second.recovery_s, second.ending) == (Outcome.recovered, 2.0, "restarted")


def test_summary_counts_outcomes_and_takes_the_median_of_the_recoveries(tmp_path: Path) -> None:
    now = [0.0]
    log = FaultLog(tmp_path / FAULTS, lambda: now[0])
    for seconds, outcome in (
        (1.0, Outcome.recovered),
        (9.0, Outcome.recovered),
        (2.0, Outcome.recovered),
        (70.0, Outcome.given_up),
    ):
        fault = log.begin("engine 0", FaultKind.died, "")
        now[0] += seconds
        log.end(fault, outcome, "")
    log.begin("engine 0", FaultKind.died, "")
    expected = {"count": 5, "recovered": 3, "given_up": 1, "recovery_p50_s": 2.0, "recovery_max_s": 9.0}
    assert fault_summary(read_faults(tmp_path / FAULTS)) == expected
    assert fault_summary(()) == {
        "count": 0,
        "recovered": 0,
        "given_up": 0,
        "recovery_p50_s": None,
        "recovery_max_s": None,
    }


def test_engines_that_join_and_leave_are_read_apart_from_faults(tmp_path: Path) -> None:
    run, said = made_run(tmp_path / "run", Maker(Size(steps=1, groups=1, samples=1, answers=1))), list[str]()
    log = FaultLog(run / FAULTS, lambda: 7.0, said.append)
    log.step = 4
    log.note("engine 2", Change.joined, "with weight version 3 \x1b[2J")
    found = open_run(run)
    assert (found.faults, found.problems, read_faults(run / FAULTS)) == ((), [], ())
    assert found.changes == (RecordedChange("engine 2", Change.joined, 4, 7.0, "with weight version 3 \x1b[2J"),)
    assert all(word in said[0] for word in ("engine 2", "joined", "step 4", r"\x1b[2J"))
    assert log.metrics()["faults/began"] == 0


ROW = {"fault": 1, "event": "began", "time": 1.0, "step": 0, "part": "a", "kind": "died", "detail": ""}


@given(
    st.dictionaries(st.sampled_from([*ROW]), st.none() | st.booleans() | st.floats() | st.text() | st.lists(st.text()))
)
def test_any_row_is_read_or_left_out(changes: dict[str, object]) -> None:
    rows = [read_fault_row(json.dumps(row).encode()) for row in (ROW, ROW | changes, {**ROW, "event": "recovered"})]
    joined = read_fault_row(json.dumps(ROW | {"event": "joined"} | changes).encode())
    assert rows[0] == ROW
    assert len(changes_of([joined])) == (joined["event"] == "joined") if joined else True
    found = faults_of(row for row in rows if row is not None)
    assert len(found) == 1 + (rows[1] is not None and rows[1]["event"] == "began")
    fault_summary(found)


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_damaged_file_is_one_problem_of_the_run(tmp_path: Path, damage: str) -> None:
    run = made_run(tmp_path / "run", Maker(Size(steps=1, groups=1, samples=1, answers=1)))
    assert (open_run(run).faults, open_run(run).problems) == ((), []), "an older run has no such file"
    file = add_faults(run)
    assert [fault.outcome for fault in open_run(run).faults] == [Outcome.recovered, Outcome.given_up, None]
    DAMAGES[damage](file)
    found = open_run(run)
    assert len(found.problems) == (0 if damage in ("removed", "emptied", "blank") else 1), found.problems
    assert all(problem.startswith(FAULTS) for problem in found.problems)
    assert len(found.rows) == 1


def test_restarts_are_counted_within_a_sliding_window() -> None:
    seconds = iter([0.0, 4.0, 5.0, 9.9, 10.0, 13.0, 14.0, 15.0])
    restarts = Restarts(ClusterConfig(restarts=2, restart_window_s=10.0), lambda: next(seconds))
    assert [restarts.take() for _ in range(8)] == [True, True, False, False, True, False, True, False]
    assert not Restarts(ClusterConfig(restarts=0)).take()


def test_a_restart_that_is_given_back_may_be_taken_again() -> None:
    restarts = Restarts(ClusterConfig(restarts=1, restart_window_s=10.0), lambda: 0.0)
    restarts.give_back()
    assert (restarts.take(), restarts.take()) == (True, False)
    restarts.give_back()
    assert (restarts.take(), restarts.take()) == (True, False)
