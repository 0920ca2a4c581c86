"""The tiny policy, opened as a user would: against an evaluation of the same questions, and what cannot be opened."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner, Result

from rlsys.apps.chat.chat_settings import ChatSettings
from rlsys.apps.chat.conversation import EpisodeEnded, Event, Found, Observed, TextPiece, opened
from rlsys.apps.chat.web import serve_chat
from rlsys.apps.cli import chat
from rlsys.apps.evaluation.evaluation_inputs import EngineName, Model
from rlsys.apps.evaluation.execution import asking
from rlsys.config.compose import as_dict, load_config
from rlsys.data.question import Question
from rlsys.errors import RunError, UserError
from rlsys.weights.convert.conversion import hf_to_megatron
from tests.apps.chat.test_settings import write_rows
from tests.support.tiny import Search, search_server
from tests.support.tiny_models import POLICY

QUESTIONS = ["What is the country of Bielefeld?", "Iquique is in a country with which language?"]
Chat = Callable[..., Result]


@pytest.fixture
def search() -> Iterator[Search]:
    with search_server() as found:
        yield found


@pytest.fixture
def settings(search: Search) -> ChatSettings:
    """Of the tiny world, whose prompt is the question after a word."""
    config = load_config("searchr1_tiny_cpu", [f"search.url={search.url}"])
    return ChatSettings(config, lambda text: f"Question: {text}\n", ())


async def test_the_policy_answers_as_in_an_evaluation(settings: ChatSettings, search: Search) -> None:
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
            assert "".join(e.text for e in told if isinstance(e, TextPiece | Observed)) == one.response
            assert isinstance(told[-1], EpisodeEnded)
            assert (told[-1].answer, told[-1].searches) == (one.answer, one.searches)
    assert asked
    assert search.asked == [*asked, "Is anybody there?", *asked]


async def test_a_server_that_dies_in_the_middle_costs_a_search(settings: ChatSettings) -> None:
    with search_server() as dying:
        served = replace(settings.config, search=replace(settings.config.search, url=dying.url, retries=0))
        opening = opened(Model(POLICY, None), replace(settings, config=served), EngineName.transformers)
        chat = await opening.__aenter__()
    try:
        async with aclosing(chat.conversation.ask(QUESTIONS[1])) as events:
            told = [event async for event in events]
    finally:
        await opening.__aexit__(None, None, None)
    assert dying.url in next(event for event in told if isinstance(event, Found)).error
    assert isinstance(told[-1], EpisodeEnded)


async def test_a_server_that_is_down_is_said_before_the_first_question(settings: ChatSettings) -> None:
    down = replace(settings.config, search=replace(settings.config.search, url="http://127.0.0.1:9", retries=0))
    remedy = (
        r"127\.0\.0\.1:9 does not answer.*; start it with `rlsys search serve`, or name another with --search-url\.$"
    )
    with pytest.raises(RunError, match=remedy):
        async with opened(Model(POLICY, None), replace(settings, config=down), EngineName.transformers):
            pass


@pytest.fixture
def run_chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chat:
    app = typer.Typer()
    app.command()(chat.command)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object, typed: str = "") -> Result:
        return CliRunner().invoke(app, [str(one) for one in arguments], input=typed)

    return run


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--model", POLICY, "  "), "The question is empty"),
        (("--model", POLICY, "--web", "Who?"), "--web takes its questions from the page"),
        (("--model", POLICY, "--web", "--json"), "--web takes its questions from the page"),
        (("--model", "nowhere", "Who?"), "--model nowhere is not a folder"),
        (
            ("--model", ".", "Who?"),
            "--model . does not say what model it is of: it is no Hugging Face folder",
        ),
        (("--model", POLICY, "Who?"), "There is nothing to search"),
        (("--model", POLICY, "--max-turns", 0, "--engine", "x", "Who?"), "--engine x is not known"),
    ],
)
def test_a_mistake_is_one_sentence(run_chat: Chat, arguments: tuple[object, ...], sentence: str) -> None:
    outcome = run_chat(*arguments)
    assert isinstance(outcome.exception, UserError), outcome.output
    assert str(outcome.exception).startswith(sentence)


def test_a_folder_without_its_weights_or_tokenizer_is_one_sentence(run_chat: Chat, tmp_path: Path) -> None:
    half = tmp_path / "half"
    shutil.copytree(POLICY, half)
    (half / "model.safetensors").unlink()
    outcome = run_chat("--model", half, "--max-turns", 0, "--engine", "transformers", "Who?")
    assert isinstance(outcome.exception, UserError)
    assert "give a whole model folder" in str(outcome.exception)


@pytest.mark.parametrize(
    ("file", "text"), [("config.json", "[]"), ("config.json", '{"archit'), ("tokenizer.json", "[]")]
)
def test_a_damaged_folder_is_one_sentence(run_chat: Chat, tmp_path: Path, file: str, text: str) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(POLICY, damaged)
    (damaged / file).write_text(text)
    outcome = run_chat("--model", damaged, "--max-turns", 0, "--engine", "transformers", "Who?")
    assert isinstance(outcome.exception, UserError), outcome.exception
    assert len(str(outcome.exception).splitlines()) == 1


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the tiny policy, which is a Qwen2."""
    folder = tmp_path_factory.mktemp("megatron") / "qwen2"
    hf_to_megatron(POLICY, folder, processes=1)
    return folder


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "gpt2"}, "{hf}/config.json: model_type is gpt2, which is not supported; use one of llama, qwen2,"),
        ({"model_type": "qwen3"}, "{checkpoint} lacks "),
        (
            {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
            "{checkpoint} has 4 weights that this model does not have, first decoder.layers.0.self_attention.linear_qkv.bias;",
        ),
    ],
)  # fmt: skip
def test_an_original_of_another_family_is_one_sentence(
    run_chat: Chat, checkpoint: Path, tmp_path: Path, change: dict[str, object], sentence: str
) -> None:
    hf = tmp_path / "other"
    shutil.copytree(POLICY, hf)
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(config | change))
    outcome = run_chat("--model", checkpoint, "--hf", hf, "--max-turns", 0, "--engine", "transformers", "Who?")
    assert isinstance(outcome.exception, UserError), outcome.exception
    (told,) = str(outcome.exception).splitlines()
    assert told.startswith(sentence.format(hf=hf, checkpoint=checkpoint))


def test_a_folder_of_an_unknown_family_is_asked_by_transformers(run_chat: Chat, tmp_path: Path) -> None:
    """It knows more families than can be trained."""
    folder = tmp_path / "gpt2"
    shutil.copytree(POLICY, folder)
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    tiny = GPT2Config(vocab_size=json.loads((POLICY / "config.json").read_text())["vocab_size"], **sizes)
    GPT2LMHeadModel(tiny).save_pretrained(folder)
    asked = ("--model", folder, "--max-turns", 0, "--engine", "transformers", "--json", "Who?")
    outcome = run_chat(*asked)
    assert outcome.exception is None, outcome.output
    assert '"event": "ended"' in outcome.stdout
    (folder / "model.safetensors").unlink()
    outcome = run_chat(*asked)
    assert isinstance(outcome.exception, UserError)
    assert str(folder) in str(outcome.exception)
    assert len(str(outcome.exception).splitlines()) == 1


def test_a_closed_standard_input_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match=r"standard input .* is closed: give a question"):
        chat.command(POLICY)


@pytest.mark.parametrize(("host", "shared"), [("127.0.0.2", False), ("localhost", False), ("0.0.0.0", True)])
async def test_who_can_reach_the_page_is_said_where_others_can(
    host: str,
    shared: bool,
    settings: ChatSettings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def served(*_: object) -> None:
        pass

    monkeypatch.setattr("rlsys.apps.chat.web.serve", served)
    await serve_chat(Model(POLICY, None), settings, EngineName.transformers, host, 0)
    assert ("no password is asked for" in capsys.readouterr().err) == shared


async def test_a_cancelled_load_is_not_waited_for(settings: ChatSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the end of the program either: asyncio waits for threads of its own."""
    begun, release = threading.Event(), threading.Event()

    def slow(_: object) -> None:
        begun.set()
        release.wait()

    monkeypatch.setattr("rlsys.apps.evaluation.execution._transformers", slow)
    opening = opened(Model(POLICY, None), settings, EngineName.transformers)
    loading = asyncio.ensure_future(opening.__aenter__())
    while not begun.is_set():
        await asyncio.sleep(0.01)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    await asyncio.get_running_loop().shutdown_default_executor()
    release.set()


def test_a_taken_port_is_one_sentence(run_chat: Chat) -> None:
    with search_server() as taken:
        port = taken.url.rpartition(":")[2]
        outcome = run_chat("--model", POLICY, "--max-turns", 0, "--web", "--port", port)
    assert isinstance(outcome.exception, UserError)
    assert "choose another host or port" in str(outcome.exception)


def test_a_program_pipes_questions_and_reads_events(tmp_path: Path, search: Search) -> None:
    """As its own process, since the command reads a real descriptor; the settings come from the run's folder."""
    run = tmp_path / "run"
    shutil.copytree(POLICY, run / "hf")
    write_rows(tmp_path / "train.jsonl", [f"Question: {text}\n" for text in QUESTIONS], QUESTIONS)
    config = load_config("searchr1_tiny_cpu", [f"task.train_path={tmp_path / 'train.jsonl'}"])
    (run / "config.yaml").write_text(json.dumps(as_dict(config)))
    (run / "run.json").write_text("{}")
    program = "from rlsys.apps.cli import chat; import typer; from rlsys.apps.cli.main import run_command; "
    program += "app = typer.Typer(); app.command()(chat.command); run_command(app)"
    done = subprocess.run(
        [sys.executable, "-c", program, "--model", str(run / "hf"), "--search-url", search.url, "--json"],
        input="\n".join(QUESTIONS),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["question"] for one in events if one["event"] == "asked"] == QUESTIONS
    assert [one["prompt"] for one in events if one["event"] == "asked"] == [f"Question: {q}\n" for q in QUESTIONS]
    assert sum(one["event"] == "ended" for one in events) == 2
    assert f"Asked as {run / 'config.yaml'} says." in done.stderr
