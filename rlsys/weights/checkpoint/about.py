"""What a checkpoint says of itself in `complete.json`.

Invariant: a folder with that file holds everything that was saved; it is written last, by rename.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rlsys.errors import UserError

COMPLETE = "complete.json"
"""Megatron's own checkpoints have none."""


@dataclass(frozen=True, slots=True)
class About:
    """Of one checkpoint."""

    step: int
    """Optimiser steps taken."""
    optimizer: bool = False
    """Whether the optimiser's state is there, beside the weights."""
    version: int = 0
    """Of the policy, when a reference last changed."""
    master: bool = False
    """Whether the exact weights of a reference are there, of which its own are the rounding."""
    layout: Mapping[str, int] | None = None
    """Of the processes that saved, whose random generators are there; None: nobody's are."""

    def to_json(self) -> str:
        """What `read_about` reads."""
        return json.dumps(asdict(self))


def is_complete(folder: str | Path) -> bool:
    """Whether `folder` holds a checkpoint that was written to the end."""
    return (Path(folder) / COMPLETE).is_file()


def read_about(folder: str | Path) -> About:
    """What the checkpoint in `folder` says of itself; what another version says beyond that is left out.

    Raises UserError if it is not complete, or does not tell its step.
    """
    if not is_complete(folder):
        raise UserError(f"{folder} holds no complete checkpoint; give a folder with {COMPLETE} in it.")
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
    return UserError(f"{file} is damaged: take an earlier checkpoint, or copy it again. ({reason})")
