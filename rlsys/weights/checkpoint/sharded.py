"""Megatron's distributed checkpoints (torch_dist), loaded into a model; `rlsys.weights.checkpoint.writing` saves them.

TP, CP, PP, EP and DP may differ between saving and loading.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint.api import CheckpointException

from rlsys.errors import UserError
from rlsys.weights.checkpoint import keys
from rlsys.weights.checkpoint.about import read_about
from rlsys.weights.checkpoint.soundness import require_sound


def load(folder: str | Path, sharded_state: dict[str, Any]) -> dict[str, Any]:
    """Fill `sharded_state` from a checkpoint and return it; all ranks call this together.

    Raises UserError if the checkpoint is incomplete, damaged, of another model, or could run code.
    """
    folder = Path(folder)
    read_about(folder)
    require_sound(folder)
    try:
        state, unused, lacking = dist_checkpointing.load(sharded_state, str(folder), strict=StrictHandling.RETURN_ALL)
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        raise _as_user_error(folder, error) from error
    for names, what in (
        (lacking, "lacks"),
        (list(filter(keys.is_weight, unused)), "has, and the model lacks,"),
    ):
        if names:
            raise _of_another_model(folder, f"it {what} {min(names)}")
    loaded: dict[str, Any] = state
    return loaded


def _as_user_error(folder: Path, error: BaseException) -> UserError:
    """What is wrong with the checkpoint `folder`, which could not be loaded."""
    inner = error
    if isinstance(error, CheckpointException) and error.failures:
        inner = min(error.failures.items())[1][0]
    reason = (str(inner) or type(inner).__name__).splitlines()[0]
    if isinstance(inner, CheckpointingException | KeyError):
        return _of_another_model(folder, reason)
    return UserError(f"{folder} could not be loaded: take an earlier checkpoint. ({reason})")


def _of_another_model(folder: Path, reason: str) -> UserError:
    return UserError(f"{folder} holds a checkpoint of another model; give one of this model. ({reason})")
