"""The reference policy: fixed, now and then set to the policy, or an exponential moving average of it.

Contract: `follow(policy, version)` comes after each step and goes by the step's version alone; every process
does the same with its own shards, and nothing travels. A version that was followed before, or is 0, changes
nothing. At another one that is

- a multiple of `reset_period`, the reference becomes the policy, and else at
- a multiple of `update_period`, with tau below 1, it moves: ref <- tau ref + (1 - tau) policy.

An average is kept in float32 (the master), and a bfloat16 model is its rounding: added to bfloat16 weights
themselves, most of what a policy moves in a few steps would be rounded away. The weights of a float32 model are
their own master, and a reference that is no average has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
)
from torch import Tensor

from rlsys.trainer.model import PolicyModel
from rlsys.weights.checkpoint import sharded
from rlsys.weights.checkpoint.sharded import Content
from rlsys.weights.checkpoint.store import About, read_about

_MODEL, _MASTER = "model", "master"


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """How a reference follows the policy."""

    tau: float
    """What an average keeps of itself at an update; 1 is no average."""
    update_period: int
    """Versions from one update of an average to the next."""
    reset_period: int | None
    """Versions after which the reference becomes the policy; None is never."""

    def kept_at(self, version: int) -> float:
        """What the reference keeps of itself at `version`: 1 is everything, 0 nothing (a reset)."""
        if self.reset_period is not None and version % self.reset_period == 0:
            return 0.0
        return self.tau if version % self.update_period == 0 else 1.0


class Anchor:
    """One process's part of the reference policy."""

    def __init__(self, model: PolicyModel, plan: ReferencePlan) -> None:
        """Take over `model`, whose weights are loaded, as the reference at version 0."""
        self.model = model
        self.version = 0
        """Of the policy, when the reference last changed."""
        self._plan = plan
        model.module.eval().requires_grad_(False)
        self._weights = _weights_of(model)
        averages = plan.tau < 1.0
        self._rounded = [w for w in self._weights if averages and w.dtype is not torch.float32]
        """Weights of which there is a master."""
        self._master = [weight.float() for weight in self._rounded]

    @torch.no_grad()
    def follow(self, policy: PolicyModel, version: int) -> None:
        """Do what is due now that `policy` is `version`."""
        kept = self._plan.kept_at(version)
        if version <= self.version or kept == 1.0:
            return
        exact = dict(zip(map(id, self._rounded), self._master, strict=True))
        for weight, new in zip(self._weights, _weights_of(policy), strict=True):
            moved = exact.get(id(weight), weight)
            if kept:
                # One parameter at a time: there is no room for a float32 copy of the policy.
                moved.lerp_(new.to(moved.dtype), 1.0 - kept)
            else:
                moved.copy_(new)
        self._round()
        self.version = version

    def tensors(self) -> Iterator[Tensor]:
        """All memory that the reference takes."""
        return chain(self._weights, self._master)

    def content(self, folder: Path) -> Content:
        """What its checkpoint is made of, which converts and loads as a model's does."""
        with_master = bool(self._master)
        about = About(step=0, version=self.version, master=with_master)
        return Content(folder, self._sharded_state(with_master), about)

    def load(self, folder: str | Path) -> About:
        """Continue from a checkpoint, saved under any TP, PP and DP; returns what it says of itself.

        A master that it does not hold begins as its weights. All ranks call this together. Raises UserError
        if the checkpoint is incomplete or of another model.
        """
        about = read_about(folder)
        with_master = bool(self._master) and about.master
        state = sharded.load(folder, self._sharded_state(with_master))
        self.model.module.load_state_dict(state[_MODEL])
        for number, master in enumerate(self._master):
            master.copy_(state[_MASTER][number] if with_master else self._rounded[number])
        self.version = about.version
        return about

    def _sharded_state(self, with_master: bool) -> dict[str, Any]:
        model = self.model.sharded_state()
        if not with_master:
            return {_MODEL: model}
        # Each is cut and named as its weight is.
        cuts = get_param_id_to_sharded_param_map(model, self._rounded)
        master = {
            number: make_sharded_optimizer_tensor(cuts[number], tensor, _MASTER)
            for number, tensor in enumerate(self._master)
        }
        return {_MODEL: model, _MASTER: master}

    def _round(self) -> None:
        for weight, exact in zip(self._rounded, self._master, strict=True):
            weight.copy_(exact)


def _weights_of(model: PolicyModel) -> list[Tensor]:
    """What a checkpoint keeps of a model: parameters, and buffers if it has any."""
    state = model.module.state_dict(keep_vars=True)
    return [value for value in state.values() if isinstance(value, Tensor) and value.is_floating_point()]
