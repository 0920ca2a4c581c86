"""Tests that the API's arguments become the settings and question files of a run."""

import datetime
import json
from pathlib import Path
from typing import Any

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
    quoted,
    read_data,
    training_files,
)
from rlsys.config.compose import load_config
from rlsys.data.question import read_questions, search_prompt
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


HAMLET: dict[str, Any] = {"question": "who wrote Hamlet", "golden_answers": ["Shakespeare"]}
OWN = {"query": "who wrote Hamlet", "answers": "Shakespeare", "hops": 1}
SEARCH_R1 = {"prompt": [{"role": "user", "content": "Q?"}], "reward_model": {"ground_truth": {"target": ["A"]}}}


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


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
