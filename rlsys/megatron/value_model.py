"""One process's part of the critic: the policy's transformer with a value head instead of the vocabulary.

The value of a target is read from the state before it, as its logits are: what is expected of the rest of
the episode before the token is known. Values are float32, whatever the model's dtype is.

A fresh head is zero, so that all values are 0 at first: advantages then begin as the returns themselves, and
a value is at once as far from its return as the return is large. A random head would begin with noise, which
value clipping lets it leave only slowly.

Names: the head is `value_head` in Megatron, and `score` in Hugging Face's token classification, with one
label; all other tensors are named as the policy's are.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import linear

from rlsys.config.schema import ModelConfig, ParallelConfig
from rlsys.errors import UserError
from rlsys.megatron.model import StageModel
from rlsys.megatron.parallel import Place
from rlsys.megatron.target_logits import TargetModel
from rlsys.weights.families import Architecture
from rlsys.weights.hf_io import HfReader

HEAD = {"value_head.weight": "score.weight", "value_head.bias": "score.bias"}
"""Megatron's name -> Hugging Face's, [1, hidden] and [1]."""


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

    def __init__(
        self, architecture: Architecture, model: ModelConfig, parallel: ParallelConfig, place: Place
    ) -> None:
        """See `StageModel`; `architecture` is the policy's."""
        # Without an output layer it has the tensors of a model whose output layer is tied.
        super().__init__(replace(architecture, tied=True), model, parallel, place)

    @classmethod
    def _module(cls, **options: Any) -> TargetValuesModel:
        return TargetValuesModel(**{**options, "share_embeddings_and_output_weights": False})

    def load_hf(self, path: str | Path) -> None:
        """Load a policy, with a head of zeros, or a token classification of one label, with its own.

        Raises UserError if the Hugging Face folder `path` does not fit the architecture.
        """
        reader = HfReader(path)
        names = reader.names()
        self.weights.check_hf_names(names - {*HEAD.values(), "lm_head.weight"})
        parameters = self.parameters()
        own = {name: parameters.pop(name) for name in HEAD if name in parameters}
        for name, parameter in own.items():
            parameter.data.zero_()
            if HEAD[name] in names:
                parameter.data.copy_(_of_one_label(reader.get(HEAD[name]), HEAD[name], parameter, path))
        self._load(parameters, reader)


def _of_one_label(head: Tensor, name: str, parameter: Tensor, path: str | Path) -> Tensor:
    if head.shape != parameter.shape:
        raise UserError(
            f"{path} has a head {name} of shape {list(head.shape)}, but a value is one number, "
            f"{list(parameter.shape)}: give a model with num_labels=1, or one without a head."
        )
    return head
