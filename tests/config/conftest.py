"""Fixtures of a valid config whose files exist."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlsys.config.schema import RunConfig
from rlsys.search.index.folder import BM25, write_manifest
from tests.support.composed import composed
from tests.support.tiny_shape import SHAPE


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Overrides that point the tiny run at a model, questions and an index of this test."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SHAPE))
    (tmp_path / "index").mkdir()
    write_manifest(tmp_path / "index", BM25, {})
    (tmp_path / "questions.jsonl").write_text("{}\n")
    return [
        f"model.path={tmp_path / 'model'}",
        f"search.index={tmp_path / 'index'}",
        f"task.train_path={tmp_path / 'questions.jsonl'}",
        f"task.eval_path={tmp_path / 'questions.jsonl'}",
    ]


@pytest.fixture
def tiny_run(files: list[str]) -> Callable[..., RunConfig]:
    """Composes the tiny run with further overrides."""
    return lambda *overrides: composed(*files, *overrides)
