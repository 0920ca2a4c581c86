"""One rank of a Megatron group, as far as its memory is concerned: what it holds of the model and of a micro-batch. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from rlsys.cluster.planning.activations import CPU, LOCAL, Kernels, Work
from rlsys.cluster.planning.placement import parse_placement
from rlsys.config.derived import has_critic, megatron_groups
from rlsys.config.schema import (
    CriticConfig,
    Device,
    Dtype,
    InferenceConfig,
    Layers,
    OptimizerConfig,
    Packing,
    ParallelConfig,
    RunConfig,
)
from rlsys.weights.families import Architecture, Cut, Rule, rules_of
from rlsys.weights.sizes import stage_layers

BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2}


@dataclass(frozen=True, slots=True)
class Load:
    """Micro-batches of one size, whole: of all context-parallel ranks."""

    tokens: int
    """Of one, padding included."""
    targets: int
    width: int
    """Of its rows, or of the longest sequence of a packed one."""
    micro_batches: int | None = None
    """Of a call, no more of which are in a pipeline at a time; None: enough to fill it."""
    routed: int | None = None
    """Tokens that a rank's experts get of one, each counted as often as it is sent; None: all equally many."""


@dataclass(frozen=True, slots=True)
class Held:
    """Numbers of parameters."""

    shared: float
    experts: float
    largest: float
    """Of the largest one."""

    @property
    def all(self) -> float:
        """Of the rank."""
        return self.shared + self.experts


@dataclass(frozen=True)
class Rank:
    """A rank of pipeline stage `stage`, which gets `load`."""

    config: RunConfig
    model: Architecture
    group: str
    stage: int
    load: Load

    @cached_property
    def parallel(self) -> ParallelConfig:
        """How its group is cut."""
        return megatron_groups(self.config)[self.group].parallel

    @property
    def optimizer(self) -> OptimizerConfig | None:
        """None where nothing is trained."""
        settings = megatron_groups(self.config)[self.group]
        return None if isinstance(settings, InferenceConfig) else settings.optimizer

    @property
    def is_critic(self) -> bool:
        """Whether values take the place of logits."""
        return isinstance(megatron_groups(self.config)[self.group], CriticConfig)

    @property
    def item(self) -> int:
        """Bytes of a weight."""
        return BYTES[self.config.model.dtype]

    @property
    def last(self) -> bool:
        """Whether it reads out."""
        return self.stage == self.parallel.pp - 1

    @cached_property
    def stage_size(self) -> int:
        """Ranks of a pipeline stage."""
        ranks = parse_placement(self.config.cluster.placement, has_critic(self.config.algorithm))[self.group]
        return len(ranks) // self.parallel.pp

    @cached_property
    def layers(self) -> int:
        """Of its stage."""
        return len(stage_layers(self.model.layers, self.parallel.pp, self.parallel.pp_layers)[self.stage])

    @property
    def columns(self) -> int:
        """Of the vocabulary, padding included."""
        return self.model.padded_vocab(self.parallel.tp) // self.parallel.tp

    @property
    def tied_here(self) -> bool:
        """Whether one matrix embeds and reads out: with more stages, the last has a copy."""
        return self.model.tied and self.parallel.pp == 1 and not self.is_critic

    @property
    def in_flight(self) -> int:
        """Micro-batches whose activations it keeps at a time (one forward, one backward: Narayanan et al. 2021)."""
        depth = self.parallel.pp - self.stage
        return depth if self.load.micro_batches is None else min(depth, self.load.micro_batches)

    @property
    def targets(self) -> int:
        """That it reads out itself."""
        return -(-self.load.targets // self.parallel.cp)

    @property
    def kernels(self) -> Kernels:
        """What computes."""
        model = self.config.model
        if self.config.cluster.device is Device.cpu:
            return CPU
        if model.layers is Layers.local:
            return replace(LOCAL, fused_swiglu=model.fusions)
        return Kernels(
            fused_norm=True,
            fused_swiglu=model.fusions,
            fused_rope=model.fusions,
            engine=True,
            chunk_bytes=LOCAL.chunk_bytes,
            masks=False,
            foreach=False,
        )

    @cached_property
    def held(self) -> Held:
        """Its parameters, as TP, PP and EP cut them."""
        shared = experts = largest = 0.0
        for rule, count in self._rules():
            size = self._cut(rule)
            if rule.per_expert:
                experts += size * count * self.model.experts / self.parallel.ep
            else:
                shared += size * count
            largest = max(largest, size if count else 0.0)
        return Held(shared, experts, largest)

    @cached_property
    def work(self) -> Work:
        """What it does of one layer."""
        model, tp = self.model, self.parallel.tp
        tokens = -(-self.load.tokens // self.parallel.cp)
        normed = -(-tokens // tp) if self.parallel.sequence_parallel else tokens
        packed = megatron_groups(self.config)[self.group].packing is Packing.packed
        return Work(
            item=self.item,
            tokens=tokens,
            normed=normed,
            width=tokens if packed else self.load.width,
            packed=packed,
            longest=self.load.width,
            cp=self.parallel.cp,
            hidden=model.hidden,
            head_dim=model.head_dim,
            heads=model.heads // tp,
            query=model.heads * model.head_dim // tp,
            # Where there are more ranks than key heads, several have the same one.
            key=max(1, model.kv_heads // tp) * model.head_dim,
            ffn=model.ffn // tp,
            qk_norm=model.qk_norm,
            experts=model.experts,
            ep=self.parallel.ep,
            routed=normed * model.experts_per_token if self.load.routed is None else self.load.routed,
            expert_ffn=model.expert_ffn,
        )

    def _rules(self) -> Iterator[tuple[Rule, int]]:
        """Each tensor of the model, and how many of its kind the stage has; an expert's count as one."""
        seen_layer = False
        for rule in rules_of(self.model, values=self.is_critic):
            if rule.per_layer:
                seen_layer = True
                yield rule, self.layers
            elif not seen_layer:
                yield rule, int(self.stage == 0)
            else:
                yield rule, int(self.last and (rule.exported or not self.tied_here))

    def _cut(self, rule: Rule) -> float:
        """Numbers of one tensor that a TP rank holds; experts are not cut."""
        whole = sum(map(prod, rule.shapes))
        if rule.cut is Cut.VOCAB:
            return self.columns * self.model.hidden
        return whole if rule.cut is Cut.WHOLE or rule.per_expert else whole / self.parallel.tp
