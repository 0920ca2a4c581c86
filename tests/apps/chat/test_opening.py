"""The tiny policy, opened as a user would: against an evaluation of the same questions, and what cannot be opened."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from rlsys.apps.chat.chat_settings import ChatSettings
from rlsys.apps.chat.conversation import EpisodeEnded, Event, ObservationAdded, TextPiece, opened
from rlsys.apps.cli import chat
from rlsys.apps.evaluation.evaluation_inputs import EngineName, Model
from rlsys.apps.evaluation.execution import asking
from rlsys.config.compose import as_dict, load_config
from rlsys.data.question import Question
from rlsys.errors import Code
from tests.support.chat import write_rows
from tests.support.refusals import refused
from tests.support.tiny import Search, search_server
from tests.support.tiny_models import POLICY

QUESTIONS = ["What is the country of Bielefeld?", "Iquique is in a country with which language?"]


@pytest.fixture
def search() -> Iterator[Search]:
    with search_server() as found:
        yield found


@pytest.fixture
def settings(search: Search) -> ChatSettings:
    """Settings for the tiny world, whose prompt is the question after a word."""
    config = load_config("searchr1_tiny_cpu", [f"search.url={search.url}"])
    return ChatSettings(config, lambda text: f"Question: {text}\n", ())


async def test_the_policy_answers_as_in_an_evaluation_once_the_server_has(
    settings: ChatSettings, search: Search
) -> None:
    model = Model(POLICY, None)
    config = replace(settings.config, model=replace(settings.config.model, path=str(POLICY)))
    async with asking(config, EngineName.transformers) as ask:
        played = [await ask(Question(text, f"Question: {text}\n", ()), 0, 0.0) for text in QUESTIONS]
    asked = list(search.asked)
    async with opened(model, settings, EngineName.transformers) as chat:
        assert (chat.search, chat.max_turns, chat.temperature) == (search.url, 3, 0.0)
        for text, one in zip(QUESTIONS, played, strict=True):
            async with aclosing(chat.conversation.ask(text)) as events:
                told: list[Event] = [event async for event in events]
            assert "".join(e.text for e in told if isinstance(e, TextPiece | ObservationAdded)) == one.response
            assert isinstance(told[-1], EpisodeEnded)
            assert (told[-1].answer, told[-1].searches) == (one.answer, one.searches)
    assert asked
    assert search.asked == [*asked, "Is anybody there?", *asked]


@pytest.mark.parametrize(
    ("arguments", "code", "key"),
    [
        ((POLICY, "  "), "empty", "QUESTION"),
        ((POLICY, "--web", "Who?"), "conflict", "--web"),
        (("nowhere", "Who?"), "not_found", "nowhere"),
        ((".", "Who?"), "missing", "--hf"),
        ((POLICY, "Who?"), "missing", "--search-url"),
        ((POLICY, "--search-url", "http://a:1", "--index", "b", "Who?"), "conflict", "--index"),
        ((POLICY, "--max-turns", 0, "--engine", "x", "Who?"), "unknown", "--engine"),
    ],
)
def test_a_mistake_is_refused(
    arguments: tuple[object, ...], code: Code, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = typer.Typer()
    app.command()(chat.command)
    monkeypatch.chdir(tmp_path)
    outcome = CliRunner().invoke(app, ["--model", *map(str, arguments)])
    with refused(code, key):
        raise outcome.exception or AssertionError(outcome.output)


def test_a_closed_standard_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with refused("missing", "QUESTION"):
        chat.command(POLICY)


async def test_a_cancelled_load_is_not_waited_for(settings: ChatSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the end of the program either: asyncio waits for threads of its own."""
    begun, release = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow(_: object) -> None:
        loop.call_soon_threadsafe(begun.set)
        release.wait()

    monkeypatch.setattr("rlsys.apps.evaluation.execution._transformers", slow)
    opening = opened(Model(POLICY, None), settings, EngineName.transformers)
    loading = asyncio.ensure_future(opening.__aenter__())
    await begun.wait()
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    await loop.shutdown_default_executor()
    release.set()


def test_a_program_pipes_questions_and_reads_events(
    tmp_path: Path, search: Search, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings come from the run's folder."""
    run = tmp_path / "run"
    shutil.copytree(POLICY, run / "hf")
    write_rows(tmp_path / "train.jsonl", [f"Question: {text}\n" for text in QUESTIONS], QUESTIONS)
    config = load_config("searchr1_tiny_cpu", [f"task.train_path={tmp_path / 'train.jsonl'}"])
    (run / "config.yaml").write_text(json.dumps(as_dict(config)))
    (run / "run.json").write_text("{}")
    (tmp_path / "typed").write_text("\n".join(QUESTIONS))
    with (tmp_path / "typed").open() as typed:  # The command reads a real descriptor.
        monkeypatch.setattr(sys, "stdin", typed)
        chat.command(run / "hf", search_url=search.url, as_json=True)
    said = capfd.readouterr()
    events = [json.loads(line) for line in said.out.splitlines()]
    assert [one["question"] for one in events if one["event"] == "asked"] == QUESTIONS
    assert [one["prompt"] for one in events if one["event"] == "asked"] == [f"Question: {q}\n" for q in QUESTIONS]
    assert sum(one["event"] == "ended" for one in events) == 2
    assert str(run / "config.yaml") in said.err
