"""Tests that the API's arguments become the settings and question files of a run."""

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from rlsys.apps.api.arguments import (
    ArgumentSettings,
    Files,
    compose_settings,
    of_devices,
    of_reward,
    quoted,
    read_data,
    training_files,
)
from rlsys.config.compose import load_config
from rlsys.data.question import Question, read_questions, search_prompt
from rlsys.errors import Code, UserError
from tests.support.refusals import refused

TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)
ODD = st.text(st.sampled_from("a/ .,:=\\'\"${}[]()%#&~+-0null"), max_size=12)
NUMBER = st.integers() | st.floats(allow_nan=False, allow_infinity=False)


@given(TEXT | ODD | NUMBER | st.booleans() | st.none() | st.lists(NUMBER | ODD, max_size=3))
@example("\\${")
@example("a\\\\${b}\\")
def test_any_quoted_value_survives_hydra_and_omegaconf(value: Any) -> None:
    parsed = OverridesParser.create().parse_override(f"key={quoted(value)}").value()
    found = OmegaConf.to_container(OmegaConf.create({"key": parsed}), resolve=True)
    assert isinstance(found, dict)
    assert found["key"] == value
    assert type(found["key"]) is type(value)


@pytest.mark.parametrize(
    ("key", "override"),
    [
        ("trainer.steps", "trainer.steps=4"),
        ("trainer.steps", "trainer={steps: 9}"),
        ("model.path", "model={path: b}"),
        ("cluster.placement.actor", "++cluster.placement={actor: 0-3}"),
    ],
)
def test_a_setting_given_twice_is_refused_also_within_a_section(key: str, override: str) -> None:
    with refused("conflict", "mine"):
        compose_settings("x", [ArgumentSettings("mine", {key: 1})], [override])


@pytest.mark.parametrize(
    ("devices", "actor", "inference", "rollout"),
    [([5, 4], "4-5", "4-5", "4-5"), (3, "0", "1", "2"), ([0, 2, 3, 6], "0,2", "3", "6"), (16, "0-7", "8-11", "12-15")],
)
def test_devices_are_divided_among_the_groups(devices: Any, actor: str, inference: str, rollout: str) -> None:
    config = load_config("searchr1_qwen2.5_3b_1node", [f"{k}={quoted(v)}" for k, v in of_devices(devices).items()])
    assert config.cluster.placement == {"actor": actor, "inference": inference, "rollout": rollout}
    assert (config.trainer.schedule.kind == "sequential") == (config.cluster.mode == "colocated")


@pytest.mark.parametrize("devices", [0, True, [0, 0], [-1], ["0"], "gpu"])
def test_invalid_devices_are_refused(devices: Any) -> None:
    with refused("out_of_range", "devices"):
        of_devices(devices)


def test_a_reward_may_hold_terms_and_settings() -> None:
    terms = {"exact_match": 1.0, "format": 0.5, "tests.support.tiny_models.even_tokens": 0.1}
    given_ = terms | {"structure_score": 0.3, "judge": {"retries": 2}}
    reward = load_config("searchr1_tiny_cpu", [f"{k}={quoted(v)}" for k, v in of_reward(given_).items()]).reward
    assert (reward.terms, reward.structure_score, reward.judge.retries) == (terms, 0.3, 2)
    assert of_reward({"terms": {"f1": 1}}) == {"reward.terms.f1": 1}


@pytest.mark.parametrize(
    ("reward", "code", "key"),
    [
        ({"exact_match": "much"}, "unknown", ": exact_match"),
        ({"judge": 3}, "wrong_type", ": judge"),
        (["exact_match"], "wrong_type", ""),
        ({"judge": {"uri": "x"}}, "unknown", ": judge.uri"),
    ],
)
def test_an_invalid_reward_is_refused(reward: Any, code: Code, key: str) -> None:
    with refused(code, "reward_config" + key):
        of_reward(reward)


HAMLET: dict[str, Any] = {"question": "who wrote Hamlet", "golden_answers": ["Shakespeare"]}
OWN = {"query": "who wrote Hamlet", "answers": "Shakespeare", "hops": 1}
SEARCH_R1 = {"prompt": [{"role": "user", "content": "Q?"}], "reward_model": {"ground_truth": {"target": ["A"]}}}


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_questions_survive_being_written_and_read(tmp_path: Path) -> None:
    given = Question("x:1", "My own prompt", ("a", "b"), "mine", {"hops": 2}, "raw?")
    (found,) = read_questions(read_data([given], "train_data").path(tmp_path))
    expected = (given.prompt, given.answers, given.data_source, given.extra, given.text)
    assert (found.prompt, found.answers, found.data_source, dict(found.extra), found.text) == expected


def test_numpy_values_of_a_data_frame_are_written_as_plain_values(tmp_path: Path) -> None:
    row = {"question": "who?", "answers": np.array(["a", "b"]), "id": np.int64(3), "score": np.float32(0.5)}
    plain = {"question": "who?", "golden_answers": ["a", "b"], "id": 3, "score": 0.5}
    assert json.loads(read_data([row], "train_data").path(tmp_path).read_text()) == plain


def test_the_same_questions_are_written_to_the_same_file(tmp_path: Path) -> None:
    rows = [{"question": f"what is {n}", "answers": [str(n)]} for n in range(20)]
    first = training_files(rows, None, 5, tmp_path)
    assert training_files(list(rows), None, 5, tmp_path) == first
    assert training_files(rows[:-1], None, 5, tmp_path).train != first.train
    asked = [{one.text for one in read_questions(path)} for path in (first.train, first.heldout)]
    assert first.questions == 15
    assert (len(asked[0]), len(asked[1]), asked[0] & asked[1]) == (15, 5, set())


def test_a_file_in_the_runs_format_is_used_unchanged(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "t.jsonl", HAMLET, SEARCH_R1)
    other = jsonl(tmp_path / "h.jsonl", {**SEARCH_R1, "prompt": "Another?"})
    assert training_files(train, str(other), None, tmp_path / "files") == Files(train, other, 2)
    assert not (tmp_path / "files").exists()


def test_own_field_names_and_tables_are_converted_to_a_new_file(tmp_path: Path) -> None:
    table = tmp_path / "q.csv"
    table.write_text("question,answer\nwho wrote Hamlet,Shakespeare\n")
    for source in (jsonl(tmp_path / "own.jsonl", OWN), table):
        path = read_data(source, "train_data").path(tmp_path / "files")
        (found,) = read_questions(path)
        assert found.prompt == search_prompt("who wrote Hamlet")
        assert path.parent == tmp_path / "files"


@pytest.mark.parametrize(
    ("data", "code", "key"),
    [
        ([HAMLET, {"question": "and the answer?"}], None, "line 2"),
        ([], "empty", "train_data"),
        (7, "wrong_type", "train_data"),
        ([{**OWN, "asked": datetime.date(2020, 1, 1)}], "wrong_type", "line 1"),
        (Path(__file__).parent, "not_found", str(Path(__file__).parent)),
    ],
)
def test_a_bad_row_is_refused_with_its_position(tmp_path: Path, data: Any, code: Code | None, key: str) -> None:
    with pytest.raises(UserError) as caught:
        training_files(data, None, None, tmp_path)
    assert code in (None, caught.value.code)
    assert key in f"{caught.value.key} {caught.value}"
    assert not list(tmp_path.iterdir())
