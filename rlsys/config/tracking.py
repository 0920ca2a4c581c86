"""The part of the schema that says where figures go. Pure data, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class WandbMode(StrEnum):
    """Where Weights & Biases writes to."""

    auto = "auto"
    online = "online"
    offline = "offline"


@dataclass
class TrackingConfig:
    """Where figures go, besides the run's folder."""

    tensorboard: bool = True
    """Event files of TensorBoard in the run's folder."""
    wandb: bool = True
    """Weights & Biases."""
    wandb_mode: WandbMode = WandbMode.auto
    """`auto` is online with an API key (WANDB_API_KEY) and offline without."""
    project: str = "rlsys"
    """Of Weights & Biases."""
    sample_trajectories: int = 10
    """Trajectories kept as readable text."""
    trajectories: int | None = 64
    """Of each step, in whole groups, kept token by token for the report and the audit of tokens; null keeps all, 0 none."""
