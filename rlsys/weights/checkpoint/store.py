"""The checkpoints of a run, `checkpoints/global_step_N`, each whole or not there at all; and what each says of itself.

Contract: what is written goes to a hidden folder beside the others (`begin`) and gets its name by one rename (`publish`), when
everything is on disk; so a kill at any moment leaves the checkpoints that were there. A published folder has a manifest of its
files and their sizes, by which `check` finds what was lost or cut short later. Nothing that was not made here is ever deleted.

Within it, a worker group's folder with `complete.json` holds everything that the group saved: that file is written last, by
rename.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rlsys.errors import UserError
from rlsys.files import sha256_of

MANIFEST, COMPLETE = "manifest.json", "complete.json"  # Megatron's own checkpoints have neither.
_SMALL_BYTES = 1024 * 1024  # Files up to which the manifest has checksums of: what says what the others hold.
_NAME = re.compile(r"global_step_(\d+)")
_HIDDEN = re.compile(r"\.(global_step_\d+)\.(partial|deleted|replaced)")


@dataclass(frozen=True, slots=True)
class Saved:
    """One checkpoint."""

    step: int
    folder: Path


@dataclass(frozen=True, slots=True)
class Keep:
    """The rules by which checkpoints stay. The newest always does; None keeps none, but all stay without `last`."""

    last: int | None  # The newest so many.
    every: int | None  # Those of steps that this divides.
    best: bool  # The one with the best score.

    def kept(self, steps: Sequence[int], score_of: Callable[[int], float | None]) -> set[int]:
        """Those of `steps` that stay; `score_of` a step is None where it was not evaluated. Of equals, the newest is best."""
        ordered = sorted(steps)
        if self.last is None:
            return set(ordered)
        stay = set(ordered[-max(self.last, 1) :])
        if self.every is not None:
            stay |= {step for step in ordered if step % self.every == 0}
        scored = [(score, step) for step in ordered if (score := score_of(step)) is not None]
        if self.best and scored:
            stay.add(max(scored)[1])
        return stay


class CheckpointStore:
    """The folder `checkpoints` of one run, which only one process writes to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def saved(self) -> list[Saved]:
        """Published checkpoints, the newest last."""
        if not self.folder.is_dir():
            return []
        found = [(_NAME.fullmatch(path.name), path) for path in self.folder.iterdir() if path.is_dir()]
        return sorted((Saved(int(name[1]), path) for name, path in found if name), key=lambda saved: saved.step)

    def begin(self, step: int) -> Path:
        """An empty hidden folder for the checkpoint of `step`; what an earlier try has left in it is gone."""
        self.recover()
        partial = self._hidden(step, "partial")
        partial.mkdir(parents=True)
        return partial

    def publish(self, step: int) -> Path:
        """Give what `begin` has opened its name, in place of an earlier checkpoint of that step. Returns its folder."""
        partial, final, old = self._hidden(step, "partial"), self.path(step), self._hidden(step, "replaced")
        inside = sorted(partial.rglob("*"))
        sizes = {str(path.relative_to(partial)): path.stat().st_size for path in inside if path.is_file()}
        sums = {name: sha256_of(partial / name) for name, size in sizes.items() if size <= _SMALL_BYTES}
        manifest = partial / MANIFEST
        manifest.write_text(json.dumps({"files": sizes, "sha256": sums}, indent=1) + "\n")
        # Folders too: they hold the names of what is in them.
        for path in (*inside, manifest, partial):
            _sync(path)
        if final.exists():
            final.rename(old)
        partial.rename(final)
        _sync(self.folder)
        _remove(old)
        return final

    def prune(self, keep: Keep, score_of: Callable[[int], float | None], spared: Collection[int] = ()) -> None:
        """Delete what `keep` does not hold, but no step that is `spared`. What cannot be deleted stays hidden, for `recover` to try again."""
        saved = self.saved()
        stay = keep.kept([checkpoint.step for checkpoint in saved], score_of) | {*spared}
        for checkpoint in saved:
            if checkpoint.step not in stay:
                # Hidden first: a kill in the middle of deleting must not leave half a checkpoint under its name.
                checkpoint.folder.rename(old := self._hidden(checkpoint.step, "deleted"))
                _remove(old)

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` is, or will be."""
        return self.folder / f"global_step_{step}"

    def _hidden(self, step: int, kind: str) -> Path:
        return self.folder / f".global_step_{step}.{kind}"

    def recover(self) -> None:
        """Tidy up after a process that was killed: what it had replaced and not yet published anew is back again, what
        was never published, or was being deleted, is gone."""
        if not self.folder.is_dir():
            return
        for path in sorted(self.folder.iterdir()):
            hidden = _HIDDEN.fullmatch(path.name)
            if hidden and hidden[2] == "replaced" and not (self.folder / hidden[1]).exists():
                path.rename(self.folder / hidden[1])
            elif hidden:
                _remove(path)


def step_of(folder: Path) -> int | None:
    """The step of a checkpoint's folder by its name; None if it is not called so."""
    name = _NAME.fullmatch(folder.name)
    return int(name[1]) if name else None


def check(folder: Path) -> None:
    """Raise UserError, naming the file, unless all that was saved in `folder` is there: large files in their whole
    length, small ones byte for byte."""
    file = folder / MANIFEST
    if not file.is_file():
        raise UserError(
            f"{folder} is not a checkpoint of a run, for it has no {MANIFEST}: give a folder global_step_N that has.",
            code="not_found",
            key=str(folder),
        )
    try:
        manifest = json.loads(file.read_text())
        sizes = {folder / str(name): int(size) for name, size in manifest["files"].items()}
        sums = {folder / str(name): str(found) for name, found in manifest["sha256"].items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as problem:
        raise UserError(f"{file} is damaged: take an earlier checkpoint.", code="malformed", key=str(file)) from problem
    for path, size in sizes.items():
        if not path.is_file():
            raise UserError(
                f"{path} is missing, which belongs to the checkpoint: take an earlier one.",
                code="not_found",
                key=str(path),
            )
        if path.stat().st_size != size:
            raise UserError(
                f"{path} has {path.stat().st_size} bytes and not the {size} that were saved: take an earlier checkpoint.",
                code="malformed",
                key=str(path),
            )
        if path in sums and sha256_of(path) != sums[path]:
            raise UserError(
                f"{path} holds other bytes than were saved: take an earlier checkpoint.",
                code="malformed",
                key=str(path),
            )


def _remove(path: Path) -> None:
    """Delete a checkpoint; of one that was moved elsewhere, only the link to it."""
    path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    """Have the disk hold what was written."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(frozen=True, slots=True)
class About:
    """What one checkpoint says of itself."""

    step: int  # Optimiser steps taken.
    optimizer: bool = False  # The optimiser's state is there, beside the weights.
    version: int = 0  # Of the policy, when a reference last changed.
    master: bool = False  # The exact weights of a reference are there, of which its own are the rounding.
    layout: Mapping[str, int] | None = None
    """Of the processes that saved, whose random generators are there; None: nobody's are."""

    def to_json(self) -> str:
        """What `read_about` reads."""
        return json.dumps(asdict(self))


def is_complete(folder: str | Path) -> bool:
    """Tell if `folder` holds a checkpoint that was written to the end."""
    return (Path(folder) / COMPLETE).is_file()


def read_about(folder: str | Path) -> About:
    """What the complete checkpoint in `folder` says of itself, as far as this version knows it. Raises UserError."""
    if not is_complete(folder):
        raise UserError(
            f"{folder} holds no complete checkpoint; give a folder with {COMPLETE} in it.",
            code="not_found",
            key=str(folder),
        )
    file = Path(folder) / COMPLETE
    try:
        said = json.loads(file.read_text())
        about = About(**{field.name: said[field.name] for field in fields(About) if field.name in said})
    except (ValueError, TypeError, RecursionError) as error:
        raise _damaged(file, error) from error
    if type(about.step) is not int:
        raise _damaged(file, f"its step is {about.step}")
    return about


def _damaged(file: Path, reason: object) -> UserError:
    return UserError(
        f"{file} is damaged: take an earlier checkpoint, or copy it again ({reason}).", code="malformed", key=str(file)
    )
