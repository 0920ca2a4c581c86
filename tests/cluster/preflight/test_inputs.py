"""Model folders that lack something, and files of questions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlsys.cluster.preflight.examine import FindingState, data_findings, model_findings
from rlsys.weights.hf_io import INDEX


def wrong(folder: Path) -> list[str]:
    return [one.found for one in model_findings(folder) if one.state is FindingState.wrong]


def test_missing_and_short_files_are_named_together(model: Path) -> None:
    assert wrong(model) == []
    first, second = sorted(model.glob("*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    (model / "tokenizer.json").unlink()
    lacking, short, tokenizer = wrong(model)
    assert first.name in lacking
    assert second.name in short
    assert "tokenizer.json" in tokenizer
    for file in (second, model / INDEX):
        file.unlink()
    assert len(wrong(model)) == 2, "no weights at all, and the tokenizer"


@pytest.mark.parametrize("text", ["{", '{"weight_map": 3}'])
def test_a_damaged_index_is_said(model: Path, text: str) -> None:
    (model / INDEX).write_text(text)
    (damaged,) = wrong(model)
    assert str(model / INDEX) in damaged


@pytest.mark.parametrize(
    ("other", "says"), [({"intermediate_size": 128}, "128"), ({"num_hidden_layers": 5}, "12 tensors")]
)
def test_weights_of_another_model_are_found(model: Path, other: dict[str, int], says: str) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | other))
    (lacking,) = wrong(model)
    assert says in lacking


def test_a_tokenizer_without_an_end_is_said(model: Path) -> None:
    (model / "tokenizer_config.json").write_text("{}")
    (endless,) = wrong(model)
    assert str(model / "tokenizer_config.json") in endless
    (model / "special_tokens_map.json").write_text('{"eos_token": "a"}')
    assert wrong(model) == []


def test_the_first_row_is_read_as_the_run_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"prompt": "Who?"}\n')
    finding, question = data_findings("task.train_path", file)
    assert finding.state is FindingState.wrong
    assert "reward_model.ground_truth.target" in finding.found
    assert question is None
    file.write_text('{"prompt": "Who?", "solutions": ["me"]}\n{')
    finding, question = data_findings("task.train_path", file)
    assert finding.state is FindingState.ok
    assert question is not None
    assert question.answers == ("me",)
