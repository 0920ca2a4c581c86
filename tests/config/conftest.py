"""Fixtures of a valid config whose files exist."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from rlsys.config.compose import PROJECT_CONFIGS, as_dict, load_config, recorded, typed
from rlsys.config.schema import RunConfig, unions
from rlsys.search.index.folder import BM25, write_manifest
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


@cache
def _composed(groups: tuple[str, ...]) -> dict[str, Any]:
    return as_dict(load_config("searchr1_tiny_cpu", groups))


@pytest.fixture
def tiny_run(files: list[str]) -> Callable[..., RunConfig]:
    """Composes the tiny run with further overrides. Hydra, which is slow, runs once per choice of groups."""

    def compose(*overrides: str) -> RunConfig:
        of_group = [one for one in overrides if (PROJECT_CONFIGS / one.partition("=")[0]).is_dir()]
        tree = OmegaConf.create(_composed(tuple(of_group)))
        others = [*files, *(one for one in overrides if one not in of_group)]
        for one in OverridesParser.create().parse_overrides(others):
            key, value = one.key_or_group, one.value()
            if key in unions() and isinstance(value, str):
                key, value = f"{key}.kind", value
            group = key.removesuffix(".kind")
            if group != key and value != OmegaConf.select(tree, key):
                OmegaConf.update(tree, group, {}, merge=False)
            OmegaConf.update(tree, key, value, merge=True, force_add=True)
        config = typed(recorded(OmegaConf.to_container(tree)), RunConfig)
        assert isinstance(config, RunConfig)
        return config

    return compose
