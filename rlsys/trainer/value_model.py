"""One process's part of the critic: the policy's transformer with a value head instead of the vocabulary.

The value of a target is read from the state before it, as its logits are: what is expected of the rest of
the episode before the token is known. Values are float32, whatever the model's dtype is.

A fresh head is zero, so that all values are 0 at first: advantages then begin as the returns themselves, and
a value is at once as far from its return as the return is large. A random head would begin with noise, which
value clipping lets it leave only slowly.

In Hugging Face's terms it is a token classification with one label.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import linear

from rlsys.errors import UserError
from rlsys.trainer.model import StageModel
from rlsys.trainer.target_logits import TargetModel
from rlsys.weights.hf_io import HfReader

_HEAD = {"value_head.weight", "value_head.bias"}


class TargetValuesModel(TargetModel):
    """Reads out values."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.post_process:
            del self.output_layer  # of the vocabulary; Megatron always makes one
            self.value_head = torch.nn.Linear(self.config.hidden_size, 1, dtype=self.config.params_dtype)

    def read_out(self, hidden: Tensor) -> Tensor:
        """Values [n] float32, computed whole on every TP rank; see `TargetModel`."""
        head = self.value_head
        return linear(hidden.float(), head.weight.float(), head.bias.float())[:, 0]

    def sharded_state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        """As of any module: what Megatron adds for a GPTModel is about its output layer."""
        state: dict[str, Any] = MegatronModule.sharded_state_dict(self, *args, **options)
        return state


class ValueModel(StageModel):
    """The stage and shard of a value model that one process holds."""

    _VALUES = True

    @classmethod
    def _module(cls, **options: Any) -> TargetValuesModel:
        return TargetValuesModel(**{**options, "share_embeddings_and_output_weights": False})

    def load_hf(self, path: str | Path) -> None:
        """Load a policy, with a head of zeros, or a token classification of one label, with its own.

        Raises UserError if the Hugging Face folder `path` does not fit the architecture.
        """
        reader = HfReader(path)
        names = reader.names()
        self.weights.check_hf_names(names, headless=True)
        parameters = self.parameters()
        for name in _HEAD & parameters.keys():
            (hf,) = self.weights.entry(name).hf
            if hf in names:
                _require_one_label(reader, hf, parameters[name], path)
            else:
                parameters.pop(name).data.zero_()
        self._load(parameters, reader)


def _require_one_label(reader: HfReader, name: str, parameter: Tensor, path: str | Path) -> None:
    shape = list(reader.get(name).shape)
    if shape != list(parameter.shape):
        raise UserError(
            f"{path} has a head {name} of shape {shape}, but a value is one number, "
            f"{list(parameter.shape)}: give a model with num_labels=1, or one without a head."
        )
