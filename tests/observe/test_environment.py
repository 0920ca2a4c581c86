"""What a run says of where it ran, life after life."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlsys.observe.environment import RUN, begin_life, changes, commit_of, environment, read_lives


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_of_a_checkout_and_whether_files_differ(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == (None, None), "no checkout"
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


def test_without_git_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_of(tmp_path) == (None, None)


def test_a_run_has_its_lives_in_order(tmp_path: Path) -> None:
    before = time.time()
    begin_life(tmp_path, 0)
    begin_life(tmp_path, 7)
    first, second = read_lives(tmp_path)
    assert (first.after_step, second.after_step) == (0, 7)
    assert before <= first.begun <= second.begun <= time.time()
    assert (second.environment, second.command) == (environment(), sys.argv)


def test_a_damaged_record_of_lives_does_not_end_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for content in ("", "{", "[]", '{"lives": [1]}', '{"lives": [{"begun": 1}]}'):
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
