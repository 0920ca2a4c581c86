"""The stage and shard of a model that one process holds: a Megatron GPTModel.

The last stage reads out its hidden states only where a trained token is predicted. The output layer is most of a small
model and a large part of any; in a search trajectory most positions (prompt, observations, padding) predict nothing
that is trained. What is left out costs nothing there, in the softmax, and in both their backward passes; the gradients
of the rest are those of the full computation.

Parameters go by their canonical names (`rlsys.weights.weight_map`), which number layers and experts globally;
`rlsys.trainer.export` takes weights in and gives them out.
"""

from __future__ import annotations

import re
from math import pi
from pathlib import Path
from typing import Any, ClassVar

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import linear

from rlsys.config.schema import ModelConfig, ParallelConfig
from rlsys.observe.environment import detect
from rlsys.trainer.mesh import Place
from rlsys.trainer.model.layers import block_spec, choose_layers, kernel_settings, transformer_config
from rlsys.trainer.model.logprobs import VocabShard
from rlsys.weights.checkpoint import sharded
from rlsys.weights.weight_map import Architecture, WeightMap, expert_block, stage_layers

CHECKPOINT_METADATA: dict[str, Any] = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}
"""Makes Megatron write checkpoints that load under any TP, PP and DP."""
_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=\.experts\.local_experts\.)\d+|(?<=\.experts\.linear_fc[12]\.weight)\d+$")


class TargetModel(GPTModel):
    """A GPTModel with rotary positions and causal attention, which reads out targets alone."""

    def forward(self, input_ids: Tensor, predicting: Tensor, sequences: PackedSeqParams | None) -> Tensor:
        """Outputs of `read_out` in the order of `predicting` on the last stage, else states [width, rows, hidden].

        `input_ids` [rows, width]; `predicting` [n] positions in [width, rows] flattened; `sequences` of a packed row.
        """
        return super().forward(input_ids, None, None, packed_seq_params=sequences, loss_mask=predicting)

    def read_out(self, hidden: Tensor) -> Tensor:
        """The output for the chosen states [n, hidden], which every TP rank has: [n] or [n, any].

        With sequence parallelism, the gradient that each TP rank gives to `hidden` must be the whole one.
        """
        raise NotImplementedError

    def _postprocess(self, hidden_states: Tensor, *, loss_mask: Tensor, **_: Any) -> Tensor:
        """Megatron's step from the decoder to its results; `loss_mask` is `predicting`."""
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        return self.read_out(hidden_states.flatten(0, 1).index_select(0, loss_mask))


class TargetLogitsModel(TargetModel):
    """Reads out logits."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.post_process:
            # Sequence parallelism's gather comes before the choice of positions, not within the layer.
            self.output_layer.sequence_parallel = False

    def read_out(self, hidden: Tensor) -> Tensor:
        """Logits [n, local vocabulary]; see `TargetModel`."""
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else None
        # Each rank's gradient is for its part of the vocabulary; the output layer sums them over TP.
        logits: Tensor = self.output_layer(hidden[:, None], weight=weight)[0]
        return logits[:, 0]


class TargetValuesModel(TargetModel):
    """Reads out values in float32, whatever the model's dtype is, from the state before a target, as its logits are."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "share_embeddings_and_output_weights": False})
        if self.post_process:
            del self.output_layer  # of the vocabulary; Megatron always makes one
            self.value_head = torch.nn.Linear(self.config.hidden_size, 1, dtype=self.config.params_dtype)

    def read_out(self, hidden: Tensor) -> Tensor:
        """Values [n], computed whole on every TP rank; see `TargetModel`."""
        return linear(hidden.float(), self.value_head.weight.float(), self.value_head.bias.float())[:, 0]

    def sharded_state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        """As of any module: what Megatron adds for a GPTModel is about its output layer."""
        state: dict[str, Any] = MegatronModule.sharded_state_dict(self, *args, **options)
        return state


class StageModel:
    """Base of the policy and of the critic's value model."""

    _MODULE: ClassVar[type[TargetModel]]

    def __init__(self, architecture: Architecture, model: ModelConfig, parallel: ParallelConfig, place: Place) -> None:
        """Builds with undefined weights: load some. Raises UserError if the model cannot be cut so."""
        self.architecture, self.place = architecture, place
        self.weights = WeightMap(architecture, values=self._MODULE is TargetValuesModel)
        self.layers = stage_layers(architecture.layers, parallel.pp, parallel.pp_layers)[place.pp]
        self.experts = expert_block(architecture.experts, place.ep_size, place.ep)
        here = detect()
        layers = choose_layers(model.layers, here)
        kernels = kernel_settings(model, layers, here)
        self.config = transformer_config(architecture, model, parallel, kernels)
        vocab = architecture.padded_vocab(place.tp_size)
        module = self._MODULE(
            config=self.config,
            transformer_layer_spec=block_spec(self.config, layers),
            vocab_size=vocab,
            max_sequence_length=architecture.max_positions,
            pre_process=place.pp == 0,
            post_process=place.pp == place.pp_size - 1,
            parallel_output=True,
            share_embeddings_and_output_weights=architecture.tied,
            position_embedding_type="rope",
            rotary_base=architecture.rope_theta,
        )
        # Of the scaled ones Megatron knows a single kind of model.
        module.rotary_pos_emb.inv_freq.copy_(inverse_frequencies(architecture))
        self.module = module.cuda() if torch.cuda.is_available() else module
        self.device = next(self.module.parameters()).device
        columns = vocab // place.tp_size
        self.vocab_shard = VocabShard(
            group=parallel_state.get_tensor_model_parallel_group() if place.tp_size > 1 else None,
            start=columns * place.tp,
            valid=min(max(architecture.vocab - columns * place.tp, 0), columns),
        )
        """The columns of this process's logits."""
        self.parameters: dict[str, torch.nn.Parameter] = {}
        """This process's parameters by their canonical name."""
        for name, parameter in self.module.named_parameters():
            # Megatron counts layers and experts from 0 in every process.
            name = _LAYER.sub(lambda number: str(int(number[0]) + self.layers.start), name)
            entry = self.weights.entry(_EXPERT.sub(lambda number: str(int(number[0]) + self.experts.start), name))
            self.parameters[entry.name] = parameter
            if entry.expert is not None:
                # Megatron takes an expert's gradients to be like any other's where experts are not spread. But no
                # expert is cut by TP, whose ranks each give theirs for other tokens.
                parameter.allreduce = False

    def sharded_state(self) -> dict[str, Any]:
        """The model's part of a distributed checkpoint."""
        state: dict[str, Any] = self.module.sharded_state_dict(metadata=dict(CHECKPOINT_METADATA))
        return state

    def load_checkpoint(self, folder: str | Path) -> None:
        """Load only the weights of a distributed checkpoint."""
        self.module.load_state_dict(sharded.load(folder, {"model": self.sharded_state()})["model"])


class PolicyModel(StageModel):
    """The policy, or a reference of it: it has logits."""

    _MODULE = TargetLogitsModel


class ValueModel(StageModel):
    """The critic: the policy's transformer with a value head; in Hugging Face's terms a token classification."""

    _MODULE = TargetValuesModel


def inverse_frequencies(architecture: Architecture) -> Tensor:
    """Radians that a position turns each pair of a head's numbers by, [head_dim / 2] float32 on the CPU.

    Without scaling f_i = theta^(-2 i / head_dim) (Su et al., RoFormer, arXiv:2104.09864, section 3.2.2). With it, as in
    `apply_scaling` of Meta's Llama 3.1 (github.com/meta-llama/llama-models, models/llama3): with n_i =
    original_max_positions f_i / (2 pi) turns within the original context,

        s_i = clamp((n_i - low) / (high - low), 0, 1),   f'_i = (1 - s_i) f_i / factor + s_i f_i

    so fast pairs stay, slow ones are slowed down by `factor`, and those in between are interpolated.
    """
    powers = torch.arange(0, architecture.head_dim, 2, dtype=torch.int64).float() / architecture.head_dim
    frequencies = 1.0 / architecture.rope_theta**powers
    scaling = architecture.rope
    if scaling is None:
        return frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_positions / (2 * pi / frequencies)
    share = (turns - low) / (high - low)
    between = (1 - share) * frequencies / scaling.factor + share * frequencies
    # Not clamped: at the ends the two terms would not add up to the last bit.
    slow = torch.where(turns < low, frequencies / scaling.factor, between)
    return torch.where(turns > high, frequencies, slow)
