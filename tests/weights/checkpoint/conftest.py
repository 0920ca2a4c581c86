"""Fixture of the model whose checkpoints these tests make."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import tiny_configs
from tests.trainer import reference


@pytest.fixture(scope="session")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hugging Face folder of a Qwen3 model with 3 layers."""
    return reference.make_model(tiny_configs.qwen3(), tmp_path_factory.mktemp("model") / "hf")
