"""What is wrong with what a training is given: a sentence, before Ray, a model or a folder of the run is there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, GPTNeoXConfig

from rlsys.apps.api import HttpRetriever, SearchR1Trainer
from rlsys.errors import RunError, UserError
from tests.support.tiny_models import POLICY

DEAD = "http://127.0.0.1:9"
ROWS = [{"question": f"what is {n}", "answers": [str(n)]} for n in range(20)]


@pytest.fixture
def not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runs go, none of which may be begun."""

    def begun(*_: Any) -> Any:
        raise AssertionError("the run has begun")

    monkeypatch.setattr("rlsys.train.train", begun)
    return tmp_path / "runs"


def train(model: Path, output_dir: Path, *overrides: str) -> None:
    trainer = SearchR1Trainer(
        model, HttpRetriever(DEAD), devices="cpu", config="searchr1_tiny_cpu", output_dir=output_dir, overrides=overrides
    )  # fmt: skip
    trainer.train(ROWS, 1, 8)


def test_a_search_server_that_is_down_is_told_with_what_to_do(not_begun: Path) -> None:
    with pytest.raises(RunError) as refused:
        train(POLICY, not_begun)
    (sentence,) = str(refused.value).splitlines()
    assert sentence.startswith(
        f"the search server at search.url={DEAD} does not answer: no answer from {DEAD} after 2 tries"
    )
    assert sentence.endswith("; start it with `rlsys search serve`, or name another with search.url.")
    assert [path.name for path in not_begun.iterdir()] == ["questions"]


async def test_so_it_is_in_a_notebook_whose_loop_runs(not_begun: Path) -> None:
    with pytest.raises(RunError, match="start it with `rlsys search serve`"):
        train(POLICY, not_begun)


def test_a_mistake_in_the_settings_is_told_before_that(not_begun: Path) -> None:
    with pytest.raises(UserError, match=r"^resume=nowhere has no checkpoint"):
        SearchR1Trainer(
            POLICY, HttpRetriever(DEAD), devices="cpu", config="searchr1_tiny_cpu", output_dir=not_begun
        ).train(ROWS, 1, 8, resume="nowhere")


@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        (GPTNeoXConfig(), ": model_type is gpt_neox, which is not supported; use one of llama, qwen2, qwen3, qwen3_moe."),
        (GPT2Config(), ""),  # Its sizes have other names, which is seen first.
    ],
)  # fmt: skip
def test_a_model_of_an_unknown_family_is_named_by_its_file(
    family: GPTNeoXConfig | GPT2Config, wrong: str, not_begun: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(POLICY, folder)
    (folder / "config.json").write_text(json.dumps(family.to_dict()))
    with pytest.raises(UserError) as refused:
        train(folder, not_begun)
    (sentence,) = str(refused.value).splitlines()
    assert f"{folder}/config.json{wrong}" in sentence
