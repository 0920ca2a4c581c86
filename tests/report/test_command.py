"""`rlsys report`: where the file goes, and what is said of what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.apps.cli.runs import report as command
from rlsys.errors import UserError
from rlsys.observe.run_folder import open_run
from rlsys.report.run_model import build
from tests.report.made import made_run


def test_the_report_lies_in_the_first_runs_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [made_run(tmp_path / name) for name in ("one", "two")]
    (runs[1] / "timeline.jsonl").unlink()
    command(runs)
    assert (runs[0] / "report.html").read_text().startswith("<!doctype html>")
    assert not (runs[1] / "report.html").exists()
    said = capsys.readouterr().out
    assert f"{runs[0] / 'report.html'} (" in said
    assert "two: timeline.jsonl is missing" in said


def test_the_same_run_gives_the_same_file_but_for_the_hour(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    texts = []
    for name in ("a.html", "b.html"):
        command([run], tmp_path / name)
        texts.append((tmp_path / name).read_text())
    first, second = (text.partition('"made":') for text in texts)
    assert first[0] == second[0]
    assert first[2].partition(",")[2] == second[2].partition(",")[2]


def test_the_folder_one_stands_in_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run(tmp_path / "mine")
    monkeypatch.chdir(run)
    command([Path(".")])
    assert "<title>mine</title>" in (run / "report.html").read_text()


def test_what_a_folder_is_called_does_not_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made_run(tmp_path / "\x1b[2Jrun\u202e")
    (run / "timeline.jsonl").unlink()
    command([run])
    said = capsys.readouterr()
    assert "\\x1b[2Jrun\\u202e: timeline.jsonl is missing" in said.out
    assert not set(said.out + said.err) & {"\x1b", "\u202e"}


def test_a_missing_tokenizer_is_answered_with_the_command_that_takes_one(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    (model,) = build([open_run(run)])["runs"]
    assert f"rlsys audit tokens {run} --tokenizer DIR" in model["audit"]["problem"]


@pytest.mark.parametrize("folder", ["nowhere", "."])
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, folder: str) -> None:
    with pytest.raises(UserError, match=r"no (folder|run)"):
        command([tmp_path / folder])


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    with pytest.raises(UserError, match="--out"):
        command([run], run / "config.yaml" / "report.html")
