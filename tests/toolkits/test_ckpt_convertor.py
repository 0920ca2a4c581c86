"""The scripts of toolkits/ckpt_convertor, run as a user runs them: from elsewhere, in paths with spaces."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import PROJECT
from tests.weights.convert.models import assert_same_tensors, make_model

SCRIPTS = PROJECT / "toolkits" / "ckpt_convertor" / "megatron_convertor"
SHELL = [path.name for path in sorted(SCRIPTS.glob("*.sh")) if path.name != "run_converter.sh"]


def run(script: str, *arguments: str | Path, cwd: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = kept | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | settings
    command = ["sh" if script.endswith(".sh") else sys.executable, str(SCRIPTS / script)]
    return subprocess.run(
        [*command, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_there_are_scripts_for_each_size_and_way() -> None:
    assert [f"{way}_{size}.sh" for way in ("hf2mg", "mg2hf") for size in ("1.5b", "3b", "7b")] == SHELL


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


@pytest.mark.parametrize("relative", [True, False])
def test_a_link_to_a_script_is_one(relative: bool, tmp_path: Path) -> None:
    script = SCRIPTS / "hf2mg_3b.sh"
    home = tmp_path / "my links"
    home.mkdir()
    (home / "first").symlink_to(os.path.relpath(script, home) if relative else script)
    (home / "second link").symlink_to("first")
    done = subprocess.run(
        ["sh", "second link", "no where", "out"],
        cwd=home,
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.startswith("no where has no config.json")


@pytest.mark.parametrize("script", ["mg2hf_1.5b.sh", "hf2mg_3b.sh"])
def test_help_names_the_arguments(script: str, tmp_path: Path) -> None:
    done = run(script, "--help", cwd=tmp_path, COLUMNS="120")
    assert done.returncode == 0
    words = (
        ("{checkpoint} {out} {original}", "--shard-size") if script.startswith("mg2hf") else ("{src} {dst}", "--values")
    )
    assert all(word in done.stdout for word in words)


@pytest.mark.parametrize(
    ("script", "arguments", "named"),
    [
        ("mg2hf_7b.sh", ("no where", "out", "nothing"), "no where is not there"),
        ("hf2mg_1.5b.sh", ("no where", "out"), "no where has no config.json"),
    ],
)
def test_a_missing_path_is_one_sentence(script: str, arguments: tuple[str, ...], named: str, tmp_path: Path) -> None:
    done = run(script, *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(named)
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_an_interpreter_without_the_packages_is_one_sentence(tmp_path: Path) -> None:
    done = run("mg2hf_3b.sh", "a", "b", "c", cwd=tmp_path, PYTHON="/bin/false")
    assert done.returncode == 2
    assert done.stderr.startswith("PYTHON=/bin/false lacks what rlsys needs")


@pytest.mark.parametrize("script", [*SHELL, "run_converter.sh"])
def test_scripts_are_plain_sh_and_delete_nothing(script: str) -> None:
    text = (SCRIPTS / script).read_text()
    assert text.startswith("#!/bin/sh\n")
    assert "rm " not in text
    dash = shutil.which("dash")
    if dash is None:
        pytest.skip("dash, which knows nothing but POSIX sh, is not installed")
    assert subprocess.run([dash, "-n", str(SCRIPTS / script)], check=False).returncode == 0
