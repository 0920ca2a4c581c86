"""A run's folder as its readers see it: whatever is damaged or missing is a sentence, and the rest is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlsys.observe.run_folder import open_run
from tests.support.damage import DAMAGES, OBJECTS, holding
from tests.support.refusals import refused

FILES = ("run.json", "config.yaml", "metrics.jsonl", "timeline.jsonl", "summary.json", "status.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of three steps, whole."""
    run = tmp_path / "outputs" / "run-20250101-120000"
    (run / "evaluations").mkdir(parents=True)
    (run / "trajectories").mkdir()
    life = {"begun": 1.0, "after_step": 0, "environment": {"torch": "2"}, "commit": None, "changed": None}
    (run / "run.json").write_text(json.dumps({"lives": [{**life, "command": ["rlsys"]}]}))
    (run / "config.yaml").write_text("name: run\n")
    rows = [{"step": step, "time": 1.0, "actor/loss": step / 2} for step in (1, 2, 3)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spans = [{"step": step, "window": [step, step + 1], "spans": []} for step in (1, 2, 3)]
    (run / "timeline.jsonl").write_text("".join(json.dumps(row) + "\n" for row in spans))
    for step in (0, 3):
        (run / "evaluations" / f"step_{step:06d}.json").write_text(json.dumps({"step": step, "em": 0.5}))
        (run / "evaluations" / f"step_{step:06d}.jsonl").write_text('{"uid": "q"}\n')
    (run / "summary.json").write_text('{"em_after": 0.5}')
    for name in ("eval", "eval-1"):
        (run / name).mkdir()
        (run / name / "results.json").write_text('{"sets": {}}')
    return run


def test_a_whole_folder_is_read(folder: Path) -> None:
    run = open_run(folder)
    assert run.problems == []
    assert (run.name, run.config) == ("run-20250101-120000", {"name": "run"})
    assert [row["actor/loss"] for row in run.rows] == [0.5, 1.0, 1.5]
    assert [row["step"] for row in run.evaluations] == [0, 3]
    assert run.answers(3) == [{"uid": "q"}]
    assert list(run.measured()) == [("eval", {"sets": {}}), ("eval-1", {"sets": {}})]
    assert [one.step for one in run.timeline()] == [1, 2, 3]
    assert (run.summary, run.status) == ({"em_after": 0.5}, None)
    assert run.lives[0].command == ["rlsys"]
    assert run.problems == []
    assert list(run.trajectories()) == []
    assert run.problems == ["trajectories is missing: no trajectory was kept, or the run is of an older rlsys."]


def test_a_folder_that_is_no_run_is_refused_with_one_that_is(folder: Path) -> None:
    for path in (folder.parent / "run-2", folder / "config.yaml"):
        with refused("not_found", path):
            open_run(path)
    with refused("malformed", folder / "evaluations"):
        open_run(folder / "evaluations")
    with refused("malformed", folder.parent) as caught:
        open_run(folder.parent)
    assert "outputs/run-20250101-120000" in str(caught.value)


@pytest.mark.parametrize("line", [b"[1]", b'{"no": "step"}', b'{"step": "one"}', b"\xff\xfe", b'{"step": true}'])
def test_a_row_that_is_none_is_told_by_its_line(folder: Path, line: bytes) -> None:
    rows = (folder / "metrics.jsonl").read_bytes().splitlines()
    (folder / "metrics.jsonl").write_bytes(b"\n".join([rows[0], line, b"", rows[2], rows[2][:-9]]))
    run = open_run(folder)
    assert [problem.partition(" is ")[0] for problem in run.problems] == [
        "metrics.jsonl, line 2",
        "metrics.jsonl, line 5",
    ]
    assert [row["step"] for row in run.rows] == [1, 3]


NO_LIVES = {"number": b'{"lives": 3}', "empty life": b'{"lives": [{}]}'}
TAKE_ANY_OBJECT = ("config.yaml", "summary.json", "status.json", "evaluations/step_000003.jsonl", "eval/results.json")
MAY_BE_MISSING = ("summary.json", "status.json", "evaluations/step_000003.json", "eval/results.json")


DAMAGED = [*FILES, "evaluations/step_000003.json", "evaluations/step_000003.jsonl", "eval/results.json"]
GRID = [
    # Each damage to two files, and each file with several of them, by default.
    pytest.param(name, damage, marks=() if (row + column) % 5 == 0 else pytest.mark.slow)
    for row, name in enumerate(DAMAGED)
    for column, damage in enumerate([*sorted(DAMAGES.keys() - {"blank"}), *NO_LIVES])
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("name", "damage"), GRID)
def test_damage_is_a_sentence_and_the_rest_is_read(folder: Path, name: str, damage: str) -> None:
    (folder / "status.json").write_text('{"step": 1}')
    change = holding(NO_LIVES[damage]) if damage in NO_LIVES else DAMAGES[damage]
    change(folder / name)
    run = open_run(folder)
    for _ in range(2):
        run.timeline()
        measured = [folder for folder, _ in run.measured()]
        for row in run.evaluations:
            run.answers(row["step"])
    is_object = damage in (*OBJECTS, *NO_LIVES)
    # A link that leads nowhere is none of those that are looked for by a pattern.
    is_gone = damage == "removed" or (damage == "circle" and name == "eval/results.json")
    fine = name in (MAY_BE_MISSING if is_gone else TAKE_ANY_OBJECT if is_object else ())
    assert len(run.problems) == (0 if fine else 1)
    assert all(told.startswith(name) and told.endswith(".") and "\n" not in told for told in run.problems)
    assert len(run.rows) == (0 if name == "metrics.jsonl" else 3)
    assert len(run.evaluations) == (1 if name == "evaluations/step_000003.json" else 2)
    assert measured == (["eval-1"] if name == "eval/results.json" and not is_object else ["eval", "eval-1"])
