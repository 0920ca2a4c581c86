"""The stage and shard of a model that one process holds: a Megatron GPTModel, and its way from and to Hugging Face.

The last stage reads out its hidden states only where a trained token is predicted. The output layer is most of a small
model and a large part of any; in a search trajectory most positions (prompt, observations, padding) predict nothing
that is trained. What is left out costs nothing there, in the softmax, and in both their backward passes; the gradients
of the rest are those of the full computation.

Parameters go by their canonical names (`rlsys.weights.bijection`), which number layers and experts globally.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import linear

from rlsys.config.schema import ModelConfig, ParallelConfig
from rlsys.errors import UserError
from rlsys.observe.environment import detect
from rlsys.trainer.mesh import Place
from rlsys.trainer.model.layers import block_spec, choose_layers, kernel_settings, transformer_config
from rlsys.trainer.model.logprobs import VocabShard
from rlsys.weights.bijection import Entry, ShardLoader, WeightMap
from rlsys.weights.checkpoint import sharded
from rlsys.weights.families import Architecture
from rlsys.weights.hf_io import HfReader, check_repeated
from rlsys.weights.rope import inverse_frequencies
from rlsys.weights.sizes import aligned, expert_block, stage_layers

CHECKPOINT_METADATA: dict[str, Any] = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}
"""Makes Megatron write checkpoints that load under any TP, PP and DP."""
_HEAD = {"value_head.weight", "value_head.bias"}
_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=\.experts\.local_experts\.)\d+|(?<=\.experts\.linear_fc[12]\.weight)\d+$")


class TargetModel(GPTModel):
    """A GPTModel with rotary positions and causal attention, which reads out targets alone."""

    def forward(self, input_ids: Tensor, predicting: Tensor, sequences: PackedSeqParams | None) -> Tensor:
        """`input_ids` [rows, width]; `predicting` [n] positions in [width, rows] flattened.

        `sequences` says where those of a packed row begin. Returns what `read_out` does, in the order of `predicting`,
        on the last stage, and hidden states [width, rows, hidden] before it.
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
    """Reads out values in float32, whatever the model's dtype is.

    The value of a target is read from the state before it, as its logits are: what is expected of the rest of the
    episode before the token is known.
    """

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


class StageModel(ABC):
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
        module = self._MODULE(
            config=self.config,
            transformer_layer_spec=block_spec(self.config, layers),
            vocab_size=architecture.padded_vocab(place.tp_size),
            max_sequence_length=architecture.max_positions,
            pre_process=place.first_stage,
            post_process=place.last_stage,
            parallel_output=True,
            share_embeddings_and_output_weights=architecture.tied,
            position_embedding_type="rope",
            rotary_base=architecture.rope_theta,
        )
        # Of the scaled ones Megatron knows a single kind of model.
        module.rotary_pos_emb.inv_freq.copy_(inverse_frequencies(architecture))
        self.module = module.cuda() if torch.cuda.is_available() else module
        for name, parameter in self.parameters().items():
            if self.weights.entry(name).expert is not None:
                # Megatron takes an expert's gradients to be like any other's where experts are not spread. But no
                # expert is cut by TP, whose ranks each give theirs for other tokens.
                parameter.allreduce = False  # type: ignore[attr-defined]

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""
        return next(self.module.parameters()).device

    @abstractmethod
    def load_hf(self, path: str | Path) -> None:
        """Load the Hugging Face folder `path`. Raises UserError if it does not fit the architecture."""

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """This process's parameters by their canonical name."""
        return {self.weights.entry(self._global_name(name)).name: p for name, p in self.module.named_parameters()}

    def sharded_state(self) -> dict[str, Any]:
        """The model's part of a distributed checkpoint."""
        state: dict[str, Any] = self.module.sharded_state_dict(metadata=dict(CHECKPOINT_METADATA))
        return state

    def load_checkpoint(self, folder: str | Path) -> None:
        """Load only the weights of a distributed checkpoint."""
        self.module.load_state_dict(sharded.load(folder, {"model": self.sharded_state()})["model"])

    def loader(self, parameters: Mapping[str, torch.nn.Parameter] | None = None) -> ShardLoader:
        """Takes whole Hugging Face tensors and copies this process's shards into its `parameters`, all unless given."""
        into = self.parameters() if parameters is None else parameters

        def store(name: str, shard: Tensor) -> None:
            into[name].data.copy_(shard)

        return ShardLoader(self.weights, list(into), self.place.tp, self.place.tp_size, store)

    def _load(self, parameters: Mapping[str, torch.nn.Parameter], reader: HfReader) -> None:
        loader = self.loader(parameters)
        for name in loader.missing():
            loader.feed(name, reader.get(name))

    def _global_name(self, name: str) -> str:
        """Megatron's name with the numbers of layer and expert that they have in the whole model."""
        name = _LAYER.sub(lambda number: str(int(number[0]) + self.layers.start), name)
        return _EXPERT.sub(lambda number: str(int(number[0]) + self.experts.start), name)


class PolicyModel(StageModel):
    """The policy, or a reference of it: it has logits, and its tensors go out to the other groups."""

    _MODULE = TargetLogitsModel

    @property
    def vocab_shard(self) -> VocabShard:
        """The columns of this process's logits."""
        columns = self.architecture.padded_vocab(self.place.tp_size) // self.place.tp_size
        start = columns * self.place.tp
        return VocabShard(
            group=parallel_state.get_tensor_model_parallel_group() if self.place.tp_size > 1 else None,
            start=start,
            valid=min(max(self.architecture.vocab - start, 0), columns),
        )

    def load_hf(self, path: str | Path) -> None:
        """See `StageModel`."""
        reader = HfReader(path)
        self.weights.check_hf_names(reader.names())
        check_repeated(reader, self.weights, path)
        self._load(self.parameters(), reader)

    def export_plan(self, bucket_bytes: int) -> list[list[str]]:
        """This stage's exported parameters, in order, in runs that take at most `bucket_bytes` of a bucket.

        All ranks of the stage get the same plan. A larger parameter is a run of its own.
        """
        runs: list[list[str]] = []
        size, itemsize = 0, self.config.params_dtype.itemsize
        held = self.parameters()
        for entry in self.weights.entries():
            # An expert is of the stage, whichever of its ranks holds it.
            if entry.name not in held and (entry.expert is None or entry.layer not in self.layers):
                continue
            nbytes = sum(aligned(prod(shape) * itemsize) for shape in entry.rule.shapes)
            if not runs or size + nbytes > bucket_bytes:
                runs.append([])
                size = 0
            runs[-1].append(entry.name)
            size += nbytes
        return runs

    @torch.no_grad()
    def whole_tensors(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Parameters as whole Hugging Face tensors, yielded on the first rank of the stage.

        The ranks that `exports` of the stage iterate together; the others get nothing.
        """
        parameters = self.parameters()
        for name in names:
            entry = self.weights.entry(name)
            if entry.expert is not None:
                shards = self._fetch(entry, parameters.get(name))
            else:
                first = self.place.in_stage < self.place.tp_size
                shards = self._gather(parameters[name].data) if first else []
            if self.place.in_stage == 0:
                yield from self.weights.merge(entry, shards)

    def _gather(self, shard: Tensor) -> list[Tensor]:
        """The pieces of all TP ranks."""
        if self.place.tp_size == 1:
            return [shard]
        shards = [torch.empty_like(shard) for _ in range(self.place.tp_size)]
        dist.all_gather(shards, shard.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
        return shards

    def _fetch(self, entry: Entry, held: torch.nn.Parameter | None) -> list[Tensor]:
        """An expert's tensor on the first rank of the stage; `held` on the ranks that have it."""
        assert entry.expert is not None
        owner = entry.expert // len(self.experts)
        group = parallel_state.get_expert_model_parallel_group()
        if self.place.in_stage == owner:
            assert held is not None
            if owner:
                dist.send(held.data.contiguous(), self.place.rank - owner, group)
            return [held.data]
        if self.place.in_stage:
            return []
        whole = torch.empty(self.weights.whole_shape(entry, 1), dtype=self.config.params_dtype, device=self.device)
        dist.recv(whole, self.place.rank + owner, group)
        return [whole]


class ValueModel(StageModel):
    """The critic: the policy's transformer with a value head; in Hugging Face's terms a token classification."""

    _MODULE = TargetValuesModel

    def load_hf(self, path: str | Path) -> None:
        """Load a policy, with a head of zeros, or a token classification of one label, with its own.

        Zeros make all values 0 at first: advantages then begin as the returns themselves. A random head would begin
        with noise, which value clipping lets it leave only slowly. Raises UserError if the Hugging Face folder `path`
        does not fit the architecture.
        """
        reader = HfReader(path)
        names = reader.names()
        self.weights.check_hf_names(names, headless=True)
        parameters = self.parameters()
        for name in _HEAD & parameters.keys():
            (hf,) = self.weights.entry(name).hf
            if hf not in names:
                parameters.pop(name).data.zero_()
                continue
            shape, own = list(reader.get(hf).shape), list(parameters[name].shape)
            if shape != own:
                raise UserError(
                    f"{path} has a head {hf} of shape {shape}, but a value is one number, {own}: give a model with "
                    "num_labels=1, or one without a head."
                )
        self._load(parameters, reader)
