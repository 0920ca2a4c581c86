"""Settings of a conversation: of the model's run, of a config, or Search-R1's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlsys.apps.chat.chat_settings import ChatOptions, ChatSettings, settings_of, template_of
from rlsys.apps.evaluation.evaluation_inputs import Model
from rlsys.config.compose import as_dict, load_config
from rlsys.data.question import own_template, search_prompt
from rlsys.errors import Code, UserError
from rlsys.rollout.tools.interface import described
from tests.support.refusals import refused

ROWS = [("Who am I?", "Who am I?"), ("where is it", "where is it?"), ("Why?", "Why?")]


def write_rows(file: Path, prompts: list[str], questions: list[str]) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": prompt}],
            "reward_model": {"ground_truth": {"target": ["x"]}},
            "extra_info": {"question": question},
        }
        for prompt, question in zip(prompts, questions, strict=True)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder: its config, an index and the rows that it was trained on."""
    config = as_dict(load_config("searchr1_tiny_cpu"))
    index = tmp_path / "index"
    index.mkdir()
    (index / "manifest.json").write_text("{}")
    write_rows(tmp_path / "train.jsonl", [f"Q: {asked}\nA:" for _, asked in ROWS], [raw for raw, _ in ROWS])
    config["task"] |= {"train_path": str(tmp_path / "train.jsonl"), "max_turns": 7, "invalid_message": "No."}
    config["search"] |= {"url": "http://127.0.0.1:1", "index": str(index), "topk": 5}
    config["search"]["cassette"]["path"] = "recorded.jsonl"
    config["rollout"]["sampling"]["stop"] = ["</search>"]
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    save(folder, config)
    return folder


def save(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def saved_with(folder: Path, place: Path, **changes: dict[str, Any]) -> None:
    """Write the config of the run in `folder` to `place`, with changes of each group."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    place.mkdir(parents=True, exist_ok=True)
    save(place, config | {group: config[group] | values for group, values in changes.items()})


def settings(folder: Path, **wanted: Any) -> ChatSettings:
    return settings_of(Model(folder / "hf", None), ChatOptions(**wanted))


def test_a_model_is_asked_as_its_run_says(run: Path) -> None:
    found = settings(run)
    config = found.config
    assert (config.task.max_turns, config.task.invalid_message) == (7, "No.")
    assert config.rollout.sampling.stop == ["</search>"]
    assert (config.search.topk, config.search.index) == (5, str(run.parent / "index"))
    assert config.search.url is None, "the run's own server is gone"
    assert config.search.cassette.path is None, "what is asked now was not recorded"
    assert found.prompt("how far") == "Q: how far?\nA:"
    assert str(run / "config.yaml") in " ".join(found.notes)


def test_a_checkpoint_is_asked_as_it_says_itself(run: Path) -> None:
    saved = run / "checkpoints" / "global_step_3"
    (saved / "data").mkdir(parents=True)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["task"]["max_turns"] = 3
    save(saved / "data", config)
    assert settings_of(Model(saved / "actor", run), ChatOptions()).config.task.max_turns == 3


def test_a_prompt_of_ones_own_is_that_of_prepared_rows(run: Path) -> None:
    """`rlsys data prepare own --prompt FILE --tool ...` makes the rows that a model was trained on."""
    calculator = "rlsys.rollout.tools.calculator.Calculator"
    saved_with(run, run, task={"tools": [calculator]})
    for text in ("{tools} Ask: {question}!", "You can calculate. Ask: {question}"):
        (run / "own.txt").write_text(text)
        trained = own_template(run / "own.txt", described([calculator]) if "{tools}" in text else "")
        for question in ("Name a river", " why? "):
            assert settings(run, prompt=run / "own.txt").prompt(question) == trained(question)
    (run / "own.txt").write_text("{question} and {question}")
    with pytest.raises(UserError):
        settings(run, prompt=run / "own.txt")


def test_a_folder_from_anywhere_is_not_believed(run: Path, tmp_path: Path) -> None:
    """A Hugging Face folder that brings a config of its own, which a checkpoint of a run would have there."""
    hub = tmp_path / "a" / "b" / "c" / "hub"
    saved_with(run, hub / "data", search={"url": "http://evil.example", "index": None}, task={"tools": ["a.B"]})
    found = settings_of(Model(hub, None), ChatOptions(max_turns=0))
    assert (found.config.search.url, found.config.task.tools) == (None, [])


def test_tokens_and_tools_of_a_found_config_are_named_and_not_trusted(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_KEY", "s")
    tools = ["rlsys.rollout.tools.calculator.Calculator"]
    changes: dict[str, Any] = {
        "search": {"url": "http://search.example", "index": None, "token_env": "SECRET_KEY"},
        "task": {"tools": tools},
    }
    alone = tmp_path / "a" / "b" / "c" / "global_step_3"
    within = run / "checkpoints" / "global_step_3"
    for saved, kept in ((alone, []), (within, tools)):
        saved_with(run, saved / "data", **changes)
        model = Model(saved / "actor", run, 3)
        found = settings_of(model, ChatOptions())
        assert found.config.search.token_env is None
        assert found.config.task.tools == kept
        notes = " ".join(found.notes)
        assert "It searches http://search.example." in notes
        assert "search.token_env=SECRET_KEY is not sent anywhere" in notes
        assert ("Its tools are used" if kept else "Its tools are left out") in notes
        asked = settings_of(model, ChatOptions(search_url="http://127.0.0.1:8000"))
        assert asked.config.search.token_env is None


def test_keys_of_another_version_are_left_out_and_named(run: Path) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["task"]["eval_limit"] = 3
    config["search"]["cassette"]["speed"] = 2
    save(run, config)
    found = settings(run)
    assert found.config.task.max_turns == 7
    left_out = found.notes[1].rpartition("left out: ")[2].rstrip(".").split(", ")
    assert set(left_out) == {"search.cassette.speed", "task.eval_limit"}


@pytest.mark.parametrize(
    ("wanted", "code", "key"),
    [
        ({}, "missing", "--search-url"),
        ({"search_url": "x"}, "malformed", "--search-url"),
        ({"search_url": "http://a:1", "index": Path("b")}, "conflict", "--index"),
    ],
)
def test_a_wish_that_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Any], code: Code, key: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with refused(code, key):
        settings(tmp_path / "a" / "b" / "c" / "d", **wanted)


@pytest.mark.parametrize("text", ["{", "[]", "a: 1", "task: 3\nsearch: {}\nrollout: {sampling: {}}"])
def test_a_file_that_is_no_config_of_a_run_is_refused(run: Path, text: str) -> None:
    (run / "config.yaml").write_text(text)
    with refused("malformed", run / "config.yaml"):
        settings(run)


def test_a_value_of_another_type_is_refused(run: Path) -> None:
    saved_with(run, run, task={"max_turns": "many"})
    with pytest.raises(UserError) as caught:
        settings(run)
    assert caught.value.key == str(run / "config.yaml")


def test_the_template_is_read_off_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    raw = [one for one, _ in ROWS]
    for prompts, expected in (
        ([f"<q>{asked}</q>" for _, asked in ROWS], "<q>how far?</q>"),
        ([f"Q {one}" for one in raw], "Q how far"),
        ([search_prompt(one) for one in raw], search_prompt("how far")),
    ):
        write_rows(file, prompts, raw)
        found = template_of(file)
        assert found is not None
        assert found("how far") == expected
    write_rows(file, ["A Who am I?", "B where is it?", "A Why?"], raw)
    assert template_of(file) is None
