"""A config that is valid, on files that exist."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlsys.config.compose import load_config
from rlsys.config.schema import RunConfig

SHAPE = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Overrides that point the tiny run at a model, questions and an index of this test."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SHAPE))
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "manifest.json").write_text("{}")
    (tmp_path / "questions.jsonl").write_text("{}\n")
    return [
        f"model.path={tmp_path / 'model'}",
        f"search.index={tmp_path / 'index'}",
        f"task.train_path={tmp_path / 'questions.jsonl'}",
        f"task.eval_path={tmp_path / 'questions.jsonl'}",
    ]


@pytest.fixture
def tiny_run(files: list[str]) -> Callable[..., RunConfig]:
    """Compose the tiny run with further overrides."""
    return lambda *overrides: load_config("searchr1_tiny_cpu", [*files, *overrides])
