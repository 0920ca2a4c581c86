"""Megatron's distributed checkpoints (torch_dist) in a folder that says when it is complete; how they are read.

Invariant: a folder with `complete.json` holds everything that was saved; that file is written last, by rename (see
`rlsys.checkpoint.writing`). TP, PP, EP and DP may differ between saving and loading.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingException
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from rlsys.errors import UserError

COMPLETE = "complete.json"
_PLAN = ".metadata"
_NOT_WEIGHTS = ("optimizer.", "master.")
"""How the names of tensors begin that a model may be loaded without."""


def is_complete(folder: str | Path) -> bool:
    """Whether `folder` holds a checkpoint that was written to the end."""
    return (Path(folder) / COMPLETE).is_file()


def read_about(folder: str | Path) -> dict[str, Any]:
    """What was saved as `about`. Raises UserError if the checkpoint is not complete."""
    if not is_complete(folder):
        raise UserError(f"{folder} holds no complete checkpoint; give a folder with {COMPLETE} in it.")
    file = Path(folder) / COMPLETE
    try:
        about: dict[str, Any] = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file} is damaged: take an earlier checkpoint. ({error})") from error
    return about


def load(folder: str | Path, sharded_state: dict[str, Any]) -> dict[str, Any]:
    """Fill `sharded_state` from a checkpoint and return it; all ranks call this together.

    Raises UserError if the checkpoint is incomplete, damaged or of another model.
    """
    folder = Path(folder)
    read_about(folder)
    try:
        state, unused, lacking = dist_checkpointing.load(
            sharded_state, str(folder), strict=StrictHandling.RETURN_ALL
        )
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        raise _as_user_error(folder, error) from error
    weights = [name for name in unused if not name.startswith(_NOT_WEIGHTS) and "_extra_state" not in name]
    for names, what in ((lacking, "lacks"), (weights, "has, and the model lacks,")):
        if names:
            raise _of_another_model(folder, f"it {what} {min(names)}")
    loaded: dict[str, Any] = state
    return loaded


def _as_user_error(folder: Path, error: BaseException) -> UserError:
    """What is wrong with the checkpoint `folder`, which could not be loaded."""
    damage = _damage(folder)
    if damage:
        return UserError(f"{damage}: take an earlier checkpoint.")
    inner = error
    if isinstance(error, CheckpointException) and error.failures:
        inner = min(error.failures.items())[1][0]
    reason = (str(inner) or type(inner).__name__).splitlines()[0]
    if isinstance(inner, CheckpointingException | KeyError):
        return _of_another_model(folder, reason)
    return UserError(f"{folder} could not be loaded: take an earlier checkpoint. ({reason})")


def _of_another_model(folder: Path, reason: str) -> UserError:
    return UserError(f"{folder} holds a checkpoint of another model; give one of this model. ({reason})")


def _damage(folder: Path) -> str | None:
    """The first file of a checkpoint that is missing, cut short or unreadable, and that it is; None if none is seen."""
    for name in (CONFIG_FNAME, COMMON_STATE_FNAME, _PLAN):
        if not (folder / name).is_file():
            return f"{folder / name} is missing"
    try:
        json.loads((folder / CONFIG_FNAME).read_text())
    except ValueError:
        return f"{folder / CONFIG_FNAME} is damaged"
    if not zipfile.is_zipfile(folder / COMMON_STATE_FNAME):
        return f"{folder / COMMON_STATE_FNAME} is damaged"
    try:
        pieces = FileSystemReader(folder).read_metadata().storage_data.values()
    except Exception:  # noqa: BLE001 - a pickle that is damaged may raise anything
        return f"{folder / _PLAN} is damaged"
    for piece in pieces:
        file = folder / piece.relative_path
        if not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size < piece.offset + piece.length:
            return f"{file} was cut short, to {file.stat().st_size} bytes"
    return None
