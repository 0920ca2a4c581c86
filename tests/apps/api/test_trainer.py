"""Tests of the Python trainer: its settings equal the command line's, wrong ones are refused, and the example runs."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import GPTNeoXConfig

from rlsys.apps.api import HttpRetriever, SearchR1Trainer
from rlsys.apps.api.arguments import model_folder
from rlsys.config.compose import load_config
from rlsys.config.schema import RunConfig
from rlsys.errors import Code, RunError, UserError
from tests.support.paths import PROJECT
from tests.support.refusals import refused
from tests.support.runs import PATIENT
from tests.support.tiny_models import POLICY

DEAD = "http://127.0.0.1:9"
ROWS = [{"question": f"what is {n}", "answers": [str(n)]} for n in range(20)]
SERVER = HttpRetriever("http://127.0.0.1:8000")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Configs passed to the training function, which is replaced and starts no run."""
    configs: list[RunConfig] = []

    def note(config: RunConfig) -> tuple[Path, dict[str, Any]]:
        configs.append(config)
        return Path("run"), {"checkpoint": "run/checkpoints/global_step_1/actor"}

    monkeypatch.setattr("rlsys.apps.api.trainer._trained", note)
    return configs


def test_arguments_equal_the_settings_of_the_command_line(asked: list[RunConfig], tmp_path: Path) -> None:
    trainer = SearchR1Trainer(
        POLICY, SERVER, "rloo", {"f1": 1.0}, 1, "cpu", config="searchr1_tiny_cpu", output_dir=tmp_path,
        overrides=["task.max_prompt_tokens=300"],
    )  # fmt: skip
    result = trainer.train(ROWS, 3, 8, holdout=4)
    (train,), (heldout,) = ((tmp_path / "questions").glob(f"*-{side}-*") for side in ("train", "heldout"))
    typed = [
        "algorithm=rloo", "reward.terms={f1: 1.0}", "task.max_turns=1", "task.max_prompt_tokens=300", "trainer.steps=3",
        "trainer.prompts_per_step=8", "search.url=http://127.0.0.1:8000", f"model.path={POLICY}", f"output_dir={tmp_path}",
        f"task.train_path={train}", f"task.eval_path={heldout}",
    ]  # fmt: skip
    assert asked == [load_config("searchr1_tiny_cpu", typed)]
    words = shlex.split(result.command)
    assert words[:4] == ["rlsys", "train", "-c", "searchr1_tiny_cpu"]
    assert [load_config(words[3], words[4:])] == asked


def test_a_small_data_set_makes_smaller_steps_and_held_out_questions_are_not_trained(
    asked: list[RunConfig], tmp_path: Path
) -> None:
    trainer = SearchR1Trainer(POLICY, SERVER, devices="cpu", config="searchr1_tiny_cpu", output_dir=tmp_path)
    with pytest.warns(UserWarning, match="questions") as notes:
        trainer.train(ROWS, eval_data=ROWS[:8])
    dropped, lowered = notes
    assert "8 questions" in str(dropped.message)
    assert "12 questions" in str(lowered.message)
    assert {note.filename for note in notes} == {__file__}
    assert asked[0].trainer.prompts_per_step == 12


@pytest.mark.parametrize(
    ("code", "key", "given"),
    [
        ("unknown", "rl_algorithm", {"rl_algorithm": "grpoo"}),
        ("wrong_type", "search_backend", {"search_backend": HttpRetriever}),
        ("wrong_type", "overrides", {"overrides": "trainer.seed=1"}),
        ("conflict", "num_iterations", {"overrides": ["trainer.steps=2"]}),
    ],
)
def test_a_wrong_argument_is_refused(
    code: Code, key: str, given: dict[str, Any], asked: list[RunConfig], tmp_path: Path
) -> None:
    with refused(code, key):
        trainer = SearchR1Trainer(**{"model_name": POLICY, "search_backend": SERVER, "output_dir": tmp_path} | given)
        trainer.train(ROWS, num_iterations=1)
    assert asked == []


def unwanted(*_: Any, **__: Any) -> Any:
    raise AssertionError("something has been started")


@pytest.mark.parametrize(("override", "model"), [("actor.lrate=1", "Qwen/Small"), ("trainer.steps=-1", POLICY)])
def test_wrong_settings_are_refused_before_a_download_or_a_server_start(
    override: str, model: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unwanted)
    monkeypatch.setattr(HttpRetriever, "serving", unwanted)
    trainer = SearchR1Trainer(
        model, SERVER, devices="cpu", config="searchr1_tiny_cpu", output_dir=tmp_path, overrides=[override]
    )
    with pytest.raises(UserError) as caught:
        trainer.train(ROWS, batch_size=8)
    assert override.partition("=")[0] in f"{caught.value.key} {caught.value}"


def test_a_model_is_a_folder_or_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no network")

    assert model_folder(POLICY) == POLICY
    with refused("malformed", tmp_path / "no/such"):
        model_folder(tmp_path / "no/such")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(tmp_path / name))
    assert model_folder("Qwen/Small") == tmp_path / "Qwen/Small"
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(RunError, match="Qwen/Small"):
        model_folder("Qwen/Small")


def test_a_dead_server_and_an_unknown_model_family_fail_before_the_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(model: Path, **more: Any) -> None:
        search = HttpRetriever(DEAD)
        tiny = {"devices": "cpu", "config": "searchr1_tiny_cpu", "output_dir": tmp_path / "runs"}
        SearchR1Trainer(model, search, **tiny).train(ROWS, 1, 8, **more)

    monkeypatch.setattr("rlsys.train.train", unwanted)
    with pytest.raises(RunError, match=DEAD):
        train(POLICY)
    with refused("not_found", "resume"):
        train(POLICY, resume="nowhere")
    other = shutil.copytree(POLICY, tmp_path / "model")
    (other / "config.json").write_text(json.dumps(GPTNeoXConfig().to_dict()))
    with refused("unsupported", "model.path"):
        train(other)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["questions"]


NOTEBOOK = """
import asyncio, json
from examples.searchr1 import ten_lines

async def cell():
    settings = ["eval.limit=16", "tracking.wandb=false", "tracking.tensorboard=false", "trainer.seed=3", *{patient!r}]
    result = ten_lines.main(1, 8, settings, {outputs!r})
    saved = result.save_pretrained({outputs!r} + "/hf")
    print(json.dumps([str(result.run_dir), str(result.checkpoint), result.command, str(saved)]))

asyncio.run(cell())
"""


@pytest.mark.slow
@pytest.mark.engine
def test_the_ten_line_example_trains_and_evaluates_in_a_running_loop(tmp_path: Path) -> None:
    """The script has no main guard and runs within an event loop, as in a notebook."""
    script = tmp_path / "cell.py"
    script.write_text(NOTEBOOK.format(outputs=str(tmp_path / "my outputs"), patient=PATIENT))
    done = subprocess.run(
        [sys.executable, script], cwd=PROJECT, env=os.environ | {"PYTHONPATH": str(PROJECT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run_dir, checkpoint, command, saved = json.loads(done.stdout.splitlines()[-1])
    summary = json.loads((Path(run_dir) / "summary.json").read_text())
    assert summary["checkpoint"] == checkpoint
    assert "trainer.prompts_per_step=8" in command
    assert (Path(saved) / "model.safetensors").is_file()
    (evaluated,) = Path(run_dir).glob("eval-*/results.json")
    assert json.loads(evaluated.read_text())["average"]["questions"] == 16
    assert "held-out questions again: EM " in done.stdout
