"""The published run on one node, complete on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlsys.config.compose import load_config
from rlsys.config.schema import RunConfig
from tests.cluster.preflight.machine import save_model
from tests.support.tiny_shape import SHAPE

ROW = {"prompt": "Who?", "question": "Who wrote it?", "solutions": ["me"]}
Compose = Callable[..., RunConfig]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE | {"max_position_embeddings": 8192}))
    save_model(folder)
    return folder


@pytest.fixture
def node_run(tmp_path: Path, model: Path) -> Compose:
    """Compose the run of one node of eight GPUs with further overrides."""
    (tmp_path / "questions.jsonl").write_text(json.dumps(ROW) + "\n")
    files = [
        f"model.path={model}",
        f"output_dir={tmp_path / 'outputs'}",
        f"task.train_path={tmp_path / 'questions.jsonl'}",
        f"task.eval_path={tmp_path / 'questions.jsonl'}",
    ]
    return lambda *overrides: load_config("searchr1_qwen2.5_3b_1node", [*files, *overrides])
