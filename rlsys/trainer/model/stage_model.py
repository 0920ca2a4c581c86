"""Builds the pipeline stage and shards of a model that one process holds, as a Megatron GPTModel.

The last stage applies its output layer only at positions that predict a target:

    tokens    p0 p1 p2 a0 a1 o0 o1 a2     p: prompt, a: sampled, o: observation
    outputs         x  x        x         for the targets a0, a1, a2

The output layer is most of the work in a small model and a large part of the work in any model. In a search trajectory,
most positions (prompt, observations, padding) predict no target. Skipped positions cost nothing in the output layer,
the softmax and their backward passes; gradients at all other positions are the same as in the full computation.

Parameters are identified by canonical names (`rlsys.weights.weight_map`), which number layers and experts globally.
`StageModel` tells which of a process's parameters each use takes:

    trainable      have gradients and optimiser state: `requires_grad`
    loaded         are filled from a Hugging Face folder: all that are in the weight map
    updated        are filled by a weight update: `loaded`
    exported       go to engines, the inference group and Hugging Face folders: `loaded`, without copies of tied tensors
    checkpointed   are saved and followed by a reference policy: all, and persistent buffers

In a model with adapters (`model.lora`), `trainable` and `updated` are the adapters alone, and they alone are saved.
`exported` are the weights with the adapters merged into them, and the adapters: the engines load the former, the
inference group the latter. With `model.lora.sync=adapters` only the adapters are sent, and engines merge them themselves.

`rlsys.trainer.export` loads and exports weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import linear

from rlsys.config.schema import Layers, LoraSync, ModelConfig, ParallelConfig
from rlsys.errors import UserError
from rlsys.observe.environment import detect
from rlsys.trainer.mesh import MeshCoordinates
from rlsys.trainer.model.layers import (
    accept_routes,
    block_spec,
    choose_layers,
    complete,
    fuse_accumulation,
    inverse_frequencies,
    kernel_settings,
    repeat_empty_states,
    transformer_config,
)
from rlsys.trainer.model.logprobs import VocabShard
from rlsys.trainer.model.lora import Adapter, TensorParallel, adapt
from rlsys.weights.checkpoint import sharded
from rlsys.weights.checkpoint.adapters import BaseModel
from rlsys.weights.lora import A, B, adapter_map, weight_of
from rlsys.weights.weight_map import (
    Architecture,
    Cut,
    Entry,
    WeightMap,
    expert_block,
    layer_spec_of,
    stage_layers,
)

CHECKPOINT_METADATA: dict[str, Any] = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}
"""Makes Megatron write checkpoints that load under any TP, PP and DP."""
_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
_EXPERT = re.compile(
    r"(?<=\.experts\.local_experts\.)\d+|(?<=\.experts\.linear_fc[12]\.weight)\d+$|(?<=\.experts\.linear_fc[12]\.bias)\d+$"
)


class TargetModel(GPTModel):
    """GPTModel that computes outputs only at positions that predict targets."""

    beside: ClassVar[tuple[str, ...]] = ()
    """Prefixes of the names of parameters that the Hugging Face model lacks: neither loaded nor exported."""

    def forward(
        self, input_ids: Tensor, predicting: Tensor, sequences: PackedSeqParams | None, routes: Tensor | None = None
    ) -> Tensor:
        """Return the outputs in the order of `predicting`; on all stages but the last, return the hidden states.

        `input_ids` is [rows, width]; `predicting` [n] holds positions in [width, rows] flattened; `sequences` describes
        a packed row, None for padded rows. Hidden states are [width, rows, hidden]. `routes` is `ContextShare.routes`.
        """
        return super().forward(
            input_ids, None, None, packed_seq_params=sequences, loss_mask=predicting, padding_mask=routes
        )

    def read_out(self, hidden: Tensor) -> Tensor:
        """Return the outputs, [n] or [n, any], for the selected states `hidden` [n, hidden].

        `hidden` is equal on all TP ranks. With sequence parallelism, every TP rank must produce the full gradient of
        `hidden`, not only its own term of the sum over ranks.
        """
        raise NotImplementedError

    def _preprocess(self, *inputs: Any, padding_mask: Tensor | None = None, **options: Any) -> tuple[Any, ...]:
        """Megatron's hook before the decoder; `padding_mask` carries `routes` to the layers, unchanged."""
        states, *positions, _ = super()._preprocess(*inputs, **options)
        return states, *positions, padding_mask

    def _postprocess(self, hidden_states: Tensor, *, loss_mask: Tensor, **_: Any) -> Tensor:
        """Megatron's hook after the decoder; `loss_mask` carries `predicting`."""
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        return self.read_out(hidden_states.flatten(0, 1).index_select(0, loss_mask))


class TargetLogitsModel(TargetModel):
    """TargetModel whose outputs are logits."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.post_process:
            # `_postprocess` gathers over sequence parallelism before it selects positions; the layer must not gather
            # again.
            self.output_layer.sequence_parallel = False

    def read_out(self, hidden: Tensor) -> Tensor:
        """Return logits [n, local vocabulary]; see `TargetModel`."""
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else None
        # Each rank's gradient covers its vocabulary shard; the output layer's backward pass sums the gradients over TP.
        logits: Tensor = self.output_layer(hidden[:, None], weight=weight)[0]
        return logits[:, 0]


class TargetValuesModel(TargetModel):
    """TargetModel whose outputs are values; they are float32 for every model dtype."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "share_embeddings_and_output_weights": False})
        if self.post_process:
            del self.output_layer  # Megatron always makes an output layer over the vocabulary.
            self.value_head = torch.nn.Linear(self.config.hidden_size, 1, dtype=self.config.params_dtype)

    def read_out(self, hidden: Tensor) -> Tensor:
        """Return values [n], computed in full on every TP rank; see `TargetModel`."""
        return linear(hidden.float(), self.value_head.weight.float(), self.value_head.bias.float())[:, 0]

    def sharded_state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Return the state as a plain MegatronModule does; GPTModel's version requires the output layer."""
        state: dict[str, Any] = MegatronModule.sharded_state_dict(self, *args, **options)
        return state


class StageModel:
    """Base of the policy and of the critic's value model."""

    _MODULE: ClassVar[type[TargetModel]]
    _ADAPTED: ClassVar[bool] = False
    """True if `model.lora` applies to models of this kind."""
    replays: ClassVar[bool] = False
    """True if models of this kind route tokens as the engine did, if it is known."""

    def __init__(
        self, architecture: Architecture, model: ModelConfig, parallel: ParallelConfig, coords: MeshCoordinates
    ) -> None:
        """Build the model with undefined weights; `placement.parallel_problems` says which parallel sizes fit it."""
        self.architecture, self.coords = architecture, coords
        self.weights = WeightMap(architecture, values=self._MODULE is TargetValuesModel)
        self.layers = stage_layers(architecture.layers, parallel.pp, parallel.pp_layers)[coords.pp]
        self.experts = expert_block(architecture.experts, coords.ep_size, coords.ep)
        here = detect()
        layers = choose_layers(model.layers, here)
        kernels = kernel_settings(model, layers, here)
        self.config = transformer_config(architecture, model, parallel, kernels)
        self.lora = model.lora if self._ADAPTED and model.lora.rank else None
        """Settings of the adapters; None if the whole model is trained."""
        module = self._built(layers)
        if architecture.experts:
            accept_routes(module.decoder)
        if self.lora is None:  # Frozen weights have no gradients.
            fuse_accumulation(module, model, layers)
        repeat_empty_states(module)
        # Megatron supports scaled frequencies for a single kind of model only.
        if not architecture.kv_lora_rank:  # Otherwise, positions belong to the layers.
            module.rotary_pos_emb.inv_freq.copy_(inverse_frequencies(architecture))
        self.module = module.cuda() if torch.cuda.is_available() else module
        self.device = next(self.module.parameters()).device
        columns = architecture.padded_vocab(coords.tp_size) // coords.tp_size
        self.vocab_shard = VocabShard(
            group=parallel_state.get_tensor_model_parallel_group() if coords.tp_size > 1 else None,
            start=columns * coords.tp,
            valid=min(max(architecture.vocab - columns * coords.tp, 0), columns),
        )
        """Vocabulary shard of this process's logits."""
        self.parameters: dict[str, torch.nn.Parameter] = {}
        """This process's parameters by canonical name."""
        self.entries: dict[str, Entry] = {}
        """Entries in the weight map of those parameters that are in it."""
        for name, parameter in self.module.named_parameters():
            # Megatron numbers layers and experts from 0 in every process.
            name = _LAYER.sub(lambda number: str(int(number[0]) + self.layers.start), name)
            if name.startswith(self._MODULE.beside):
                self.parameters[name] = parameter
                continue
            entry = self._entry(_EXPERT.sub(lambda number: str(int(number[0]) + self.experts.start), name))
            self.parameters[entry.name], self.entries[entry.name] = parameter, entry
            if entry.expert is not None:
                # With ep=1, Megatron reduces an expert's gradients like those of other parameters. But experts are not
                # cut by TP, and TP ranks send them different tokens: reduce over TP as well.
                parameter.allreduce = False
                # Megatron marks a bias of an expert like one that all TP ranks have.
                parameter.sequence_parallel = False
        self.loaded = {name: self.parameters[name] for name in self.entries}
        """Parameters that are filled from Hugging Face tensors."""
        self.exported = {name: one for name, one in self.loaded.items() if self.entries[name].rule.exported}
        """Parameters that are sent as Hugging Face tensors."""
        self._require_every_tensor()
        self.updated = self.loaded
        """Parameters that a weight update fills."""
        self._add_adapters(parallel.sequence_parallel, model.recompute)

    def _add_adapters(self, sequence_parallel: bool, recompute: bool) -> None:
        """Freeze the model and give its target layers adapters, if it has any. Raises UserError for a wrong target."""
        self.adapters: dict[str, Adapter] = {}
        """Adapters by the name of the weight that they change."""
        self.adapter_weights: WeightMap | None = None
        """Map of the adapters' tensors; None without adapters."""
        self.adapter_entries: list[Entry] = []
        self.base: BaseModel | None = None
        """Frozen model beside the adapters; None without adapters, or until it is loaded."""
        if self.lora is None:
            return
        self.adapter_weights = weights = adapter_map(self.architecture, self.lora)
        self.adapter_entries = [entry for entry in weights.entries() if entry.layer in self.layers]
        tp = TensorParallel(self.coords.tp, self.coords.tp_size, sequence_parallel)
        linears = {id(one.weight): one for one in self.module.modules() if hasattr(one, "weight")}
        self.module.requires_grad_(False)
        for name in dict.fromkeys(weight_of(entry.name) for entry in self.adapter_entries):
            weight = self.parameters[name]
            a, b = (weights.entry(name.removesuffix("weight") + ending) for ending in (A, B))
            adapter = self.adapters[name] = Adapter(weights, a, b, self.lora, weight, tp)
            self.parameters |= {a.name: adapter.a, b.name: adapter.b}
            adapt(linears[id(weight)], adapter)
        self.updated = {entry.name: self.parameters[entry.name] for entry in self.adapter_entries}
        if recompute and self.coords.pp == 0:
            # Megatron recomputes a layer in the backward pass only if the layer's input has a gradient.
            self.module.embedding.register_forward_hook(lambda *call: call[-1].requires_grad_(torch.is_grad_enabled()))

    def reset_adapters(self, seed: int) -> None:
        """Give the adapters their initial values, with which they change nothing; the same under every layout."""
        for adapter in self.adapters.values():
            adapter.reset(seed)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Let the model compute without its adapters, as the reference policy, during the body."""
        for adapter in self.adapters.values():
            adapter.on = False
        try:
            yield
        finally:
            for adapter in self.adapters.values():
                adapter.on = True

    @property
    def sent_beside(self) -> str:
        """Digest of the frozen model if versions of this model are sent as adapters alone, else empty."""
        if self.lora is None or self.lora.sync is not LoraSync.adapters:
            return ""
        if self.base is None:
            raise RuntimeError("The adapters have no base: load the weights at model.path first.")
        return self.base.digest

    @property
    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Parameters that have gradients and optimiser state."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    @property
    def checkpointed(self) -> list[Tensor]:
        """Floating-point tensors of a checkpoint: parameters and persistent buffers."""
        state = self.module.state_dict(keep_vars=True)
        return [value for value in state.values() if isinstance(value, Tensor) and value.is_floating_point()]

    def gathered(self, entry: Entry, shard: Tensor) -> list[Tensor]:
        """Return the shards of a parameter, or of a tensor cut like it, of all TP ranks, which call this together."""
        if self.coords.tp_size == 1 or entry.expert is not None or entry.rule.cut is Cut.WHOLE:
            return [shard]
        shards = [torch.empty_like(shard) for _ in range(self.coords.tp_size)]
        torch.distributed.all_gather(shards, shard.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
        return shards

    def _built(self, layers: Layers) -> TargetModel:
        """Return the module on the CPU. Raises UserError if the layers of a family of the user's cannot be built."""
        architecture, coords = self.architecture, self.coords
        own = layer_spec_of(architecture.family)

        def build() -> TargetModel:
            module = self._MODULE(
                config=self.config,
                transformer_layer_spec=block_spec(self.config, layers, self.layers, own, self.lora is not None),
                vocab_size=architecture.padded_vocab(coords.tp_size),
                max_sequence_length=architecture.max_positions,
                pre_process=coords.pp == 0,
                post_process=coords.pp == coords.pp_size - 1,
                parallel_output=True,
                share_embeddings_and_output_weights=architecture.tied,
                position_embedding_type="rope",
                rotary_base=architecture.rope_theta,
                rotary_percent=architecture.rotary_fraction,
            )
            complete(module, architecture)
            return module

        # Megatron calls the constructors of the user's layers, so their errors are those of `own`.
        return build() if own is None else cast("TargetModel", own.run(build))

    def _entry(self, name: str) -> Entry:
        """Return the entry of a parameter. Raises UserError if the family does not list it."""
        try:
            return self.weights.entry(name)
        except KeyError:
            raise self._misfit(f"the layers have {name}, which the family lacks: add it to `tensors`") from None

    def _require_every_tensor(self) -> None:
        """Raise UserError if this process's layers lack a parameter that the family lists."""
        for entry in self.weights.entries():
            mine = entry.layer in self.layers and (entry.expert is None or entry.expert in self.experts)
            if mine and entry.name not in self.parameters:
                raise self._misfit(f"the layers lack {entry.name}: remove it from `tensors`, or build it in layer_spec")

    def _misfit(self, problem: str) -> UserError:
        return UserError(f"{self.architecture.family}: {problem}.", code="mismatch", key="model.family")

    def sharded_state(self) -> dict[str, Any]:
        """Return the model's part of a distributed checkpoint: of a model with adapters, the adapters."""
        if self.adapters:
            return {name: part for one in self.adapters.values() for name, part in one.sharded_state().items()}
        state: dict[str, Any] = self.module.sharded_state_dict(metadata=dict(CHECKPOINT_METADATA))
        return state

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        """Load `state`, the result of `sharded_state` filled from a checkpoint."""
        if not self.adapters:
            self.module.load_state_dict(state)
            return
        for name, parameter in self.updated.items():
            parameter.copy_(state[name])

    def load_checkpoint(self, folder: str | Path) -> None:
        """Load only the weights of a distributed checkpoint."""
        self.load_state(sharded.load(folder, {"model": self.sharded_state()})["model"])


class PolicyModel(StageModel):
    """Policy or reference policy, with logits as outputs."""

    _MODULE = TargetLogitsModel
    _ADAPTED = True
    replays = True


class ValueModel(StageModel):
    """Critic: the policy's transformer with a value head; in Hugging Face's terms, a token classification model."""

    _MODULE = TargetValuesModel
