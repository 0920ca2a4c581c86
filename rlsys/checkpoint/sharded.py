"""Megatron's distributed checkpoints (torch_dist) in a folder that says when it is complete.

Invariant: a folder with `complete.json` holds everything that was saved; that file is written last, by
rename. TP, PP and DP may differ between saving and loading.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from rlsys.errors import UserError

COMPLETE = "complete.json"


def is_complete(folder: str | Path) -> bool:
    """Whether `folder` holds a checkpoint that was written to the end."""
    return (Path(folder) / COMPLETE).is_file()


def read_about(folder: str | Path) -> dict[str, Any]:
    """What was handed to `save` as `about`. Raises UserError if the checkpoint is not complete."""
    if not is_complete(folder):
        raise UserError(f"{folder} holds no complete checkpoint; give a folder with {COMPLETE} in it.")
    about: dict[str, Any] = json.loads((Path(folder) / COMPLETE).read_text())
    return about


def save(folder: str | Path, sharded_state: dict[str, Any], about: dict[str, Any]) -> None:
    """Write a checkpoint; all ranks call this together, on a file system that they share.

    `about` is plain JSON. Raises UserError if `folder` already holds a complete checkpoint.
    """
    folder = Path(folder)
    if is_complete(folder):
        raise UserError(f"{folder} holds a checkpoint already; save to another folder.")
    text = json.dumps(about)
    dist.barrier()
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(sharded_state, str(folder))
    dist.barrier()
    if dist.get_rank() == 0:
        partial = folder / f".{COMPLETE}.partial"
        partial.write_text(text)
        os.replace(partial, folder / COMPLETE)
    dist.barrier()


def load(folder: str | Path, sharded_state: dict[str, Any]) -> dict[str, Any]:
    """Fill `sharded_state` from a checkpoint and return it; all ranks call this together.

    Raises UserError if the checkpoint is incomplete or of another model.
    """
    read_about(folder)
    try:
        loaded: dict[str, Any] = dist_checkpointing.load(sharded_state, str(folder))
    except (CheckpointingException, CheckpointException) as error:
        raise UserError(
            f"{folder} holds a checkpoint of another model; give one of this model. ({error})"
        ) from error
    return loaded
