"""Tests of `bench.chaos`: a campaign in pieces, against launches that recover from every fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.chaos.__main__ import Campaign
from bench.chaos.faults import Fault, plan
from bench.chaos.findings import Row, continued


class Healthy:
    """Launch that recovers from every fault, and then trains to its end."""

    code: int | None = None
    worked_at = 0.0

    def __init__(self) -> None:
        self.driver, self._steps = self, 0

    def steps(self) -> int:
        self._steps += 2
        return self._steps

    def reaches(self, stage: str, _skipped: int, _limit_s: float) -> bool:
        self.code = 0 if stage == "stop" else self.code
        return True

    def strike(self, fault: Fault, *_: object) -> Row:
        return Row(fault)

    def open_faults(self) -> int:
        return 0

    def left_over(self) -> list[str]:
        return []


class Piece(Campaign):
    """Campaign in which each fault takes a minute, after the faults `before` it."""

    before = 0

    @property
    def minutes(self) -> float:
        return float(len(self.rows) - self.before)

    def _launch(self, *_: object) -> Any:
        return Healthy()

    def _judge(self, setup: str, _out: Path, _steps: int, faults: list[int], left: list[str]) -> None:
        self.ends.append({"setup": setup, "commit": "", "faults": faults, "lost": [], "left_over": left, "em": None})


def test_a_campaign_ends_between_two_faults_and_goes_on_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = [one for one in plan(1, 40) if one.setup == "plain" and one.stage not in ("start", "stop")][:5]
    known: dict[str, Any] = {}
    for struck in (3, 5):
        done = {row["number"] for row in known.get("rows", [])}
        Piece.before = len(done)
        piece = Piece(1, 60.0, 120.0, known, minutes=3)
        piece.strike([one for one in wanted if one.number not in done], "plain")
        found = piece.write()
        assert (found["kills"], found["recovered"], found["hung"]) == (struck, struck, 0)
        known = continued(json.loads(Path("outputs/bench/chaos.json").read_text()), "")
        assert len(known["rows"]) == struck, "each run was trained to its end and judged"
    assert [end["faults"] for end in known["ends"]] == [
        [one.number for one in part] for part in (wanted[:3], wanted[3:])
    ]
