"""Whether a run goes on, from what it has written."""

from __future__ import annotations

from typing import Any

import pytest

from rlsys.report.run_model import QUIET_S, SILENT_S, Phase, life_of

STATUS = {"step": 3, "steps": 9, "at": 1000.0, "ended": None, "pid": 7, "host": "here"}


@pytest.mark.parametrize(
    ("status", "now", "living", "phase", "words"),
    [
        (STATUS, 1001.0, {7}, Phase.running, "is after step 3 of 9"),
        (STATUS, 1000.0 + QUIET_S + 1, set(), Phase.gone, "killed"),
        (STATUS, 1000.0 + SILENT_S + 1, set(), Phase.gone, "killed"),
        # The clock was set back since.
        (STATUS, 1000.0 - QUIET_S - 1, set(), Phase.gone, "killed"),
        (STATUS, 1000.0 - QUIET_S - 1, {7}, Phase.running, "goes on"),
        # In another container of the same name, where its number is nobody's: it has just written.
        (STATUS, 1000.0 + QUIET_S - 1, set(), Phase.running, "goes on"),
        (STATUS, 1000.0 + SILENT_S + 1, {7}, Phase.silent, "for 31 s"),
        # Of another machine nothing is known but how old its word is.
        ({**STATUS, "host": "there"}, 1001.0, set(), Phase.running, "goes on"),
        ({**STATUS, "host": "there"}, 1100.0, set(), Phase.silent, "for 100 s"),
        ({**STATUS, "ended": "finished"}, 9999.0, set(), Phase.finished, "has finished after step 3"),
        ({**STATUS, "ended": "failed: no disk"}, 9999.0, set(), Phase.failed, "failed: no disk"),
        (None, 1001.0, set(), Phase.unknown, "has not begun"),
        ({"pid": "seven", "at": None}, 1.0, set(), Phase.running, "goes on"),
    ],
)
def test_a_life_by_what_is_on_disk(
    status: dict[str, Any] | None, now: float, living: set[int], phase: Phase, words: str
) -> None:
    life = life_of(status, False, now, "here", living.__contains__)
    assert life.phase is phase
    assert words in life.sentence


def test_an_older_run_with_a_summary_has_finished() -> None:
    assert life_of(None, True, 1.0, "here", lambda _: False).phase is Phase.finished
