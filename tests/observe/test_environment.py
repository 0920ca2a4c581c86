"""A run records where it ran, life after life."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlsys.observe.environment import RUN, begin_life, changes, commit_of, environment, read_lives, tree_cpu_seconds


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is slow to start programs, and one that does not answer is left out."""
    monkeypatch.setattr("rlsys.observe.environment._TIMEOUT_S", 120)


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_of_a_checkout_and_whether_files_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init")
    assert commit_of(tmp_path) == (None, None), "no commit yet"
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert commit_of(tmp_path) == (commit, False)
    (tmp_path / "file").write_text("2")
    assert commit_of(tmp_path) == (commit, True)
    (tmp_path / "within").mkdir()
    assert commit_of(tmp_path / "within") == (None, None), "the checkout of somebody else around it"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_of(tmp_path) == (None, None), "no git"


def test_a_run_has_its_lives_in_order(tmp_path: Path) -> None:
    for step in (0, 7):
        begin_life(tmp_path, step)
    first, second = read_lives(tmp_path)
    assert (first.after_step, second.after_step) == (0, 7)
    assert (second.environment, second.command) == (environment(), sys.argv)


CARDS = """\
NVIDIA H100 80GB HBM3, 580.82.07
NVIDIA A100-SXM4-40GB, 580.82.07
NVIDIA H100 80GB HBM3, 580.82.07
"""


def driver(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvidia-smi that does what `script` says, and no other program."""
    folder.mkdir()
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_the_machines_gpus_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "_lazy_init", None)  # CUDA must not be initialised.
    asked = tmp_path / "asked"
    script = f'echo "$@" >> {asked}\nwhile read row; do echo "$row"; done <<END\n{CARDS}END'
    driver(tmp_path / "bin", script, monkeypatch)
    found = environment()
    assert found["gpus"] == "2 x NVIDIA H100 80GB HBM3, 1 x NVIDIA A100-SXM4-40GB"
    assert (found["gpu driver"], found["cuda of torch"]) == ("580.82.07", "12.8")
    assert environment() == found
    assert asked.read_text() == "--query-gpu=name,driver_version --format=csv,noheader\n", "asked once"


@pytest.mark.parametrize("script", ["echo 'NVIDIA H100, 580'; exit 1", "echo 'No devices'", "exec /bin/sleep 600"])
def test_a_driver_without_an_answer_is_left_out(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsys.observe.environment._TIMEOUT_S", 0.5 if "sleep" in script else 120)
    driver(tmp_path / "bin", script, monkeypatch)
    assert not {"gpus", "gpu driver", "cuda of torch"} & environment().keys()


def test_a_damaged_record_of_lives_does_not_end_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for content in ("{", '{"lives": [1]}', '{"lives": [{"begun": 1}]}'):
        (tmp_path / RUN).write_text(content)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="rlsys"):
            begin_life(tmp_path, 3)
        assert [life.after_step for life in read_lives(tmp_path)] == [3]
        assert f"{tmp_path / RUN} is damaged" in caplog.text


def test_changed_versions_are_named() -> None:
    now = environment() | {"torch": "2", "ray": "3"}
    before = {name: value for name, value in now.items() if name != "ray"} | {"torch": "1", "host": "other"}
    assert changes(before, now) == ["torch 1 -> 2", "ray none -> 3"]


BURN = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"


def test_a_childs_work_is_counted_while_it_lives() -> None:
    before = tree_cpu_seconds()
    with subprocess.Popen(
        [sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "done\n"
        used = tree_cpu_seconds() - before
        child.communicate("\n")
    assert used > 0.25, "the kernel counts in hundredths"
