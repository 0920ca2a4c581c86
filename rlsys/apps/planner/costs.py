"""Computes the seconds of each piece of a run's work. Pure.

`hardware_costs` derives them from the model's shape, the placement, the devices' data sheets (`planning/hardware.yaml`) and
the shares that programs reach (`reached.yaml`). docs/planning.md has every formula and its source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from rlsys.apps.planner.cores import Cores
from rlsys.apps.planner.engine import EngineCosts
from rlsys.cluster.planning.cost import EpisodeTokens, Shares, StepCost
from rlsys.cluster.planning.memory import (
    BYTES,
    count_parameters,
    engine_weights_bytes,
    group_memory,
    kv_cache_tokens,
    kv_token_bytes,
)
from rlsys.cluster.planning.placement import CRITIC, Ranks
from rlsys.config.derived import backward_passes, megatron_groups, scoring_forwards
from rlsys.config.schema import Mode, ParallelConfig, RunConfig, SyncMode
from rlsys.trainer.batches import Plan, SampleSize
from rlsys.weights.flops import Flops
from rlsys.weights.weight_map import Architecture

OPTIMIZER_BYTES = 34
"""Bytes that an AdamW step reads and writes per parameter: gradient 4, master weight and two moments 8 each, bfloat16
weight 2, and the gradient's norm 4."""
_OFFLOADED = ("parameters", "optimizer", "reference")


@dataclass(frozen=True, slots=True)
class Reached:
    """Shares of the data sheets' speeds that programs reach, and times that no data sheet has."""

    train_compute: float
    """Share of the peak in training, with large micro-batches."""
    score_compute: float
    """Share of the peak in log-probs."""
    prefill_compute: float
    """Share of the peak in prefill and decode."""
    decode_memory: float
    """Share of the memory's bandwidth in decode."""
    link: float
    """Share of links and network in collectives."""
    sync_link: float
    """Share of links and network in a weight sync."""
    exchange_s: float
    """Latency of one exchange between the ranks of an engine; a decode step has two in each layer."""
    half_tokens: float
    """Tokens of a device's micro-batch at which half of the compute share is reached."""
    call_s: float
    """Seconds of a call of a Megatron group, besides its micro-batches."""
    expert_compute: float
    """Share of these shares that a mixture of experts reaches: its products are small, and tokens move between devices."""
    expert_token_s: float
    """Seconds of a token in one layer with experts and one pass, besides its products: routing, permutation, launches."""
    expert_request_s: float
    """The same for a request in a decode step."""
    activation_reads: float
    """Times that a pass moves a token's residual stream through memory, per layer."""
    decode_layer_s: float
    """Seconds of a layer in a decode step, besides its reads and products: launches and latencies."""
    request_s: float
    """Seconds of a request in a decode step besides its products: sampling and the host's work."""
    step_s: float
    """Seconds of a step in which only the driver works: records, hand-over, start."""


@dataclass(frozen=True, slots=True)
class CallCosts:
    """Seconds of the calls of a Megatron group."""

    flops: Flops
    passes: float
    """Operations of the call, in forward passes."""
    rate: float
    """Operations per second of the devices of one copy's pipeline stage, with large micro-batches."""
    half_tokens: float
    """See `Reached`; of a whole micro-batch."""
    token_s: float
    """Exchange of activations per token of a stage, over all passes."""
    stages: int
    call_s: float
    apply_s: float = 0.0
    """Seconds of an optimiser step: reduction of gradients, update, gathering of weights."""

    def batch_s(self, sizes: Sequence[SampleSize]) -> float:
        """Return the seconds of one micro-batch in one pipeline stage."""
        tokens = sum(size.tokens for size in sizes)
        if not tokens:
            return 0.0
        operations = self.passes * sum(self.flops.of(*size) for size in sizes)
        products = operations * (1 + self.half_tokens / tokens) / self.rate
        return products / self.stages + tokens * self.token_s

    def seconds(self, plan: Plan, sizes: Sequence[SampleSize]) -> float:
        """Return the seconds of a call: the slowest rank's micro-batches and its pipeline bubble."""
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


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of all work of a run, and where they come from."""

    engine: EngineCosts
    calls: Mapping[str, CallCosts]
    """Megatron group -> its calls: training of actor and critic, log-probs of inference; `values` of a critic."""
    sync: SyncCosts
    switches: Mapping[str, tuple[float, float]]
    """Colocated group -> seconds in which it leaves its devices and comes back."""
    reward_s: float
    step_s: float
    peak: float
    """Operations per second of the actor's devices, by data sheet; 0 if unknown."""
    source: Mapping[str, str]
    """Part of the costs -> where its numbers come from."""
    cores: Cores | None = None
    """Cores that all workers share; None if each has devices of its own."""


def read_reached(path: Path | None = None) -> tuple[Reached, str]:
    """Return the reached shares of a YAML file, by default of the package's, and their source."""
    content = yaml.safe_load((path or Path(__file__).with_name("reached.yaml")).read_text(encoding="utf-8"))
    return Reached(**{field.name: float(content["values"][field.name]) for field in fields(Reached)}), content["source"]


class HardwareCosts:
    """Derives the costs of `config`, whose model has the sizes `model`, on devices named `device`."""

    def __init__(
        self, config: RunConfig, model: Architecture, device: str, reached: Reached, episode: EpisodeTokens
    ) -> None:
        shares = Shares(reached.prefill_compute, reached.decode_memory, reached.link)
        self._config, self._model, self._reached = config, model, reached
        self._step = StepCost(config, model, device, episode, shares)
        self._speed, self.ranks = self._step.speed, self._step.ranks

    def costs(self, source: str) -> Costs:
        """Return all costs; `source` tells where the reached shares come from."""
        sheet = f"data sheet: {self._speed.source}"
        return Costs(
            engine=self.engine(),
            calls=self.calls(),
            sync=self.sync(),
            switches=self.switches(),
            reward_s=0.0,
            step_s=self._reached.step_s,
            peak=len(self.ranks["actor"]) * self._speed.flops,
            source={"speeds": sheet, "shares of them": source},
        )

    def engine(self) -> EngineCosts:
        """Return the costs of an engine."""
        config, model, step, reached = self._config, self._model, self._step, self._reached
        tp = config.rollout.engine.tp
        bandwidth = self._speed.memory * reached.decode_memory
        operations = tp * self._speed.flops * reached.prefill_compute * self._experts
        whole = engine_weights_bytes(config, model)
        experts = (
            3 * model.layers * model.hidden * model.experts * model.expert_ffn * BYTES[config.rollout.engine.dtype]
        )
        exchange = step.exchanged_s(ParallelConfig(tp=tp), self.ranks["rollout"])
        return EngineCosts(
            step_s=(reached.decode_layer_s + 2 * reached.exchange_s * (tp > 1)) * model.layers,
            weights_s=(whole - experts / tp) / bandwidth,
            experts_s=experts / tp / bandwidth,
            expert_share=model.experts_per_token / model.experts if model.experts else 0.0,
            token_s=(step.flops.per_token + step.flops.per_target) / operations,
            request_s=exchange + reached.request_s + reached.expert_request_s * model.layers * bool(model.experts),
            cache_s=kv_token_bytes(config, model) / bandwidth,
            prefill_s=step.flops.per_token / operations + exchange,
            pair_s=2 * step.flops.per_square / operations,
            local_pair_s=2 * step.flops.per_local_square / operations,
            window=step.flops.window,
            cache_tokens=kv_cache_tokens(config, model),
            max_running=config.rollout.engine.max_running,
        )

    def calls(self) -> dict[str, CallCosts]:
        """Return the costs of the calls of each Megatron group."""
        config, reached = self._config, self._reached
        again = int(config.model.recompute)
        calls = {
            "actor": self._call(
                "actor",
                self._step.training_passes()["actor"],
                reached.train_compute,
                backward_passes(config),
            )
        }
        if scoring_forwards(config.algorithm):
            calls["inference"] = self._call("inference", self._step.scoring_passes(), reached.score_compute)
        if CRITIC in megatron_groups(config):
            calls[CRITIC] = self._call(CRITIC, 3 + again, reached.train_compute, 2)
            calls["values"] = self._call(CRITIC, 1, reached.score_compute)
        return calls

    def _call(self, group: str, passes: float, compute: float, backward: int = 0) -> CallCosts:
        parallel, ranks = megatron_groups(self._config)[group].parallel, self.ranks[group]
        devices = parallel.tp * parallel.cp
        flops = self._step.flops
        return CallCosts(
            flops=replace(flops, per_target=0.0) if group == CRITIC else flops,
            passes=passes,
            rate=devices * self._speed.flops * compute * self._experts,
            half_tokens=self._reached.half_tokens * devices,
            # A backward pass is `backward` forward passes' worth of operations, but exchanges activations once. Each of
            # the context-parallel ranks has a share of the tokens.
            token_s=(passes - max(backward - 1, 0)) * self._step.exchanged_s(parallel, ranks) / parallel.cp
            + passes * self._handled_s(parallel),
            stages=parallel.pp,
            call_s=self._reached.call_s,
            apply_s=self._apply_s(parallel, ranks) if backward else 0.0,
        )

    @property
    def _experts(self) -> float:
        return self._reached.expert_compute if self._model.experts else 1.0

    def _handled_s(self, parallel: ParallelConfig) -> float:
        """Return the seconds of a token in a stage's pass, besides products and exchange."""
        model, reached = self._model, self._reached
        nbytes = reached.activation_reads * model.layers * model.hidden * BYTES[self._config.model.dtype]
        seconds = nbytes / (self._speed.memory * reached.decode_memory)
        seconds += reached.expert_token_s * model.layers * bool(model.experts)
        return seconds / (parallel.tp * parallel.cp * parallel.pp)

    def _apply_s(self, parallel: ParallelConfig, ranks: Ranks) -> float:
        shard = count_parameters(self._model) / len(ranks)
        update = OPTIMIZER_BYTES * shard / (self._speed.memory * self._reached.decode_memory)
        return self._reached.call_s + update + self._step.gradients_s(parallel, ranks)

    def sync(self) -> SyncCosts:
        """Return the costs of a weight sync, whose bytes pass through the sender's first rank."""
        config, speed, share = self._config, self._speed, self._reached.sync_link
        nbytes = count_parameters(self._model) * BYTES[config.rollout.engine.dtype]
        actor, rollout = self.ranks["actor"], self.ranks["rollout"]
        inside = self._step.link((*actor, *rollout), len(actor) + len(rollout)) > speed.network * self._reached.link
        host = config.cluster.sync_mode in (SyncMode.tensor, SyncMode.disk)
        wire = (speed.host if host else speed.link if inside else speed.network) * share
        gather = self._step.link(actor, len(actor)) * share / self._reached.link
        held = len(actor) > 1
        scores = config.cluster.mode is Mode.disaggregated and "inference" in self.ranks
        staged = speed.host if host else speed.memory / 2
        return SyncCosts(
            nbytes=nbytes,
            gather_s=(len(actor) - 1) / len(actor) / gather if held else 0.0,
            engine_s=1 / wire,
            inference_s=1 / wire if scores else 0.0,
            activate_s=nbytes / config.rollout.engine.tp / (staged * share),
        )

    def switches(self) -> dict[str, tuple[float, float]]:
        """Return the seconds in which colocated groups leave their devices and come back; empty if disaggregated."""
        config = self._config
        if config.cluster.mode is not Mode.colocated:
            return {}
        rate = self._speed.host * self._reached.sync_link
        found = {}
        for group in [*megatron_groups(config), "rollout"]:
            parts = group_memory(config, self._model, group).parts
            kept = ("parameters",) if group == "rollout" else _OFFLOADED
            seconds = sum(parts.get(part, 0.0) for part in kept) / rate
            found[group] = (seconds, seconds)
        return found


def describe(costs: Any) -> dict[str, Any]:
    """Return a group of costs as plain data."""
    return {field.name: getattr(costs, field.name) for field in fields(costs)}
