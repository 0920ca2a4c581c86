"""Sets of questions by name and by file."""

from __future__ import annotations

import json
from pathlib import Path

from rlsys.apps.evaluation.evaluation_inputs import find_sources, questions_of
from rlsys.config.schema import RunConfig
from tests.support.refusals import refused


def write(file: Path, *sources: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"question": f"Who is {n}?", "golden_answers": ["x"], "data_source": name} for n, name in enumerate(sources)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_the_reported_split_is_asked_whatever_else_is_there(tmp_path: Path) -> None:
    for split in ("train", "dev", "test"):
        write(tmp_path / "nq" / f"{split}.jsonl", "nq")
        write(tmp_path / "hotpotqa" / f"{split}.jsonl", "hotpotqa")
    found = find_sources(["nq", "hotpotqa"], tmp_path)
    assert [str(one.path.relative_to(tmp_path)) for one in found] == ["nq/test.jsonl", "hotpotqa/dev.jsonl"]


def test_all_missing_sets_are_named_with_their_commands(tmp_path: Path) -> None:
    write(tmp_path / "nq" / "train.jsonl", "nq")
    write(tmp_path / "popqa" / "test.jsonl", "popqa")
    with refused("not_found", "--data") as caught:
        find_sources(["nq", "popqa", "musique"], tmp_path)
    sentence = str(caught.value)
    assert f"`rlsys data prepare nq --out {tmp_path} && rlsys data prepare musique --out {tmp_path}`" in sentence
    assert "popqa" not in sentence


def test_an_unknown_set_and_one_that_is_named_twice_are_refused(tmp_path: Path) -> None:
    with refused("unknown", "--data"):
        find_sources(["triviqa"], tmp_path)
    file = write(tmp_path / "nq" / "test.jsonl", "nq")
    with refused("conflict", "--data"):
        find_sources(["nq", str(file)], tmp_path)


def test_questions_of_two_files_of_one_name_have_ids_of_their_own(tmp_path: Path) -> None:
    write(tmp_path / "nq" / "test.jsonl", "nq", "nq")
    write(tmp_path / "popqa" / "test.jsonl", "popqa", "")
    questions = questions_of(find_sources(["nq", "popqa"], tmp_path), RunConfig())
    assert [one.uid for one in questions] == ["nq/test:1", "nq/test:2", "popqa/test:1", "popqa/test:2"]
    assert [one.data_source for one in questions] == ["nq", "nq", "popqa", "popqa"]
