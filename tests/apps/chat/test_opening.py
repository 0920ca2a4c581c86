"""Tests of opening a chat: wrong arguments, and questions from a pipe."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlsys.apps.cli import chat
from rlsys.apps.cli.main import app
from rlsys.config.compose import as_dict, load_config
from rlsys.errors import Code
from tests.support.chat import write_rows
from tests.support.refusals import refused
from tests.support.tiny import search_server
from tests.support.tiny_models import POLICY

QUESTIONS = ["What is the country of Bielefeld?", "Iquique is in a country with which language?"]


@pytest.mark.parametrize(
    ("arguments", "code", "key"),
    [
        ((POLICY, "--web", "Who?"), "conflict", "--web"),
        ((".", "Who?"), "missing", "--hf"),
        ((POLICY, "Who?"), "missing", "--search-url"),
        ((POLICY, "--search-url", "http://a:1", "--index", "b", "Who?"), "conflict", "--index"),
        ((POLICY, "--max-turns", 0, "--engine", "x", "Who?"), "unknown", "--engine"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: tuple[object, ...], code: Code, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with refused(code, key):
        CliRunner().invoke(app, ["chat", "--model", *map(str, arguments)], catch_exceptions=False)


@pytest.mark.slow
def test_piped_questions_are_answered_as_json_events(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings are read from the run's folder."""
    run = tmp_path / "run"
    shutil.copytree(POLICY, run / "hf")
    write_rows(tmp_path / "train.jsonl", [f"Question: {text}\n" for text in QUESTIONS], QUESTIONS)
    config = load_config("searchr1_tiny_cpu", [f"task.train_path={tmp_path / 'train.jsonl'}"])
    (run / "config.yaml").write_text(json.dumps(as_dict(config)))
    (run / "run.json").write_text("{}")
    (tmp_path / "typed").write_text("\n".join(QUESTIONS))
    with search_server() as search, (tmp_path / "typed").open() as typed:  # The command reads a real descriptor.
        monkeypatch.setattr(sys, "stdin", typed)
        chat.command(run / "hf", search_url=search.url, as_json=True)
    said = capfd.readouterr()
    events = [json.loads(line) for line in said.out.splitlines()]
    assert [one["question"] for one in events if one["event"] == "asked"] == QUESTIONS
    assert [one["prompt"] for one in events if one["event"] == "asked"] == [f"Question: {q}\n" for q in QUESTIONS]
    assert sum(one["event"] == "ended" for one in events) == 2
    assert str(run / "config.yaml") in said.err
