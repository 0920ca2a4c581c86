"""A run's folder as its readers see it: whatever is damaged or missing is a sentence, and the rest is there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlsys.errors import UserError
from rlsys.observe.run_folder import open_run

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


def test_what_is_there_is_read(folder: Path) -> None:
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
    assert run.problems == [
        "trajectories is missing: no trajectory was kept, or the run is of an older rlsys."
    ]


def test_a_folder_that_is_no_run_is_refused_with_one_that_is(folder: Path) -> None:
    run = "outputs/run-20250101-120000."
    for path, hint in (
        (folder.parent, run),
        (folder.parent / "run-2", run),
        (folder / "config.yaml", "such as outputs/NAME-YYYYMMDD-HHMMSS."),
    ):
        with pytest.raises(UserError) as refused:
            open_run(path)
        text = str(refused.value)
        assert text.startswith(f"{path} is no ")
        assert text.endswith(hint)
        assert "\n" not in text
    with pytest.raises(
        UserError, match=r"it has neither config\.yaml nor metrics\.jsonl; give the folder of a run,"
    ):
        open_run(folder / "evaluations")


def test_a_row_cut_short_is_told_by_its_line(folder: Path) -> None:
    rows = folder / "metrics.jsonl"
    rows.write_bytes(rows.read_bytes()[:-9])
    run = open_run(folder)
    assert run.problems == ["metrics.jsonl, line 3 is cut short: left out."]
    assert [row["step"] for row in run.rows] == [1, 2]


@pytest.mark.parametrize(
    "line", [b"[1]", b'{"no": "step"}', b'{"step": "one"}', b"\xff\xfe", b"null", b"{", b'{"step": true}']
)
def test_a_row_that_is_none_is_told(folder: Path, line: bytes) -> None:
    rows = (folder / "metrics.jsonl").read_bytes().splitlines()
    (folder / "metrics.jsonl").write_bytes(b"\n".join([rows[0], line, b"", rows[2], b""]))
    run = open_run(folder)
    assert run.problems == ["metrics.jsonl, line 2 is damaged: left out."]
    assert [row["step"] for row in run.rows] == [1, 3]


OBJECTS = (b'{"lives": 3}', b'{"lives": [{}]}')
TAKE_ANY_OBJECT = (
    "config.yaml",
    "summary.json",
    "status.json",
    "evaluations/step_000003.jsonl",
    "eval/results.json",
)
MAY_BE_MISSING = ("summary.json", "status.json", "evaluations/step_000003.json", "eval/results.json")


@pytest.mark.parametrize("content", [b"", b"\x00\xff", b"[1, 2]", b"{", b"a: [", *OBJECTS, None])
@pytest.mark.parametrize(
    "name", [*FILES, "evaluations/step_000003.json", "evaluations/step_000003.jsonl", "eval/results.json"]
)
def test_damage_is_a_sentence_and_the_rest_is_read(folder: Path, name: str, content: bytes | None) -> None:
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / name).write_bytes(content)
    run = open_run(folder)
    for _ in range(2):
        run.timeline()
        measured = [folder for folder, _ in run.measured()]
        for row in run.evaluations:
            run.answers(row["step"])
    fine = name in (MAY_BE_MISSING if content is None else TAKE_ANY_OBJECT if content in OBJECTS else ())
    assert len(run.problems) == (0 if fine else 1)
    assert all(told.startswith(name) and told.endswith(".") and "\n" not in told for told in run.problems)
    assert len(run.rows) == (0 if name == "metrics.jsonl" else 3)
    assert len(run.evaluations) == (1 if name == "evaluations/step_000003.json" else 2)
    gone = name == "eval/results.json" and content not in OBJECTS
    assert measured == (["eval-1"] if gone else ["eval", "eval-1"])


def test_many_damaged_rows_are_told_at_once(folder: Path) -> None:
    """Each once, without a look through all that were told before."""

    class Told(list[str]):
        def __contains__(self, _: object) -> bool:
            raise AssertionError("a look through the list for every sentence")

    (folder / "timeline.jsonl").write_text("no row\n" * 5000)
    run = replace(open_run(folder), problems=Told())
    for _ in range(2):
        run.timeline()
    assert len(run.problems) == 5000


def test_damaged_trajectories_are_told(folder: Path) -> None:
    (folder / "trajectories" / "step_000001.jsonl.gz").write_bytes(b"")
    run = open_run(folder)
    assert [*run.trajectories(), *run.trajectories()] == []
    assert run.problems == ["trajectories/step_000001.jsonl.gz is empty: left out."]
