"""One process's part of a model: a Megatron GPTModel, and its way to and from Hugging Face tensors.

`StageModel` is what the policy shares with the critic's value model; `PolicyModel` has logits, and its
tensors go out to the other groups.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import silu

from rlsys.checkpoint import sharded
from rlsys.config.schema import Dtype, ModelConfig, ParallelConfig
from rlsys.errors import UserError
from rlsys.megatron.layers import block_spec, choose_layers
from rlsys.megatron.parallel import Place
from rlsys.megatron.target_logits import TargetLogitsModel, TargetModel
from rlsys.megatron.vocabulary import VocabShard
from rlsys.weights.bijection import ShardLoader, WeightMap
from rlsys.weights.families import Architecture, Cut
from rlsys.weights.hf_io import HfReader
from rlsys.weights.stages import stage_layers

CHECKPOINT_METADATA: dict[str, Any] = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}
"""Makes Megatron write checkpoints that load under any TP, PP and DP."""
_LAYERS_PREFIX = "decoder.layers."


class StageModel(ABC):
    """The stage and shard of a model that one process holds."""

    def __init__(
        self, architecture: Architecture, model: ModelConfig, parallel: ParallelConfig, place: Place
    ) -> None:
        """Builds with undefined weights: load some. Raises UserError if the model cannot be cut so."""
        self.architecture, self.place = architecture, place
        self.weights = WeightMap(architecture)
        self.layers = stage_layers(architecture.layers, parallel.pp, parallel.pp_layers)[place.pp]
        self.config = transformer_config(architecture, model, parallel)
        module = self._module(
            config=self.config,
            transformer_layer_spec=block_spec(self.config, choose_layers(model.layers)),
            vocab_size=architecture.padded_vocab(place.tp_size),
            max_sequence_length=architecture.max_positions,
            pre_process=place.first_stage,
            post_process=place.last_stage,
            parallel_output=True,
            share_embeddings_and_output_weights=architecture.tied,
            position_embedding_type="rope",
            rotary_base=architecture.rope_theta,
        )
        self.module = module.cuda() if torch.cuda.is_available() else module

    @classmethod
    @abstractmethod
    def _module(cls, **options: Any) -> TargetModel:
        """Megatron's model, with the options of a GPTModel."""

    @abstractmethod
    def load_hf(self, path: str | Path) -> None:
        """Load the Hugging Face folder `path`. Raises UserError if it does not fit the architecture."""

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """This process's parameters by their Megatron name with the global layer number."""
        return {self._global_name(name): p for name, p in self.module.named_parameters()}

    def sharded_state(self) -> dict[str, Any]:
        """The model's part of a distributed checkpoint."""
        state: dict[str, Any] = self.module.sharded_state_dict(metadata=dict(CHECKPOINT_METADATA))
        return state

    def load_checkpoint(self, folder: str | Path) -> None:
        """Load only the weights of a distributed checkpoint."""
        self.module.load_state_dict(sharded.load(folder, {"model": self.sharded_state()})["model"])

    def _loader(self, parameters: Mapping[str, torch.nn.Parameter]) -> ShardLoader:
        def store(name: str, shard: Tensor) -> None:
            parameters[name].data.copy_(shard)

        return ShardLoader(self.weights, list(parameters), self.place.tp, self.place.tp_size, store)

    def _load(self, parameters: Mapping[str, torch.nn.Parameter], reader: HfReader) -> None:
        """Load this process's shards of the `parameters` named."""
        loader = self._loader(parameters)
        for name in loader.missing():
            loader.feed(name, reader.get(name))

    def _global_name(self, name: str) -> str:
        if not name.startswith(_LAYERS_PREFIX):
            return name
        layer, _, rest = name.removeprefix(_LAYERS_PREFIX).partition(".")
        return f"{_LAYERS_PREFIX}{int(layer) + self.layers.start}.{rest}"


class PolicyModel(StageModel):
    """The stage and shard of a policy that one process holds."""

    @classmethod
    def _module(cls, **options: Any) -> TargetLogitsModel:
        return TargetLogitsModel(**options)

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

    def loader(self) -> ShardLoader:
        """Takes whole Hugging Face tensors and copies this process's shards into its parameters."""
        return self._loader(self.parameters())

    def load_hf(self, path: str | Path) -> None:
        """See `StageModel`."""
        reader = HfReader(path)
        self.weights.check_hf_names(reader.names())
        self._load(self.parameters(), reader)

    def export_plan(self, bucket_bytes: int) -> list[list[str]]:
        """This stage's exported parameters, in order, in runs of at most `bucket_bytes` when whole.

        All ranks of the TP group get the same plan. A larger parameter is a run of its own.
        """
        runs: list[list[str]] = []
        size = 0
        for name, parameter in self.parameters().items():
            rule = self.weights.entry(name).rule
            if not rule.exported:
                continue
            nbytes = parameter.nbytes * (1 if rule.cut is Cut.WHOLE else self.place.tp_size)
            if not runs or size + nbytes > bucket_bytes:
                runs.append([])
                size = 0
            runs[-1].append(name)
            size += nbytes
        return runs

    @torch.no_grad()
    def whole_tensors(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Parameters as whole Hugging Face tensors, gathered over TP; yielded on TP rank 0.

        All ranks of the TP group iterate together; the others get nothing.
        """
        parameters = self.parameters()
        for name in names:
            shards = self._gather(parameters[name].data)
            if self.place.tp == 0:
                yield from self.weights.merge(self.weights.entry(name), shards)

    def _gather(self, shard: Tensor) -> list[Tensor]:
        if self.place.tp_size == 1:
            return [shard]
        shards = [torch.empty_like(shard) for _ in range(self.place.tp_size)]
        dist.all_gather(shards, shard.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
        return shards


def transformer_config(
    architecture: Architecture, model: ModelConfig, parallel: ParallelConfig
) -> TransformerConfig:
    """Megatron's config of the model. Raises UserError if TP does not divide its sizes."""
    for key, size in (("attention heads", architecture.heads), ("MLP width", architecture.ffn)):
        if size % parallel.tp:
            raise UserError(f"tp is {parallel.tp}, which does not divide the model's {size} {key}; lower it.")
    dtype = torch.bfloat16 if model.dtype is Dtype.bfloat16 else torch.float32
    return TransformerConfig(
        num_layers=architecture.layers,
        hidden_size=architecture.hidden,
        num_attention_heads=architecture.heads,
        num_query_groups=architecture.kv_heads,
        kv_channels=architecture.head_dim,
        ffn_hidden_size=architecture.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        qk_layernorm=architecture.qk_norm,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=model.dtype is Dtype.bfloat16,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        pipeline_model_parallel_layout=_pipeline_layout(architecture.layers, parallel),
        sequence_parallel=parallel.sequence_parallel,
        variable_seq_lengths=True,
        # Megatron asks for this dispatcher with variable lengths, also for dense models.
        moe_token_dispatcher_type="alltoall",
        batch_p2p_comm=False,
        # The values are overwritten, but only then are weights marked as cut by TP, and the gradient norm
        # counts each shard.
        perform_initialization=True,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        # Whoever learns divides itself, once; see Learner.
        calculate_per_token_loss=True,
        **(_FULL_RECOMPUTE if model.recompute else {}),
    )


_FULL_RECOMPUTE: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def _pipeline_layout(layers: int, parallel: ParallelConfig) -> list[list[str]] | None:
    """Megatron's way of saying which stage holds what; None for even stages."""
    if parallel.pp_layers is None:
        return None
    stages = [["decoder"] * len(stage) for stage in stage_layers(layers, parallel.pp, parallel.pp_layers)]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages
