"""Checkpoints of a run: whole or not there, kept by policy, and looked over before they are used."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.errors import UserError
from rlsys.weights.checkpoint.store import CheckpointStore, Keep, check, step_of
from tests.support.paths import PROJECT

ALL = Keep(last=None, every=None, best=False)


def save(store: CheckpointStore, step: int, text: str = "weights") -> Path:
    folder = store.begin(step)
    (folder / "actor").mkdir()
    (folder / "actor" / "part").write_text(text)
    return store.publish(step)


def no_score(_: int) -> None:
    return None


def test_a_checkpoint_is_there_when_it_is_published(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.saved() == []
    partial = store.begin(4)
    (partial / "file").write_text("x")
    assert store.saved() == []
    folder = store.publish(4)
    assert [one.step for one in store.saved()] == [4]
    assert folder == store.path(4)
    assert step_of(folder) == 4
    check(folder)


def test_saved_are_ordered_by_number_not_by_name(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (9, 100, 10):
        save(store, step)
    (tmp_path / "global_step_best").mkdir()
    assert [one.step for one in store.saved()] == [9, 10, 100]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 2, "old")
    folder = save(store, 2, "new")
    assert (folder / "actor" / "part").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_2"]


@pytest.mark.parametrize("call", ["mkdir", "rename", "rmtree", "fsync"])
@pytest.mark.parametrize("which", [1, 2, 3])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(call: str, which: int, tmp_path: Path) -> None:
    """A process that saves step 2 again, then 3, and prunes, is killed before its n-th call."""
    store = CheckpointStore(tmp_path)
    save(store, 1)
    save(store, 2, "old")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), call, str(which)],
        cwd=PROJECT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    store.recover()
    saved = store.saved()
    assert saved
    assert saved[-1].step >= 2, "the newest that was there is lost"
    for one in saved:
        check(one.folder)
    save(store, 7)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from rlsys.weights.checkpoint.store import CheckpointStore, Keep
from tests.weights.checkpoint.test_store import save
folder, name, which = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
home = {"mkdir": Path, "rename": Path, "rmtree": shutil, "fsync": os}[name]
call, left = getattr(home, name), [which]
def dying(*args, **options):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return call(*args, **options)
setattr(home, name, dying)
store = CheckpointStore(folder)
save(store, 2, "new")
save(store, 3)
store.prune(Keep(1, None, False), lambda _: None)
"""


def test_what_was_lost_or_cut_is_named(tmp_path: Path) -> None:
    folder = save(CheckpointStore(tmp_path), 1)
    part = folder / "actor" / "part"
    os.truncate(part, 3)
    with pytest.raises(UserError, match=r"actor/part has 3 bytes and not the 7"):
        check(folder)
    part.write_text("weighty")
    with pytest.raises(UserError, match=r"actor/part holds other bytes"):
        check(folder)
    part.unlink()
    with pytest.raises(UserError, match=r"actor/part is missing"):
        check(folder)
    for damage in ("{", "[" * 100_000):
        (folder / "manifest.json").write_text(damage)
        with pytest.raises(UserError, match=r"manifest.json is damaged"):
            check(folder)
    with pytest.raises(UserError, match="not a checkpoint"):
        check(tmp_path)


def test_pruning_leaves_what_the_policy_keeps_and_all_that_is_not_ours(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in range(1, 11):
        save(store, step)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "global_step_3_copy").mkdir()
    scores = {2: 0.5, 6: 0.9, 7: 0.9}
    store.prune(Keep(last=2, every=4, best=True), scores.get)
    assert [one.step for one in store.saved()] == [4, 7, 8, 9, 10]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "global_step_3_copy").is_dir()


def test_one_whose_score_is_still_to_come_may_be_the_best(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        save(store, step)
    store.prune(Keep(last=1, every=None, best=True), {1: 0.5}.get, {2})
    assert [one.step for one in store.saved()] == [1, 2, 3]
    store.prune(Keep(last=1, every=None, best=True), {1: 0.5, 2: 0.9}.get)
    assert [one.step for one in store.saved()] == [2, 3]


@given(
    steps=st.sets(st.integers(1, 60), min_size=1),
    last=st.none() | st.integers(1, 5),
    every=st.none() | st.integers(1, 7),
    best=st.booleans(),
    scores=st.dictionaries(st.integers(1, 60), st.floats(0, 1)),
)
def test_what_is_kept(
    steps: set[int], last: int | None, every: int | None, best: bool, scores: dict[int, float]
) -> None:
    kept = Keep(last, every, best).kept(sorted(steps), scores.get)
    known = {step: scores[step] for step in steps if step in scores}
    for step in steps:
        newer = sum(other > step for other in steps)
        wins = best and step in known and all((known[step], step) >= (known[o], o) for o in known)
        expected = last is None or newer < last or (every is not None and step % every == 0) or wins
        assert (step in kept) == expected
    assert max(steps) in kept


def test_all_are_kept_by_default() -> None:
    assert ALL.kept([1, 2, 3], no_score) == {1, 2, 3}
