"""Publishes, prunes and verifies the checkpoints of a run, `checkpoints/global_step_N`.

Contract: `begin` opens a hidden folder, and `publish` renames the folder to its final name once everything is on disk.
A kill at any moment leaves the published checkpoints intact. A published checkpoint has a manifest of its files and
their sizes, with which `check` finds files that were lost or truncated later. Only folders that match this module's
name patterns are ever deleted.

Each worker group has a folder within the checkpoint. The group's `complete.json` is written last, by rename, so a
folder with this file holds everything that the group saved.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rlsys.errors import UserError
from rlsys.files import sha256_of, sync

MANIFEST, COMPLETE = "manifest.json", "complete.json"  # Absent from checkpoints that Megatron itself writes.
_SMALL_BYTES = 1024 * 1024  # Files up to this size, such as metadata, have a checksum in the manifest.
_NAME = re.compile(r"global_step_(\d+)")
_HIDDEN = re.compile(r"\.(global_step_\d+)\.(partial|deleted|replaced)")


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    step: int
    folder: Path


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Retention rules. A checkpoint stays if any rule keeps it; the newest checkpoint always stays."""

    last: int | None  # Number of newest checkpoints to keep; None keeps all.
    every: int | None  # Keep steps that are multiples of this number; None for no such rule.
    best: bool  # Keep the checkpoint with the highest score.

    def steps_to_keep(self, steps: Sequence[int], score_of: Callable[[int], float | None]) -> set[int]:
        """Return the steps to keep.

        `score_of` returns None for a step that was not evaluated; ties go to the newest.
        """
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
    """The `checkpoints` folder of one run, written by a single process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def saved(self) -> list[SavedCheckpoint]:
        """Return the published checkpoints, newest last."""
        if not self.folder.is_dir():
            return []
        found = [(_NAME.fullmatch(path.name), path) for path in self.folder.iterdir() if path.is_dir()]
        return sorted(
            (SavedCheckpoint(int(name[1]), path) for name, path in found if name), key=lambda saved: saved.step
        )

    def begin(self, step: int) -> Path:
        """Call `recover`, then create and return an empty hidden folder for the checkpoint of `step`."""
        self.recover()
        partial = self._hidden(step, "partial")
        partial.mkdir(parents=True)
        return partial

    def publish(self, step: int) -> Path:
        """Publish the folder that `begin` opened, replacing any earlier checkpoint of `step`; return its path."""
        partial, final, old = self._hidden(step, "partial"), self.path(step), self._hidden(step, "replaced")
        inside = sorted(partial.rglob("*"))
        sizes = {str(path.relative_to(partial)): path.stat().st_size for path in inside if path.is_file()}
        sums = {name: sha256_of(partial / name) for name, size in sizes.items() if size <= _SMALL_BYTES}
        manifest = partial / MANIFEST
        manifest.write_text(json.dumps({"files": sizes, "sha256": sums}, indent=1) + "\n")
        # Sync folders too: a file's name is durable only once its folder is synced.
        for path in (*inside, manifest, partial):
            sync(path)
        if final.exists():
            final.rename(old)
        partial.rename(final)
        sync(self.folder)
        _remove(old)
        return final

    def prune(
        self, keep: RetentionPolicy, score_of: Callable[[int], float | None], spared: Collection[int] = ()
    ) -> None:
        """Delete checkpoints that neither `keep` nor `spared` (steps) retains.

        Best effort: a folder that cannot be deleted stays hidden until `recover` retries.
        """
        saved = self.saved()
        stay = keep.steps_to_keep([checkpoint.step for checkpoint in saved], score_of) | {*spared}
        for checkpoint in saved:
            if checkpoint.step not in stay:
                # Rename first: a kill during deletion must not leave half a checkpoint under its public name.
                checkpoint.folder.rename(old := self._hidden(checkpoint.step, "deleted"))
                _remove(old)

    def path(self, step: int) -> Path:
        """Return the published folder of `step`, existing or not."""
        return self.folder / f"global_step_{step}"

    def _hidden(self, step: int, kind: str) -> Path:
        return self.folder / f".global_step_{step}.{kind}"

    def recover(self) -> None:
        """Clean up after a killed process; idempotent.

        Restores a checkpoint that was moved away but not yet replaced. Deletes unpublished and half-deleted folders.
        """
        if not self.folder.is_dir():
            return
        for path in sorted(self.folder.iterdir()):
            hidden = _HIDDEN.fullmatch(path.name)
            if hidden and hidden[2] == "replaced" and not (self.folder / hidden[1]).exists():
                path.rename(self.folder / hidden[1])
            elif hidden:
                _remove(path)


def step_of(folder: Path) -> int | None:
    """Return the step in a checkpoint folder's name, None for any other name."""
    name = _NAME.fullmatch(folder.name)
    return int(name[1]) if name else None


def check(folder: Path) -> None:
    """Raise UserError, naming the file, unless `folder` matches its manifest (all sizes, SHA-256 of small files)."""
    file = folder / MANIFEST
    if not file.is_file():
        raise UserError(
            f"{folder} is not a checkpoint of a run (it has no {MANIFEST}): give a folder global_step_N that has one.",
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
                f"{path} of the checkpoint is missing: take an earlier checkpoint.",
                code="not_found",
                key=str(path),
            )
        if path.stat().st_size != size:
            raise UserError(
                f"{path} has {path.stat().st_size} bytes instead of the {size} saved: take an earlier checkpoint.",
                code="malformed",
                key=str(path),
            )
        if path in sums and sha256_of(path) != sums[path]:
            raise UserError(
                f"{path} differs from the bytes saved (SHA-256): take an earlier checkpoint.",
                code="malformed",
                key=str(path),
            )


def _remove(path: Path) -> None:
    """Delete a checkpoint folder, best effort; for a symlink delete only the link."""
    path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """Description of a checkpoint, stored in its `complete.json`."""

    step: int  # Optimiser steps taken.
    optimizer: bool = False  # The checkpoint holds optimiser state beside the weights.
    version: int = 0  # Weight version of the policy when the reference policy last changed.
    master: bool = False  # The checkpoint holds the reference policy's float32 weights beside the rounded weights.
    adapters: Mapping[str, Any] | None = None
    """Settings of the adapters that the checkpoint holds, and of their base; None if it holds a whole model."""
    layout: Mapping[str, int] | None = None
    """Parallel sizes of the group that saved its random generators; None if none were saved."""

    def to_json(self) -> str:
        """Return the JSON that `read_checkpoint_info` reads."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class WriteStats:
    """Bytes that one process wrote for one save, and the time that writing took."""

    bytes: int
    seconds: float  # Writing time of the thread.


def is_complete(folder: str | Path) -> bool:
    """Return True if `folder` holds a complete checkpoint."""
    return (Path(folder) / COMPLETE).is_file()


def read_checkpoint_info(folder: str | Path) -> CheckpointInfo:
    """Read the description of the complete checkpoint in `folder`, ignoring unknown fields. Raises UserError."""
    if not is_complete(folder):
        raise UserError(
            f"{folder} holds no complete checkpoint: give a folder with {COMPLETE} in it.",
            code="not_found",
            key=str(folder),
        )
    file = Path(folder) / COMPLETE
    try:
        said = json.loads(file.read_text())
        info = CheckpointInfo(
            **{field.name: said[field.name] for field in fields(CheckpointInfo) if field.name in said}
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise _damaged(file, error) from error
    if type(info.step) is not int:
        raise _damaged(file, f"its step is {info.step}")
    return info


def _damaged(file: Path, reason: object) -> UserError:
    return UserError(
        f"{file} is damaged: take an earlier checkpoint, or copy it again ({reason}).", code="malformed", key=str(file)
    )
