"""A GPTModel that reads out its hidden states only where a trained token is predicted.

The output layer is most of a small model and a large part of any; in a search trajectory most positions
(prompt, observations, padding) predict nothing that is trained. The last stage picks the hidden states of
those that do, before what reads them, so what is left out costs nothing there, in the softmax, and in
both their backward passes. The gradients of the rest are those of the full computation.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor


class TargetModel(GPTModel):
    """Rotary positions and causal attention; nothing else about a token but its place is asked for."""

    def forward(self, input_ids: Tensor, predicting: Tensor, sequences: PackedSeqParams | None) -> Tensor:
        """`input_ids` [rows, width]; `predicting` [n] positions in [width, rows] flattened.

        `sequences` says where those of a packed row begin. Returns what `read_out` does, in the order of
        `predicting`, on the last stage, and hidden states [width, rows, hidden] before it.
        """
        return super().forward(input_ids, None, None, packed_seq_params=sequences, loss_mask=predicting)

    def read_out(self, hidden: Tensor) -> Tensor:
        """What is computed from the chosen states [n, hidden], which every TP rank has: [n] or [n, any].

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
