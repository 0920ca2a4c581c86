"""Computes the seconds of each piece of a run's work, from the model's shape, the placement and the hardware. Pure.

`rlsys plan` simulates a run with these pieces, and `cost` adds them up by formulas. docs/planning.md has every formula
and its source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from rlsys.cluster.planning.hardware import DEVICE, REACHED, SPEEDS, Reached
from rlsys.cluster.planning.memory import (
    BYTES,
    count_parameters,
    engine_weights_bytes,
    group_memory,
    holds_reference,
    kv_cache_tokens,
    kv_token_bytes,
    trained_parameters,
)
from rlsys.cluster.planning.placement import CRITIC, Ranks, parse_placement
from rlsys.config.derived import backward_passes, has_critic, megatron_groups, of_teacher, scoring_forwards
from rlsys.config.schema import LoraSync, Mode, ParallelConfig, RunConfig, SyncMode
from rlsys.weights.flops import Flops, flops_of
from rlsys.weights.weight_map import Architecture, read_architecture

OPTIMIZER_BYTES = 34
"""Bytes that an AdamW step reads and writes per parameter: gradient 4, master weight and two moments 8 each, bfloat16
weight 2, and the gradient's norm 4."""
Size = tuple[int, int]
"""Tokens of a sample, and those that are targets."""
_OFFLOADED = ("parameters", "optimizer", "reference")


@dataclass(frozen=True, slots=True)
class EpisodeTokens:
    """Mean tokens of an episode."""

    prompt: int
    observations: int
    generated: int

    @property
    def total(self) -> int:
        return self.prompt + self.observations + self.generated


EXPECTED = EpisodeTokens(prompt=200, observations=850, generated=350)
"""Assumption for Search-R1: an instruction and a question; two searches with three passages each, which have 100 words or
about 140 tokens (the passages of wiki-18; Karpukhin et al. 2020, arXiv 2004.04906); three turns of about 115 tokens."""


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """Seconds of an engine's work."""

    step_s: float
    """Fixed part of a decode step, whatever its batch."""
    weights_s: float
    """Reading the weights that every step needs."""
    experts_s: float
    """Reading all routed experts; 0 for a dense model."""
    expert_share: float
    """Share of the experts that one token uses."""
    token_s: float
    """Matrix products of one token in a decode step."""
    request_s: float
    """Work of a decode step per request besides its products: exchange between devices, sampling, the host's work."""
    cache_s: float
    """Reading one token of the KV cache."""
    prefill_s: float
    """Prefill of a token."""
    pair_s: float
    """Attention of one new token to one token before it, in prefill: in the layers that attend to all tokens."""
    cache_tokens: float
    """Capacity of the KV cache."""
    max_running: int
    """Most requests of a batch."""
    local_pair_s: float = 0.0
    """The same as `pair_s` in the layers that attend within `window` tokens."""
    window: int = 0

    def decode_s(self, requests: float, context: float) -> tuple[float, float]:
        """Return the seconds of a decode step now, and by how much each further step is longer.

        `context` is the number of tokens that all requests attend to together.
        """
        read = self.weights_s + self.experts_s * (1 - (1 - self.expert_share) ** requests)
        products = max(read, self.token_s * requests)
        return self.step_s + products + self.request_s * requests + self.cache_s * context, self.cache_s * requests

    def fill_s(self, new: float, context: float) -> float:
        """Return the seconds in which `new` tokens after `context` others are prefilled."""
        before = context + new / 2
        return new * (self.prefill_s + self.pair_s * before + self.local_pair_s * min(before, self.window))


@dataclass(frozen=True, slots=True)
class CallCosts:
    """Seconds of the calls of a Megatron group."""

    flops: Flops
    passes: float
    """Operations of the call, in forward passes."""
    rate: float
    """Operations per second of the devices of one copy's pipeline stage."""
    launch_s: float
    """Seconds of a micro-batch in a stage, over all passes, whatever its tokens."""
    token_s: float
    """Exchange of activations and their way through memory per token of a stage, over all passes."""
    stages: int
    call_s: float
    apply_s: float = 0.0
    """Seconds of an optimiser step: reduction of gradients, update, gathering of weights."""

    def batch_s(self, sizes: Sequence[Size]) -> float:
        """Return the seconds of one micro-batch in one pipeline stage."""
        tokens = sum(size[0] for size in sizes)
        if not tokens:
            return 0.0
        operations = self.passes * sum(self.flops.of(*size) for size in sizes)
        return operations / self.rate / self.stages + tokens * self.token_s + self.launch_s

    def alike_s(self, size: Size, held: float) -> float:
        """Return the seconds of a micro-batch that holds `held` samples of one `size`, in one pipeline stage."""
        return held * (self.batch_s([size]) - self.launch_s) + self.launch_s

    def least_s(self, most_tokens: int) -> float:
        """Return the fewest seconds for a token in a stage, in micro-batches of at most `most_tokens`."""
        return self.passes * self.flops.per_token / self.rate / self.stages + self.token_s + self.launch_s / most_tokens

    def seconds(self, plan: Sequence[Sequence[Sequence[int]]], sizes: Sequence[Size]) -> float:
        """Return the seconds of a call: the slowest rank's micro-batches and its pipeline bubble.

        `plan` has the micro-batches of each data-parallel rank, as indices into `sizes`.
        """
        longest = 0.0
        for batches in plan:
            each = [self.batch_s([sizes[index] for index in batch]) for batch in batches]
            longest = max(longest, sum(each) + (self.stages - 1) * max(each, default=0.0))
        return self.call_s + longest


@dataclass(frozen=True, slots=True)
class SyncCosts:
    """Seconds of a weight sync."""

    nbytes: float
    """One copy of the weights."""
    gather_s: float
    """Gathering and packing a byte on the sender."""
    engine_s: float
    """Sending a byte to the engines and staging it."""
    inference_s: float
    """Sending a byte to the inference group and loading it; 0 without one that holds the policy."""
    activate_s: float
    """Switch of an engine to a staged version."""
    keeps_cache: bool = False
    """True if the KV cache survives the switch; rlsys empties it."""


class HardwareCosts:
    """Derives the costs of `config`, whose model has the sizes `model`, on devices named `device`."""

    def __init__(
        self,
        config: RunConfig,
        model: Architecture,
        device: str = DEVICE,
        reached: Reached = REACHED,
        episode: EpisodeTokens = EXPECTED,
    ) -> None:
        self.config, self.model, self.reached, self.speed = config, model, reached, SPEEDS[device]
        self.flops, self.parameters = flops_of(model), count_parameters(model)
        self.ranks = parse_placement(config.cluster.placement, has_critic(config.algorithm))
        self.reference_passes = 1.0
        """Operations of the reference's forward pass, in passes of the policy."""
        if (taught := of_teacher(config)) is not None:
            teacher = flops_of(read_architecture(taught.model.path, taught.model.family))
            size = episode.total, episode.generated
            self.reference_passes = teacher.of(*size) / self.flops.of(*size)

    def engine(self) -> EngineCosts:
        config, model, reached, tp = self.config, self.model, self.reached, self.config.rollout.engine.tp
        bandwidth = self.speed.memory * reached.memory
        operations = tp * self.speed.flops * reached.compute * self._experts
        whole = engine_weights_bytes(config, model)
        mixtures = model.layers - model.dense_layers
        experts = 3 * mixtures * model.hidden * model.experts * model.expert_ffn * BYTES[config.rollout.engine.dtype]
        layer_s = reached.decode_layer_s + reached.decode_expert_s * bool(model.experts)
        exchange = self.exchanged_s(ParallelConfig(tp=tp), self.ranks["rollout"])
        return EngineCosts(
            step_s=(layer_s + 2 * reached.exchange_s * (tp > 1)) * model.layers,
            weights_s=(whole - experts / tp) / bandwidth,
            experts_s=experts / tp / bandwidth,
            expert_share=model.experts_per_token / model.experts if model.experts else 0.0,
            token_s=(self.flops.per_token + self.flops.per_target) / operations,
            request_s=exchange + reached.request_s,
            cache_s=kv_token_bytes(config, model) / bandwidth,
            prefill_s=self.flops.per_token / operations + exchange,
            pair_s=2 * self.flops.per_square / operations,
            local_pair_s=2 * self.flops.per_local_square / operations,
            window=self.flops.window,
            cache_tokens=kv_cache_tokens(config, model),
            max_running=config.rollout.engine.max_running,
        )

    def passes(self) -> dict[str, float]:
        """Return the operations of a sample in each call, in forward passes.

        Calls are training of actor and critic, log-probs of inference, and `values` of a critic.
        """
        config, again = self.config, int(self.config.model.recompute)
        found = {"actor": 1 + backward_passes(config) + again + self._references("actor") * self.reference_passes}
        if forwards := scoring_forwards(config.algorithm):
            found["inference"] = forwards + self._references("inference") * (self.reference_passes - 1)
        if has_critic(config.algorithm):
            found |= {CRITIC: 3 + again, "values": 1}
        return found

    def calls(self) -> dict[str, CallCosts]:
        return {name: self.call(name, passes) for name, passes in self.passes().items()}

    def _references(self, name: str) -> int:
        """Return the number of the reference's forward passes in the call `name`."""
        return int(name in ("actor", "inference") and holds_reference(self.config, name))

    def call(self, name: str, passes: float) -> CallCosts:
        """Return the costs of the call `name`, whose operations are `passes` forward passes."""
        backward = {"actor": backward_passes(self.config), CRITIC: 2}.get(name, 0)
        group = CRITIC if name == "values" else name
        parallel, ranks = megatron_groups(self.config)[group].parallel, self.ranks[group]
        flops, reached, model = self.flops, self.reached, self.model
        launch_s = model.layers * (reached.layer_s + reached.expert_layer_s * bool(model.experts)) / parallel.pp
        # A backward pass is `backward` forward passes' worth of operations and a teacher's pass `reference_passes`, but each
        # exchanges activations once.
        exchanges = passes - max(backward - 1, 0) - self._references(name) * (self.reference_passes - 1)
        return CallCosts(
            flops=replace(flops, per_target=0.0) if group == CRITIC else flops,
            passes=passes,
            rate=parallel.tp * parallel.cp * self.speed.flops * reached.compute * self._experts,
            launch_s=passes * launch_s,
            # Each of the context-parallel ranks has a share of the tokens.
            token_s=exchanges * self.exchanged_s(parallel, ranks) / parallel.cp + passes * self._handled_s(parallel),
            stages=parallel.pp,
            call_s=reached.call_s,
            apply_s=self._apply_s(group) if backward else 0.0,
        )

    @property
    def _experts(self) -> float:
        return self.reached.expert_compute if self.model.experts else 1.0

    def _handled_s(self, parallel: ParallelConfig) -> float:
        """Return the seconds in which a token's activations move through memory in a stage's pass."""
        model, reached = self.model, self.reached
        copies = 1 + model.experts_per_token
        nbytes = reached.activation_reads * copies * model.layers * model.hidden * BYTES[self.config.model.dtype]
        return nbytes / (self.speed.memory * reached.memory) / (parallel.tp * parallel.cp * parallel.pp)

    def _apply_s(self, group: str) -> float:
        """Return the seconds of an optimiser step: data-parallel ranks reduce float32 gradients, update their share of the
        parameters and gather weights."""
        parallel, ranks = megatron_groups(self.config)[group].parallel, self.ranks[group]
        trained = trained_parameters(self.config, self.model, group)
        update = OPTIMIZER_BYTES * trained / len(ranks) / (self.speed.memory * self.reached.memory)
        copies = len(ranks) // (parallel.tp * parallel.pp)
        nbytes = trained / parallel.pp / max(parallel.tp, parallel.ep) * (4 + BYTES[self.config.model.dtype])
        exchange = (copies - 1) / copies * nbytes / self.link(ranks, len(ranks) // parallel.pp)
        return self.reached.call_s + update + exchange

    def exchanged_s(self, parallel: ParallelConfig, ranks: Ranks) -> float:
        """Return the seconds per token in which a rank exchanges activations in one pass through its layers.

        A layer gathers and scatters the residual stream before and after attention and MLP. Experts receive each token's
        copies from other ranks and send them back. Context-parallel ranks pass on their keys and values.
        """
        model, item = self.model, BYTES[self.config.model.dtype]
        tp, cp, ep = parallel.tp, parallel.cp, parallel.ep
        stream, keys = model.hidden * item, 2 * model.kv_heads * model.head_dim * item / tp
        of_layer = 4 * (tp - 1) / tp * stream / self.link(ranks, tp)
        of_layer += 2 * (ep - 1) / ep * model.experts_per_token * stream / tp / self.link(ranks, ep)
        of_layer += (cp - 1) * keys / self.link(ranks, tp * cp)
        return model.layers / parallel.pp * of_layer

    def link(self, ranks: Ranks, size: int) -> float:
        """Return the bytes per second between the members of each `size` consecutive ranks."""
        per_machine = self.config.cluster.devices_per_node or inf
        blocks = (ranks[start : start + size] for start in range(0, len(ranks), size))
        apart = any(block[0] // per_machine != block[-1] // per_machine for block in blocks)
        return (self.speed.network if apart else self.speed.link) * self.reached.link

    def sync(self) -> SyncCosts:
        """Return the costs of a weight sync, whose bytes pass through the sender's first rank."""
        config, speed, share = self.config, self.speed, self.reached.sync_link
        item, adapters = BYTES[config.rollout.engine.dtype], config.model.lora.sync is LoraSync.adapters
        sent = trained_parameters(config, self.model) if adapters else self.parameters
        actor, rollout = self.ranks["actor"], self.ranks["rollout"]
        inside = self.link((*actor, *rollout), len(actor) + len(rollout)) > speed.network * self.reached.link
        host = config.cluster.sync_mode in (SyncMode.tensor, SyncMode.disk)
        wire = (speed.host if host else speed.link if inside else speed.network) * share
        gather = self.link(actor, len(actor)) * share / self.reached.link
        scores = config.cluster.mode is Mode.disaggregated and "inference" in self.ranks
        staged = speed.host if host else speed.memory / 2
        return SyncCosts(
            nbytes=sent * item,
            gather_s=(len(actor) - 1) / len(actor) / gather,
            engine_s=1 / wire,
            inference_s=1 / wire if scores else 0.0,
            activate_s=self.parameters * item / config.rollout.engine.tp / (staged * share),
        )

    def switches(self) -> dict[str, tuple[float, float]]:
        """Return the seconds in which colocated groups leave their devices and come back; empty if disaggregated."""
        config = self.config
        if config.cluster.mode is not Mode.colocated:
            return {}
        rate = self.speed.host * self.reached.sync_link
        found = {}
        for group in [*megatron_groups(config), "rollout"]:
            parts = group_memory(config, self.model, group).parts
            kept = ("parameters",) if group == "rollout" else _OFFLOADED
            seconds = sum(parts.get(part, 0.0) for part in kept) / rate
            found[group] = (seconds, seconds)
        return found
