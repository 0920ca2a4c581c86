"""Estimates the seconds of a step's stages from the model, the placement and the data sheet of the devices. Pure.

A disaggregated run overlaps rollout, inference and training, so its longest stage bounds a step; a colocated run adds
them up.

    training    3 forward passes' worth of operations, because a backward pass takes two; 4 if activations are recomputed.
                A critic trains as well, and first computes values (one pass more)
    inference   1 forward pass of the policy and 1 of the reference, as far as a run needs them (`scoring_forwards`);
                a teacher's pass counts by its own operations
    rollout     decoding, prefill, and the last episode

`Flops` counts operations; a group computes at `COMPUTE_SHARE` of the peak of its devices. Added to that are the
activations that tensor- and expert-parallel ranks exchange, the gradients and weights that data-parallel ranks
exchange, and the bubble of pipeline stages: pp - 1 micro-batches per call. The driver sends what has arrived: while a
call of m micro-batches runs, m + pp - 1 more arrive if the stages of the step are balanced. So calls grow, and the M
micro-batches of an update take about sqrt(2 M / (pp - 1)) calls: a bubble of sqrt(2 (pp - 1) / M), at most
(pp - 1) / pp, because a call has at least pp micro-batches.

One decode step of an engine gives one token to each of its B requests. It takes

    max(weights / bandwidth, 2 parameters B / operations) + B context KV / bandwidth + exchange,

at least B `HOST_S`. The last episode has as many tokens as the limits allow; those beyond the mean are decoded alone.

No figure was measured on GPUs. Not counted: waiting for searches, weight sync, offloading, evaluations, and the start
and end of a step, when not all stages work.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt
from pathlib import Path
from typing import Any

import yaml

from rlsys.cluster.planning.memory import (
    BYTES,
    count_parameters,
    engine_weights_bytes,
    holds_reference,
    kv_cache_tokens,
    kv_token_bytes,
)
from rlsys.cluster.planning.placement import Ranks, parse_placement
from rlsys.config.derived import (
    backward_passes,
    has_critic,
    has_reference,
    megatron_groups,
    of_teacher,
    scoring_forwards,
)
from rlsys.config.schema import Mode, ParallelConfig, RunConfig
from rlsys.observe.spans import PEAK_TFLOPS
from rlsys.weights.flops import flops_of
from rlsys.weights.weight_map import Architecture, read_architecture


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """Speeds of one device, from the vendor's data sheet."""

    flops: float  # Dense bfloat16 operations per second.
    memory: float  # Bytes per second from and to its memory.
    link: float  # Bytes per second to other devices of the machine, in one direction.
    network: float  # Bytes per second to another machine.
    host: float  # Bytes per second from and to the host's memory.
    memory_gib: float
    per_machine: int  # Devices that the links connect.
    source: str


def _speed(name: str, sheet: dict[str, Any]) -> DeviceSpeed:
    tflops: float = sheet["tflops"] if "tflops" in sheet else PEAK_TFLOPS[name]
    return DeviceSpeed(
        flops=tflops * 1e12,
        memory=sheet["memory_tb_s"] * 1e12,
        link=sheet["link_gb_s"] * 1e9,
        network=sheet["network_gb_s"] * 1e9,
        host=sheet["host_gb_s"] * 1e9,
        memory_gib=sheet["memory_gib"],
        per_machine=sheet["per_machine"],
        source=sheet["source"],
    )


DEVICE = "H100"
"""Device of the estimates; the experiments state GPUs of 80 GB."""
SPEEDS = {
    name: _speed(name, sheet)
    for name, sheet in yaml.safe_load(Path(__file__).with_name("hardware.yaml").read_text(encoding="utf-8")).items()
}
"""Device name -> speeds."""
COMPUTE_SHARE = 0.45
"""Share of a device's peak that matrix products reach. Megatron-LM reports 41 to 48 % for training on H100 (its README);
forward passes and prefill are assumed to reach the same."""
MEMORY_SHARE = LINK_SHARE = 0.7
"""Share of the bandwidth of memory and links that is reached; an assumption."""
NETWORK = SPEEDS[DEVICE].network
"""Bytes per second of a device to another machine."""
EXCHANGE_S = 10e-6
"""Latency of one exchange between the ranks of an engine; an assumption."""
HOST_S = 25e-6
"""Host time per request and decode step in SGLang's scheduler, mostly for the text in which it looks for stop strings;
estimated from its source. It overlaps with the device's work."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of a device's speeds that programs reach."""

    compute: float = COMPUTE_SHARE
    memory: float = MEMORY_SHARE
    link: float = LINK_SHARE


@dataclass(frozen=True, slots=True)
class EpisodeTokens:
    """Mean tokens of an episode."""

    prompt: int
    observations: int
    generated: int

    @property
    def total(self) -> int:
        """All tokens."""
        return self.prompt + self.observations + self.generated


EXPECTED = EpisodeTokens(prompt=200, observations=850, generated=350)
"""Assumption for Search-R1: an instruction and a question; two searches with three passages each, which have 100 words or
about 140 tokens (the passages of wiki-18; Karpukhin et al. 2020, arXiv 2004.04906); three turns of about 115 tokens."""


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Estimated seconds of each stage of one step."""

    rollout: float
    inference: float
    training: float

    def of_step(self, mode: Mode) -> float:
        """Return the seconds that bound a step: the longest stage, or the sum if the stages share their devices."""
        stages = (self.rollout, self.inference, self.training)
        return sum(stages) if mode is Mode.colocated else max(stages)


class StepCost:
    """Estimates for one step of `config`, whose model has the sizes `model`, on devices of the kind `device`."""

    def __init__(
        self,
        config: RunConfig,
        model: Architecture,
        device: str = DEVICE,
        episode: EpisodeTokens = EXPECTED,
        shares: Shares = Shares(),
    ) -> None:
        self.config, self.model, self.speed, self.episode = config, model, SPEEDS[device], episode
        self.shares = shares
        self.flops = flops_of(model)
        self.parameters = count_parameters(model)
        self.episodes = config.trainer.prompts_per_step * config.algorithm.n_samples
        self.ranks = parse_placement(config.cluster.placement, has_critic(config.algorithm))
        self.reference_passes = 1.0
        """Operations of the reference's forward pass, in passes of the policy."""
        if (taught := of_teacher(config)) is not None:
            teacher = flops_of(read_architecture(taught.model.path, taught.model.family))
            sizes = (episode.total, episode.generated)
            self.reference_passes = teacher.of(*sizes) / self.flops.of(*sizes)

    def stages(self) -> StageSeconds:
        """Return the seconds of all stages."""
        return StageSeconds(self.rollout_s(), self.inference_s(), self.training_s())

    def scoring_passes(self) -> float:
        """Return the operations of scoring in the inference group, in forward passes over the step's episodes."""
        forwards, algorithm = scoring_forwards(self.config.algorithm), self.config.algorithm
        return forwards + has_reference(algorithm) * (self.reference_passes - 1.0)

    def training_passes(self) -> dict[str, float]:
        """Return the operations of training by group, in forward passes over the step's episodes."""
        algorithm, again = self.config.algorithm, int(self.config.model.recompute)
        reference = holds_reference(self.config, "actor") * self.reference_passes
        passes = {"actor": 1 + backward_passes(self.config) + again + reference}
        return passes | ({"critic": 4 + again} if has_critic(algorithm) else {})

    def training_s(self) -> float:
        """Return the seconds of training; actor and critic compute one after the other on devices that they share."""
        updates, targets = self.config.trainer.mini_batches, {"actor": self.episode.generated, "critic": 0}
        # A backward pass exchanges activations once.
        backward = {"actor": backward_passes(self.config), "critic": 2}
        each = [
            self.passes_s(group, passes, passes - backward[group] + 1, targets[group], updates)
            for group, passes in self.training_passes().items()
        ]
        together = {*self.ranks["actor"]} & {*self.ranks.get("critic", ())}
        return sum(each) if together else max(each)

    def inference_s(self) -> float:
        """Return the seconds of computing log-probs of policy and reference."""
        forwards = scoring_forwards(self.config.algorithm)
        if not forwards:
            return 0.0
        return self.passes_s("inference", self.scoring_passes(), forwards, self.episode.generated)

    def pass_flops(self, targets: int) -> float:
        """Return the operations of one forward pass over the step's episodes, with `targets` output positions each."""
        return self.episodes * self.flops.of(self.episode.total, targets)

    def passes_s(self, group: str, forwards: float, exchanges: float, targets: int, updates: int = 0) -> float:
        """Return the seconds in which a Megatron group passes over all episodes of the step.

        `forwards`: operations, in forward passes. `exchanges`: passes that exchange activations. `targets`: see
        `pass_flops`. `updates`: optimiser steps.
        """
        settings, ranks = megatron_groups(self.config)[group], self.ranks[group]
        parallel = settings.parallel
        copies = len(ranks) // (parallel.tp * parallel.pp)  # Ranks with the same weights, which share the tokens.
        busy = forwards * self.pass_flops(targets) / (len(ranks) * self.speed.flops * self.shares.compute)
        busy += exchanges * self.episodes * self.episode.total / copies * self.exchanged_s(parallel, ranks)
        micro_batches = self.episodes * self.episode.total * parallel.cp / copies / settings.micro_batch_tokens
        waiting = parallel.pp - 1
        bubble = min(waiting / parallel.pp, sqrt(2 * waiting * max(1, updates) / micro_batches))
        return busy * (1 + bubble) + updates * self.gradients_s(parallel, ranks)

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

    def gradients_s(self, parallel: ParallelConfig, ranks: Ranks) -> float:
        """Return the seconds in which data-parallel ranks reduce float32 gradients and gather weights."""
        copies = len(ranks) // (parallel.tp * parallel.pp)
        held = self.parameters / parallel.pp / max(parallel.tp, parallel.ep)
        nbytes = held * (4 + BYTES[self.config.model.dtype])
        return (copies - 1) / copies * nbytes / self.link(ranks, len(ranks) // parallel.pp)

    def link(self, ranks: Ranks, size: int) -> float:
        """Return the bytes per second between the members of each `size` consecutive ranks."""
        per_machine = self.config.cluster.devices_per_node or inf
        blocks = (ranks[start : start + size] for start in range(0, len(ranks), size))
        apart = any(block[0] // per_machine != block[-1] // per_machine for block in blocks)
        return (self.speed.network if apart else self.speed.link) * self.shares.link

    def rollout_s(self) -> float:
        """Return the seconds in which the engines generate all episodes; infinite if an engine has no room for one."""
        config, episode, tp = self.config, self.episode, self.config.rollout.engine.tp
        episodes, requests = self.episodes / self.engines, self.requests
        if requests < 1:
            return inf
        decode = episodes * episode.generated / requests * self.decode_s(requests)
        # The episodes of a group share the prompt's entries in the prefix cache.
        new = episodes * (episode.observations + episode.prompt / config.algorithm.n_samples)
        compute = self.flops.of(episode.total, 0) / episode.total / (tp * self.speed.flops * self.shares.compute)
        prefill = new * (compute + self.exchanged_s(ParallelConfig(tp=tp), self.ranks["rollout"]))
        longest = (config.task.max_turns + 1) * config.task.max_turn_tokens
        return decode + prefill + max(0, longest - episode.generated) * self.decode_s(1)

    @property
    def engines(self) -> int:
        """Number of engines that roll out."""
        return len(self.ranks["rollout"]) // self.config.rollout.engine.tp - (self.config.eval.engines or 0)

    @property
    def requests(self) -> float:
        """Requests that an engine decodes at a time, limited by its episodes, settings and KV cache."""
        rollout = self.config.rollout
        return min(self.episodes / self.engines, rollout.max_episodes, rollout.engine.max_running, self.room)

    @property
    def room(self) -> float:
        """Number of episodes of mean context that an engine's KV cache holds."""
        return kv_cache_tokens(self.config, self.model) / self._context

    def decode_s(self, requests: float) -> float:
        """Return the seconds of one decode step of an engine with this many requests, of mean context."""
        model, tp = self.model, self.config.rollout.engine.tp
        bandwidth = self.speed.memory * self.shares.memory
        read = engine_weights_bytes(self.config, model) / bandwidth
        operations = requests * (self.flops.per_token + self.flops.per_target)
        compute = operations / (tp * self.speed.flops * self.shares.compute)
        cache = requests * self._context * kv_token_bytes(self.config, model) / bandwidth
        exchange = requests * self.exchanged_s(ParallelConfig(tp=tp), self.ranks["rollout"])
        exchange += 2 * model.layers * EXCHANGE_S if tp > 1 else 0.0
        return max(max(read, compute) + cache + exchange, requests * HOST_S)

    @property
    def _context(self) -> float:
        """Mean tokens in the KV cache of an episode while it runs."""
        return self.episode.prompt + (self.episode.observations + self.episode.generated) / 2
