"""The scripts of toolkits/ckpt_convertor, run as a user runs them: from elsewhere, in paths with spaces."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.paths import PROJECT
from tests.support.scripts import run_script
from tests.weights.convert.models import assert_same_tensors, make_model

SCRIPTS = PROJECT / "toolkits" / "ckpt_convertor" / "megatron_convertor"


@pytest.mark.slow
def test_a_model_goes_there_and_back_from_any_folder(tmp_path: Path) -> None:
    home = tmp_path / "my models"
    home.mkdir()
    model = make_model(home / "a model", "qwen3-moe")
    done = run_script(SCRIPTS / "hf2mg_7b.sh", "a model", "a checkpoint", "--ep", "2", cwd=home)
    assert (done.returncode, done.stderr) == (0, "")
    done = run_script(SCRIPTS / "mg2hf_3b.sh", "a checkpoint", "back again", "a model", cwd=home)
    assert (done.returncode, done.stderr) == (0, "")
    assert_same_tensors(model, home / "back again")
    assert {path.name for path in home.iterdir()} == {"a model", "a checkpoint", "back again"}


def test_a_link_to_a_link_to_a_script_is_one(tmp_path: Path) -> None:
    (tmp_path / "first").symlink_to(os.path.relpath(SCRIPTS / "hf2mg_3b.sh", tmp_path))
    (tmp_path / "second link").symlink_to("first")
    done = run_script(tmp_path / "second link", "no where", "out", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("no where")
    assert not (tmp_path / "out").exists()
