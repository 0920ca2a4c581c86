"""Model folders that lack something, and files of questions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlsys.cluster.preflight.examine import FindingState, data_findings, model_findings
from rlsys.weights.hf_io import INDEX


def wrong(folder: Path) -> list[str]:
    return [one.found for one in model_findings(folder) if one.state is FindingState.wrong]


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def test_missing_and_short_files_are_named_together(model: Path) -> None:
    assert wrong(model) == []
    first, second = shards(model)
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    (model / "tokenizer.json").unlink()
    lacking, short, tokenizer = wrong(model)
    assert first.name in lacking
    assert second.name in short
    assert "tokenizer.json" in tokenizer


def test_a_folder_with_a_config_alone_holds_no_weights(model: Path) -> None:
    for file in [*shards(model), model / INDEX]:
        file.unlink()
    assert len(wrong(model)) == 1


@pytest.mark.parametrize("text", ["{", '{"weight_map": 3}'])
def test_a_damaged_index_is_said(model: Path, text: str) -> None:
    (model / INDEX).write_text(text)
    (damaged,) = wrong(model)
    assert str(model / INDEX) in damaged


def test_weights_of_another_model_are_found(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    assert len(wrong(model)) == 1
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    (lacking,) = wrong(model)
    assert "12 tensors" in lacking


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
