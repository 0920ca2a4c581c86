"""Tests of a run's files: atomic writes, logs that survive a crash, damaged folders, JSON and YAML with limits."""

import errno
import json
import os
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from rlsys.errors import RunError
from rlsys.files import (
    CONFIG_BYTES,
    DEPTH,
    LINE_BYTES,
    json_safe,
    limited_lines,
    open_regular,
    parse_json,
    read_regular,
    read_yaml,
    write_atomically,
)
from rlsys.observe.records import LineLog, read_metrics
from rlsys.observe.run_folder import open_run
from tests.support.answers import answered, asked
from tests.support.damage import ALIASES, DAMAGES, DEEP, LEVELS, OBJECTS, holding
from tests.support.jsonl import read_rows
from tests.support.made_run import Maker, Size, add_measured, made_run
from tests.support.refusals import refused


def test_numpy_torch_and_non_finite_values_become_json() -> None:
    value = {"a": np.float32(0.5), "b": torch.tensor(3), "c": [float("nan"), (float("inf"), True, None)], 1: Path("x")}
    assert json_safe(value) == {"a": 0.5, "b": 3, "c": [None, [None, True, None]], "1": "x"}
    with pytest.raises(TypeError, match="set"):
        json_safe({"a": {1}})


def test_failed_write_keeps_the_old_file_and_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "a.txt"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "half \ud800")
    full = OSError(errno.ENOSPC, "No space left on device")  # It names no file, like the error of a failed write.
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(full))
    with pytest.raises(OSError, match="No space left") as raised:
        write_atomically(path, "new")
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(path))
    assert path.read_text() == "old"
    assert [found.name for found in path.parent.iterdir()] == ["a.txt"]


def test_last_row_of_a_step_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 0.1}\n{"step": 2, "loss": 0.2}\n{"step": 2, "rew\n{"step": 2, "loss": 2.7}\n')
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [(1, 0.1), (2, 2.7)]


def test_only_regular_files_of_limited_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    (tmp_path / "rows.jsonl").write_bytes(b"{}\n[]\n")
    os.truncate(tmp_path / "rows.jsonl", 2**40)
    for name in ("pipe", "endless", "rows.jsonl"):
        with pytest.raises(OSError, match=r"regular|1099511627776"):
            read_regular(tmp_path / name)
    read = []
    with pytest.raises(OSError, match=str(LINE_BYTES)), open_regular(tmp_path / "rows.jsonl") as lines:
        read.extend(limited_lines(lines))
    assert read == [b"{}\n", b"[]\n"]


@pytest.mark.parametrize("text", [DEEP, LEVELS, b'{"a": 1%s}' % (b"0" * 20), b"[-9223372036854775809]", b"\xff", b""])
def test_json_beyond_the_limits_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parse_json(text)


def test_json_within_the_limits_is_read() -> None:
    whole = {"a": [1.5, None, True, 2**64 - 1, -(2**63)], "b": {"c": "\ud800"}}
    assert parse_json(json.dumps(whole)) == whole
    nested = b"[" * DEPTH + b"]" * DEPTH
    assert json_safe(parse_json(nested)) == json.loads(nested)
    with pytest.raises(ValueError, match="levels"):
        parse_json(b"[" + nested + b"]")


@pytest.mark.parametrize(
    "text",
    [
        *(ALIASES, DEEP, LEVELS, b"a: &a 1\nb: *a", b"a: 2024-01-01", b"a: !!binary YQ=="),
        *(b"a: !!bool x", b'a: !!int ""', b"a: 1%s" % (b"0" * 400), b"? [a]\n: b"),
        *(b"a: 190" + b":59" * 400 + b".5", b"a: [", b"\xff", b"#" * (CONFIG_BYTES + 1)),
    ],
)
def test_yaml_beyond_json_is_refused(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(text)
    with pytest.raises((ValueError, OSError)):
        read_yaml(file)


def test_row_of_any_text_is_one_line_of_ascii(tmp_path: Path) -> None:
    text = "half a pair \ud83d, a\u2028b\nc\x85d"
    LineLog(tmp_path / "rows.jsonl").append({text: text})
    assert (tmp_path / "rows.jsonl").read_bytes().isascii()
    assert read_rows(tmp_path / "rows.jsonl") == [{text: text}]


def filled(path: Path, count: int = 3) -> list[int]:
    """Write a file of `count` rows; returns the position after each row."""
    log, positions = LineLog(path), []
    for number in range(count):
        log.append({"row": number, "text": "ä" * number})
        positions.append(log.position)
    log.close()
    return positions


@pytest.mark.parametrize("kept", [0, 2, 3])
def test_log_opened_at_a_position_keeps_only_the_rows_before_it(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    position = [0, *filled(path)][kept]
    assert LineLog(path).position == path.stat().st_size
    log = LineLog(path, position)
    assert log.position == position == path.stat().st_size, "the position must be known before a row is appended"
    assert path.read_bytes().count(b"\n") == kept
    log.append({"row": "new"})
    log.append({"row": "last"})
    assert log.position == path.stat().st_size
    assert [row["row"] for row in read_rows(path)] == [*range(kept), "new", "last"]


@pytest.mark.parametrize("position", [None, 10_000])
def test_incomplete_line_is_ended_before_the_next_row(position: int | None, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    whole, last = filled(path)[-2:]
    content = path.read_bytes()
    for size in (whole + 1, (whole + last) // 2, last - 1):
        path.write_bytes(content[:size])
        log = LineLog(path, position)
        log.append({"row": "new"})
        log.close()
        lines = path.read_bytes().splitlines()
        assert lines[:2] == content.splitlines()[:2]
        assert lines[2] == content[whole:size]
        assert json.loads(lines[3]) == {"row": "new"}


def test_position_is_synced_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a checkpoint could refer to rows that are lost if the machine crashes."""
    log, synced = LineLog(tmp_path / "rows.jsonl"), []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_size))
    log.append({"row": 1})
    assert log.position == synced[0] == len('{"row": 1}\n')

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"rows\.jsonl") as raised:
        _ = log.position
    assert raised.value.code == "no_room"


def test_full_disk_is_reported_and_leaves_no_partial_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    log = LineLog(path)
    log.append({"row": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
    try:
        with pytest.raises(RunError, match=r"rows\.jsonl") as raised:
            log.append({"row": 2, "text": "long enough"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.code == "no_room"
    assert read_rows(path) == [{"row": 1}], "the partial row must be removed"
    log.append({"row": 3})
    assert log.position == path.stat().st_size
    log.close()
    again = LineLog(path)
    again.append({"row": 4})
    assert [row["row"] for row in read_rows(path)] == [1, 3, 4]


FILES = ("run.json", "config.yaml", "metrics.jsonl", "timeline.jsonl", "summary.json", "status.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of three steps and two evaluations by `rlsys eval`."""
    run = made_run(tmp_path / "outputs" / "run-20250101-120000", Maker(Size(steps=3, groups=1, samples=1, answers=1)))
    for name in ("eval", "eval-1"):
        add_measured(run, name, answered(asked(1, "Nile"), "Nile"))
    return run


def test_complete_run_folder_is_read(folder: Path) -> None:
    run = open_run(folder)
    assert (run.name, run.config["name"]) == ("run-20250101-120000", "made")
    rows = read_rows(folder / "metrics.jsonl")
    assert [row["actor/entropy"] for row in run.rows] == [row["actor/entropy"] for row in rows]
    assert [row["step"] for row in run.evaluations] == [0, 3]
    assert [row["uid"] for row in run.answers(3)] == ["heldout:0"]
    assert [(name, *results["sets"]) for name, results in run.measured()] == [("eval", "nq"), ("eval-1", "nq")]
    assert [one.step for one in run.timeline()] == [1, 2, 3]
    assert (run.summary, run.status) == ({"em_after": 0.8}, None)
    assert run.launches[0].command == ["rlsys", "train", "a b"]
    assert [one.step for one in run.trajectories()] == [1, 2, 3]
    assert run.problems == []
    shutil.rmtree(folder / "trajectories")
    assert list(run.trajectories()) == []
    assert [problem.split()[0] for problem in run.problems] == ["trajectories"]


def test_folder_without_a_run_is_refused_and_a_run_inside_is_suggested(folder: Path) -> None:
    for path in (folder.parent / "run-2", folder / "config.yaml"):
        with refused("not_found", path):
            open_run(path)
    with refused("malformed", folder / "evaluations"):
        open_run(folder / "evaluations")
    with refused("malformed", folder.parent) as caught:
        open_run(folder.parent)
    assert "outputs/run-20250101-120000" in str(caught.value)


@pytest.mark.parametrize("line", [b"[1]", b'{"no": "step"}', b'{"step": "one"}', b"\xff\xfe", b'{"step": true}'])
def test_malformed_row_is_reported_by_its_line(folder: Path, line: bytes) -> None:
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
    # The default suite does each damage to about two files, and several kinds of damage to each file.
    pytest.param(name, damage, marks=() if (row + column) % 5 == 0 else pytest.mark.slow)
    for row, name in enumerate(DAMAGED)
    for column, damage in enumerate([*sorted(DAMAGES.keys() - {"blank"}), *NO_LIVES])
]


@pytest.mark.parametrize(("name", "damage"), GRID)
def test_damaged_file_is_one_problem_and_the_rest_is_read(folder: Path, name: str, damage: str) -> None:
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
    # A circular link does not match the pattern of result files, so it counts as removed.
    is_gone = damage == "removed" or (damage == "circle" and name == "eval/results.json")
    fine = name in (MAY_BE_MISSING if is_gone else TAKE_ANY_OBJECT if is_object else ())
    assert len(run.problems) == (0 if fine else 1)
    assert all(one.startswith(name) and one.endswith(".") and "\n" not in one for one in run.problems)
    assert len(run.rows) == (0 if name == "metrics.jsonl" else 3)
    assert len(run.evaluations) == (1 if name == "evaluations/step_000003.json" else 2)
    assert measured == (["eval-1"] if name == "eval/results.json" and not is_object else ["eval", "eval-1"])
