"""The scripts of toolkits/ckpt_convertor, run as a user runs them: from elsewhere, in paths with spaces."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hf_models import assert_same_tensors, make_model
from tests.support.paths import PROJECT

SCRIPTS = PROJECT / "toolkits" / "ckpt_convertor" / "megatron_convertor"
SHELL = [path.name for path in sorted(SCRIPTS.glob("*.sh")) if path.name != "run_converter.sh"]


def run(
    name: str, *arguments: str, cwd: Path, script: Path | None = None, **settings: str
) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = kept | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | settings
    command = ["sh", str(script or SCRIPTS / name), *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_there_are_scripts_for_each_size_and_way() -> None:
    assert [f"{way}_{size}.sh" for way in ("hf2mg", "mg2hf") for size in ("1.5b", "3b", "7b")] == SHELL


@pytest.mark.slow
def test_a_model_goes_there_and_back_from_any_folder(tmp_path: Path) -> None:
    home = tmp_path / "my models"
    home.mkdir()
    model = make_model(home / "a model", "qwen3-moe")
    done = run("hf2mg_7b.sh", "a model", "a checkpoint", "--ep", "2", cwd=home)
    assert (done.returncode, done.stderr) == (0, "")
    done = run("mg2hf_3b.sh", "a checkpoint", "back again", "a model", cwd=home)
    assert (done.returncode, done.stderr) == (0, "")
    assert_same_tensors(model, home / "back again")
    assert {path.name for path in home.iterdir()} == {"a model", "a checkpoint", "back again"}


def test_a_link_to_a_link_to_a_script_is_one(tmp_path: Path) -> None:
    (tmp_path / "first").symlink_to(os.path.relpath(SCRIPTS / "hf2mg_3b.sh", tmp_path))
    (tmp_path / "second link").symlink_to("first")
    done = run("hf2mg_3b.sh", "no where", "out", cwd=tmp_path, script=tmp_path / "second link")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("no where")
    assert not (tmp_path / "out").exists()


def test_an_interpreter_without_the_packages_is_named(tmp_path: Path) -> None:
    done = run("mg2hf_3b.sh", "a", "b", "c", cwd=tmp_path, PYTHON="/bin/false")
    assert done.returncode == 2
    assert done.stderr.startswith("PYTHON=/bin/false")


def test_scripts_are_plain_sh() -> None:
    dash = shutil.which("dash")
    if dash is None:
        pytest.skip("dash, which knows nothing but POSIX sh, is not installed")
    for script in (*SHELL, "run_converter.sh"):
        assert (SCRIPTS / script).read_text().startswith("#!/bin/sh\n")
        assert subprocess.run([dash, "-n", str(SCRIPTS / script)], check=False).returncode == 0
