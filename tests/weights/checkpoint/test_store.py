"""Tests of the checkpoint store: atomic publishing, pruning by policy, and checks before use."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from rlsys.weights.checkpoint.store import (
    CheckpointInfo,
    CheckpointStore,
    RetentionPolicy,
    check,
    read_checkpoint_info,
    step_of,
)
from tests.support.refusals import refused


def save(store: CheckpointStore, step: int, text: str = "weights") -> Path:
    folder = store.begin(step)
    (folder / "actor").mkdir()
    (folder / "actor" / "part").write_text(text)
    return store.publish(step)


def test_checkpoint_appears_when_it_is_published(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.saved() == []
    partial = store.begin(4)
    (partial / "file").write_text("x")
    assert store.saved() == []
    folder = store.publish(4)
    for step in (100, 10):
        save(store, step)
    (tmp_path / "checkpoints" / "global_step_best").mkdir()
    assert [one.step for one in store.saved()] == [4, 10, 100], "steps must be in numeric order"
    assert folder == store.path(4)
    assert step_of(folder) == 4
    check(folder)


def killed_before(home: Any, call: str, which: int, work: Callable[[], object]) -> bool:
    """Run `work` in a process that is killed before the `which`th call of `call`; tell if the process came that far."""
    pid = os.fork()
    if pid == 0:
        original, calls = getattr(home, call), count(1)

        def dying(*args: Any, **options: Any) -> Any:
            if next(calls) == which:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **options)

        setattr(home, call, dying)
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL), status
    return status == signal.SIGKILL


@pytest.mark.parametrize(("home", "call"), [(Path, "mkdir"), (Path, "rename"), (shutil, "rmtree"), (os, "fsync")])
def test_kill_at_any_moment_leaves_a_whole_checkpoint(
    home: Any, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process saves step 2 again, saves step 3, and prunes; it is killed before each of its calls in turn."""
    # Written data survives a kill without fsync, which would take most of the test's time.
    monkeypatch.setattr(os, "fsync", lambda _: None)

    def work() -> None:
        save(store, 2, "new")
        save(store, 3)
        store.prune(RetentionPolicy(1, None, False), lambda _: None)

    for which in count(1):
        store = CheckpointStore(tmp_path / str(which))
        save(store, 1)
        save(store, 2, "old")
        killed = killed_before(home, call, which, work)
        store.recover()
        saved = store.saved()
        assert saved[-1].step >= 2, "the newest checkpoint was lost"
        for one in saved:
            check(one.folder)
        save(store, 7)
        assert [path.name for path in store.folder.iterdir() if path.name.startswith(".")] == []
        if not killed:
            break
    assert [one.step for one in saved] == [3]
    assert which > 3


def test_missing_or_damaged_file_is_refused_by_its_path(tmp_path: Path) -> None:
    folder = save(CheckpointStore(tmp_path), 1)
    part = folder / "actor" / "part"
    os.truncate(part, 3)
    with refused("malformed", part):
        check(folder)
    part.write_text("weighty")
    with refused("malformed", part):
        check(folder)
    part.unlink()
    with refused("not_found", part):
        check(folder)
    for damage in ("{", "[" * 100_000):
        (folder / "manifest.json").write_text(damage)
        with refused("malformed", folder / "manifest.json"):
            check(folder)
    with refused("not_found", tmp_path):
        check(tmp_path)


@pytest.mark.parametrize("damage", ["{", "[" * 100_000, '{"step": "x"}', '{"step": null}', "{}"], ids=range(5))
def test_missing_or_damaged_complete_json_is_refused(damage: str, tmp_path: Path) -> None:
    with refused("not_found", tmp_path):
        read_checkpoint_info(tmp_path)
    (tmp_path / "complete.json").write_text(damage)
    with refused("malformed", tmp_path / "complete.json"):
        read_checkpoint_info(tmp_path)


def test_complete_json_of_any_version_is_read(tmp_path: Path) -> None:
    about, file = CheckpointInfo(step=3, optimizer=True, layout={"tp": 2}), tmp_path / "complete.json"
    file.write_text(about.to_json())
    assert read_checkpoint_info(tmp_path) == about
    file.write_text('{"step": 5, "optimizer": true, "dtype": "bfloat16", "extra": {}}')
    assert read_checkpoint_info(tmp_path) == CheckpointInfo(step=5, optimizer=True)
    file.write_text('{"step": 0}')
    assert read_checkpoint_info(tmp_path) == CheckpointInfo(
        step=0, optimizer=False, version=0, master=False, layout=None
    )


def test_pruning_spares_the_policys_checkpoints_and_foreign_files(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in range(1, 11):
        save(store, step)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "global_step_3_copy").mkdir()
    scores = {2: 0.5, 6: 0.9, 7: 0.9}
    store.prune(RetentionPolicy(last=None, every=4, best=True), scores.get)
    assert len(store.saved()) == 10
    store.prune(RetentionPolicy(last=2, every=4, best=True), scores.get, spared={1})
    assert [one.step for one in store.saved()] == [1, 4, 7, 8, 9, 10]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "global_step_3_copy").is_dir()


def test_all_of_a_checkpoint_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    save(CheckpointStore(tmp_path), 1)
    partial = tmp_path / ".global_step_1.partial"
    inside = (partial, *(partial / name for name in ("actor", "actor/part", "manifest.json")))
    assert ({*synced[:-1]}, synced[-1]) == ({*map(str, inside)}, str(tmp_path))
