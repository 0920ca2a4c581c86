"""Tests of a chat's settings: from the model's run, from a config of unknown origin, or the defaults of Search-R1."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlsys.apps.chat.chat_settings import ChatOptions, ChatSettings, settings_for_requests, settings_of, template_of
from rlsys.apps.evaluation.evaluation_inputs import Model
from rlsys.config.compose import as_dict
from rlsys.data.question import own_template, search_prompt
from rlsys.errors import UserError
from rlsys.rollout.tools.interface import described, named_tools
from rlsys.search.index.folder import BM25, write_manifest
from tests.support.chat import write_rows
from tests.support.composed import composed
from tests.support.refusals import refused

RAW = ["Who am I?", "where is it", "Why?"]
ASKED = ["Who am I?", "where is it?", "Why?"]
CALCULATOR = "rlsys.rollout.tools.calculator.Calculator"
KIND = "nowhere.Backend"


def save(place: Path, tree: dict[str, Any], **changes: dict[str, Any]) -> None:
    """Write a config to the folder `place`, with changes to some of its groups."""
    place.mkdir(parents=True, exist_ok=True)
    changed = tree | {group: tree[group] | values for group, values in changes.items()}
    (place / "config.yaml").write_text(json.dumps(changed))  # Every JSON text is also YAML.


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    """The config of a run with an index and training rows."""
    config = as_dict(composed())
    index = tmp_path / "index"
    index.mkdir()
    write_manifest(index, BM25, {})
    write_rows(tmp_path / "train.jsonl", [f"Q: {asked}\nA:" for asked in ASKED], RAW)
    config["task"] |= {"train_path": str(tmp_path / "train.jsonl"), "max_turns": 7, "invalid_message": "No."}
    config["search"] |= {"url": "http://127.0.0.1:1", "index": str(index), "topk": 5}
    config["search"]["cassette"]["path"] = "recorded.jsonl"
    config["rollout"]["sampling"]["stop"] = ["</search>"]
    return config


@pytest.fixture
def run(tmp_path: Path, tree: dict[str, Any]) -> Path:
    """The folder of a run with the config `tree`."""
    save(tmp_path / "run", tree)
    (tmp_path / "run" / "run.json").write_text("{}")
    return tmp_path / "run"


def settings(folder: Path, **wanted: Any) -> ChatSettings:
    return settings_of(Model(folder / "hf", None), ChatOptions(**wanted))


def test_settings_come_from_the_models_run_or_its_checkpoint(run: Path, tree: dict[str, Any]) -> None:
    found = settings(run)
    config = found.config
    assert (config.task.max_turns, config.task.agent.invalid_message) == (7, "No.")
    assert config.rollout.sampling.stop == ["</search>"]
    assert (config.search.topk, config.search.index) == (5, str(run.parent / "index"))
    assert config.search.url is None, "the run's own server is gone"
    assert config.search.cassette.path is None, "new questions were not recorded"
    assert found.prompt("how far") == "Q: how far?\nA:"
    assert str(run / "config.yaml") in " ".join(found.notes)
    saved = run / "checkpoints" / "global_step_3"
    save(saved / "data", tree, task={"max_turns": 3})
    assert settings_of(Model(saved / "actor", run), ChatOptions()).config.task.max_turns == 3


def test_an_own_prompt_equals_that_of_prepared_rows(run: Path, tree: dict[str, Any]) -> None:
    """Training rows come from `rlsys data prepare own --prompt FILE --tool ...`."""
    save(run, tree, task={"tools": [CALCULATOR]})
    for text in ("{tools} Ask: {question}!", "You can calculate. Ask: {question}"):
        (run / "own.txt").write_text(text)
        trained = own_template(run / "own.txt", described(named_tools([CALCULATOR])) if "{tools}" in text else "")
        for question in ("Name a river", " why? "):
            assert settings(run, prompt=run / "own.txt").prompt(question) == trained(question)
    (run / "own.txt").write_text("{question} and {question}")
    with pytest.raises(UserError):
        settings(run, prompt=run / "own.txt")


@pytest.mark.parametrize("agent", ["react", "no_such_module.agent"])
def test_an_agent_that_a_chat_cannot_show_is_refused_without_importing_it(
    run: Path, tree: dict[str, Any], agent: str
) -> None:
    save(run, tree, task={"agent": {"kind": agent}})
    with refused("unsupported", "task.agent.kind"):
        settings(run)


def test_unknown_keys_of_another_version_are_left_out_and_reported(run: Path, tree: dict[str, Any]) -> None:
    tree["search"]["cassette"]["speed"] = 2
    save(run, tree, task={"speed_limit": 3})
    found = settings(run)
    assert found.config.task.max_turns == 7
    (note,) = (note for note in found.notes if "speed" in note)
    assert "search.cassette.speed" in note
    assert "task.speed_limit" in note
    assert "max_turns" not in note


def test_the_config_of_a_foreign_folder_is_not_used(tree: dict[str, Any], tmp_path: Path) -> None:
    """A Hugging Face folder may hold a config.yaml at the same relative path as a checkpoint."""
    hub = tmp_path / "a" / "b" / "c" / "hub"
    save(hub / "data", tree, search={"url": "http://evil.example", "index": None}, task={"tools": ["a.B"]})
    found = settings_of(Model(hub, None), ChatOptions(max_turns=0))
    assert (found.config.search.url, found.config.task.tools) == (None, [])


def test_limits_of_an_unknown_run_fit_into_the_context_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    task = settings_of(Model(tmp_path, None), ChatOptions(max_turns=0)).config.task
    assert task.max_total_tokens == 2048 - 6, "SGLang reserves 6"


@pytest.mark.parametrize("in_its_run", [False, True])
def test_tokens_and_tools_of_a_found_config_are_reported_and_not_trusted(
    run: Path, tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_its_run: bool
) -> None:
    monkeypatch.setenv("SECRET_KEY", "s")
    saved = run / "checkpoints" / "global_step_3" if in_its_run else tmp_path / "a" / "b" / "c" / "global_step_3"
    search = {"url": "http://search.example", "index": None, "index_kind": KIND, "token_env": "SECRET_KEY"}
    save(saved / "data", tree, search=search, task={"tools": [CALCULATOR]}, model={"family": "mine.yaml"})
    model = Model(saved / "actor", run, 3)
    found = settings_of(model, ChatOptions())
    assert found.config.search.token_env is None
    assert found.config.task.tools == (named_tools([CALCULATOR]) if in_its_run else [])
    notes = " ".join(found.notes)
    assert "The model searches http://search.example." in notes
    assert "search.token_env=SECRET_KEY is ignored, so no token is sent" in notes
    assert found.config.search.index_kind == (KIND if in_its_run else None)
    assert f"{'are used' if in_its_run else 'are ignored'}" in notes
    assert f"{CALCULATOR}, {KIND}, mine.yaml" in notes
    requests, _ = settings_for_requests(model, ChatOptions())
    assert found.config.model.family == requests.model.family == ("mine.yaml" if in_its_run else None)
    asked = settings_of(model, ChatOptions(search_url="http://127.0.0.1:8000"))
    assert asked.config.search.token_env is None


def test_a_conversation_has_the_tools_of_the_task_and_the_prompts_of_the_first_source(
    run: Path, tree: dict[str, Any]
) -> None:
    """The tools of a source are not imported: the modules here do not exist."""
    rows = {"train_path": tree["task"]["train_path"], "tools": ["no.such.Tool"], "reward": {"no.such.term": 1}}
    sources = {"one": rows, "two": rows | {"train_path": "none.jsonl"}}
    task = {"train_path": None, "eval_path": None, "sources": sources}
    save(run, tree, task=task | {"curriculum": {"easy_threshold": 0.9}})
    found = settings(run)
    assert found.prompt("how far") == "Q: how far?\nA:"
    assert (found.config.task.sources, found.config.task.tools, found.config.task.max_turns) == ({}, [], 7)


def test_interpolation_in_a_found_config_reads_nothing_of_the_environment(
    run: Path, tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_KEY", "s3cret")
    saved = tmp_path / "a" / "b" / "c" / "global_step_3"
    save(saved / "data", tree, search={"url": "http://evil.example/${oc.env:SECRET_KEY}", "index": None})
    found = settings_of(Model(saved / "actor", run, 3), ChatOptions())
    assert "s3cret" not in repr(found)


def test_an_invalid_config_of_a_run_is_refused(run: Path, tree: dict[str, Any]) -> None:
    for text in ("{", "[]", "a: 1", "task: 3\nsearch: {}\nrollout: {sampling: {}}"):
        (run / "config.yaml").write_text(text)
        with refused("malformed", run / "config.yaml"):
            settings(run)
    save(run, tree, task={"max_turns": "many"})
    with pytest.raises(UserError) as caught:
        settings(run)
    assert caught.value.key == str(run / "config.yaml")


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([f"<q>{asked}</q>" for asked in ASKED], "<q>how far?</q>"),
        ([f"Q {raw}" for raw in RAW], "Q how far"),
        ([search_prompt(raw) for raw in RAW], search_prompt("how far")),
        (["A Who am I?", "B where is it?", "A Why?"], None),
    ],
)
def test_the_prompt_template_is_inferred_from_rows(tmp_path: Path, prompts: list[str], expected: str | None) -> None:
    write_rows(tmp_path / "rows.jsonl", prompts, RAW)
    found = template_of(tmp_path / "rows.jsonl")
    assert (found and found("how far")) == expected
