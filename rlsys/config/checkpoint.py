"""The part of the schema that says what is saved and kept. Pure data, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class CheckpointConfig:
    """What is saved, when, and what is kept of it."""

    interval: int = 0
    """Steps between checkpoints; 0 saves only the last."""
    background: bool = True
    """Go on training while a checkpoint is written."""
    keep_last: int | None = None
    """The newest so many are kept; null keeps all."""
    keep_every: int | None = None
    """Those of steps that this divides are kept besides."""
    keep_best: bool = False
    """The one of the best evaluation is kept besides."""
    fall_back: bool = False
    """Resume from the one before where the newest is damaged."""
    may_differ: list[str] = field(default_factory=list)
    """Keys that may have another value in a resumed run although that changes what it learns."""
