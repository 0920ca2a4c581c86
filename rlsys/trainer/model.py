"""One process's part of a model: a Megatron GPTModel, and its way to and from Hugging Face tensors.

`StageModel` is what the policy shares with the critic's value model; `PolicyModel` has logits, and its
tensors go out to the other groups. Parameters go by their canonical names (`rlsys.weights.bijection`), which number
layers and experts globally.
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
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import silu

from rlsys.config.schema import Dtype, ModelConfig, ParallelConfig
from rlsys.errors import UserError
from rlsys.observe.capabilities import detect
from rlsys.trainer.kernels import choose_layers, kernel_settings
from rlsys.trainer.layers import block_spec
from rlsys.trainer.parallel import Place
from rlsys.trainer.target_logits import TargetLogitsModel, TargetModel
from rlsys.trainer.vocabulary import VocabShard
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
_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=\.experts\.local_experts\.)\d+|(?<=\.experts\.linear_fc[12]\.weight)\d+$")


class StageModel(ABC):
    """The stage and shard of a model that one process holds."""

    _VALUES: ClassVar[bool]
    """Whether it has a value head in place of an output layer."""

    def __init__(self, architecture: Architecture, model: ModelConfig, parallel: ParallelConfig, place: Place) -> None:
        """Builds with undefined weights: load some. Raises UserError if the model cannot be cut so."""
        self.architecture, self.place = architecture, place
        self.weights = WeightMap(architecture, values=self._VALUES)
        self.layers = stage_layers(architecture.layers, parallel.pp, parallel.pp_layers)[place.pp]
        self.experts = expert_block(architecture.experts, place.ep_size, place.ep)
        here = detect()
        layers = choose_layers(model.layers, here)
        kernels = kernel_settings(model, layers, here)
        self.config = transformer_config(architecture, model, parallel, kernels)
        module = self._module(
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

    @classmethod
    @abstractmethod
    def _module(cls, **options: Any) -> TargetModel:
        """Megatron's model, with the options of a GPTModel."""

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
        """Megatron's name with the numbers of layer and expert that they have in the whole model."""
        name = _LAYER.sub(lambda number: str(int(number[0]) + self.layers.start), name)
        return _EXPERT.sub(lambda number: str(int(number[0]) + self.experts.start), name)


class PolicyModel(StageModel):
    """The stage and shard of a policy that one process holds."""

    _VALUES = False

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
        check_repeated(reader, self.weights, path)
        self._load(self.parameters(), reader)

    def export_plan(self, bucket_bytes: int) -> list[list[str]]:
        """This stage's exported parameters, in order, in runs that take at most `bucket_bytes` of a bucket.

        All ranks of the stage get the same plan. A larger parameter is a run of its own.
        """
        runs: list[list[str]] = []
        size = 0
        for entry in self._stage_entries():
            itemsize = self.config.params_dtype.itemsize
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

    def _stage_entries(self) -> Iterator[Entry]:
        """What the ranks of this stage hold between them, of what is exported."""
        held = self.parameters()
        for entry in self.weights.entries():
            if entry.name in held or (entry.expert is not None and entry.layer in self.layers):
                yield entry

    def _gather(self, shard: Tensor) -> list[Tensor]:
        """The pieces of all TP ranks."""
        if self.place.tp_size == 1:
            return [shard]
        shards = [torch.empty_like(shard) for _ in range(self.place.tp_size)]
        dist.all_gather(shards, shard.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
        return shards

    def _fetch(self, entry: Entry, own: torch.nn.Parameter | None) -> list[Tensor]:
        """An expert's tensor, of which `own` is there on the ranks that hold it, on the first rank of the stage."""
        assert entry.expert is not None
        owner = entry.expert // len(self.experts)
        if self.place.in_stage == owner:
            assert own is not None
            if owner:
                first = self.place.rank - owner
                dist.send(own.data.contiguous(), first, parallel_state.get_expert_model_parallel_group())
            return [own.data]
        if self.place.in_stage:
            return []
        device = next(self.module.parameters()).device
        whole = torch.empty(self.weights.whole_shape(entry, 1), dtype=self.config.params_dtype, device=device)
        dist.recv(whole, self.place.rank + owner, parallel_state.get_expert_model_parallel_group())
        return [whole]


def transformer_config(
    architecture: Architecture, model: ModelConfig, parallel: ParallelConfig, kernels: Mapping[str, Any]
) -> TransformerConfig:
    """Megatron's config of the model; `kernels` are `kernel_settings`.

    Raises UserError if TP does not divide its sizes, or if experts forbid it.
    """
    _check_tp(architecture, parallel)
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
        context_parallel_size=parallel.cp,
        pipeline_model_parallel_layout=_pipeline_layout(architecture.layers, parallel),
        sequence_parallel=parallel.sequence_parallel,
        variable_seq_lengths=True,
        # Megatron asks for this dispatcher with variable lengths, also for dense models.
        moe_token_dispatcher_type="alltoall",
        **_experts_config(architecture, parallel),
        # The values are overwritten, but only then are weights marked as cut by TP, and the gradient norm
        # counts each shard.
        perform_initialization=True,
        # Whoever learns divides itself, once; see Learner.
        calculate_per_token_loss=True,
        **(_FULL_RECOMPUTE if model.recompute else {}),
        **kernels,
    )


def _check_tp(architecture: Architecture, parallel: ParallelConfig) -> None:
    cut = {"attention heads": architecture.heads}
    if not architecture.experts:
        cut["MLP width"] = architecture.ffn
    for key, size in cut.items():
        if size % parallel.tp:
            raise UserError(f"tp is {parallel.tp}, which does not divide the model's {size} {key}; lower it.")
    if max(parallel.tp, architecture.kv_heads) % min(parallel.tp, architecture.kv_heads):
        raise UserError(
            f"tp is {parallel.tp} and the model has {architecture.kv_heads} key-value heads: one must divide the other."
        )
    if architecture.experts and parallel.tp > 1 and not parallel.sequence_parallel:
        raise UserError(
            f"tp is {parallel.tp} and the model has experts: set sequence_parallel to true, or every one of the {parallel.tp} "
            "ranks would send all tokens to the experts."
        )


def _experts_config(architecture: Architecture, parallel: ParallelConfig) -> dict[str, Any]:
    if not architecture.experts:
        return {}
    return {
        "num_moe_experts": architecture.experts,
        "moe_router_topk": architecture.experts_per_token,
        "moe_ffn_hidden_size": architecture.expert_ffn,
        "moe_router_pre_softmax": not architecture.norm_topk,
        "moe_router_load_balancing_type": "none",
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": 1,
    }


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
