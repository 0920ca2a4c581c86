"""A training that cannot be is refused before Ray, a model or a folder of the run is there."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import GPTNeoXConfig

from rlsys.apps.api import HttpRetriever, SearchR1Trainer
from rlsys.errors import RunError, UserError
from tests.support.tiny_models import POLICY

DEAD = "http://127.0.0.1:9"
ROWS = [{"question": f"what is {n}", "answers": [str(n)]} for n in range(20)]


@pytest.fixture
def not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of runs, none of which may be begun."""

    def begun(*_: Any) -> Any:
        raise AssertionError("the run has begun")

    monkeypatch.setattr("rlsys.train.train", begun)
    return tmp_path / "runs"


def train(model: Path, output_dir: Path, **more: Any) -> None:
    search = HttpRetriever(DEAD)
    trainer = SearchR1Trainer(model, search, devices="cpu", config="searchr1_tiny_cpu", output_dir=output_dir)
    trainer.train(ROWS, 1, 8, **more)


def test_a_search_server_that_is_down_is_named_once_the_settings_are_sound(not_begun: Path) -> None:
    with pytest.raises(RunError, match=DEAD):
        train(POLICY, not_begun)
    assert [path.name for path in not_begun.iterdir()] == ["questions"]
    with pytest.raises(UserError, match="resume=nowhere"):
        train(POLICY, not_begun, resume="nowhere")


def test_a_model_of_an_unknown_family_is_named_by_its_file(not_begun: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(POLICY, folder)
    (folder / "config.json").write_text(json.dumps(GPTNeoXConfig().to_dict()))
    with pytest.raises(UserError, match=re.escape(f"{folder}/config.json")):
        train(folder, not_begun)
