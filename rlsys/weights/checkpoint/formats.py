"""Opens a checkpoint of Megatron's, whatever wrote it: rlsys, Megatron-LM or another system on Megatron-core."""

from __future__ import annotations

import json
from pathlib import Path

from rlsys.errors import UserError
from rlsys.weights.checkpoint.legacy import LegacyCheckpoint
from rlsys.weights.checkpoint.stored import MegatronCheckpoint
from rlsys.weights.checkpoint.torch_dist import BACKEND, METADATA, TorchDistCheckpoint

_LATEST = "latest_checkpointed_iteration.txt"


def open_checkpoint(folder: str | Path) -> MegatronCheckpoint:
    """The checkpoint in `folder`, or the one that Megatron's note of the latest names there.

    Only what is said of the tensors is read. Raises UserError if there is none, it is incomplete or damaged, or asks
    to run code.
    """
    folder = _resolve(Path(folder))
    if (folder / BACKEND).is_file():
        _require_torch_dist(folder)
        return TorchDistCheckpoint(folder)
    if (folder / METADATA).is_file():
        raise UserError(f"{folder} has {METADATA} but no {BACKEND}: it was not written to the end; give another.")
    if any(folder.glob("mp_rank_*")):
        return LegacyCheckpoint(folder)
    raise UserError(
        f"{folder} holds no checkpoint of Megatron's; give a folder with {BACKEND} or mp_rank_00 in it, such as "
        ".../global_step_N/actor or .../iter_0000100."
    )


def _resolve(folder: Path) -> Path:
    if not folder.is_dir():
        raise UserError(f"{folder} is not there; give the folder of a checkpoint.")
    note = folder / _LATEST
    if note.is_file():
        latest = note.read_text().strip()
        named = folder / (f"iter_{int(latest):07d}" if latest.isdecimal() else latest)
        if not named.is_dir() or named.parent != folder:
            raise UserError(f"{note} names {latest}, but {named} is not there; give the folder of a checkpoint.")
        return named
    saved = sorted(path for path in folder.glob("iter_*") if path.is_dir())
    if len(saved) > 1:
        raise UserError(f"{folder} holds {len(saved)} checkpoints; give one, such as {saved[-1]}.")
    return saved[0] if saved else folder


def _require_torch_dist(folder: Path) -> None:
    try:
        backend = json.loads((folder / BACKEND).read_text())["sharded_backend"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{folder / BACKEND} is damaged; copy the checkpoint again.") from error
    if backend != "torch_dist":
        raise UserError(f"{folder} was saved as {backend}, which is not read here; save it as torch_dist.")
    if not (folder / METADATA).is_file():
        raise UserError(f"{folder / METADATA} is not there; complete the checkpoint, or copy it again.")
