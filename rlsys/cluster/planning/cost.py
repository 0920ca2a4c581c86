"""Estimates the seconds of a step's stages by formulas, from the pieces of work of `work`. Pure.

A disaggregated run overlaps rollout, inference and training, so its longest stage bounds a step; a colocated run adds
them up.

    training    3 forward passes' worth of operations, because a backward pass takes two; 4 if activations are recomputed.
                A critic trains as well, and first computes values (one pass more)
    inference   1 forward pass of the policy and 1 of the reference, as far as a run needs them (`scoring_forwards`);
                a teacher's pass counts by its own operations
    rollout     decoding, prefill, and the last episode

A Megatron group passes full micro-batches; its optimiser steps, and the bubble of pipeline stages, pp - 1 micro-batches
per call, are added. The driver sends what has arrived: while a call of m micro-batches runs, m + pp - 1 more arrive if
the stages of the step are balanced. So calls grow, and the M micro-batches of an update take about sqrt(2 M / (pp - 1))
calls: a bubble of sqrt(2 (pp - 1) / M), at most (pp - 1) / pp, because a call has at least pp micro-batches.

One decode step of an engine gives one token to each of its requests. The last episode has as many tokens as the limits
allow; those beyond the mean are decoded alone.

No figure was measured on GPUs. Not counted: waiting for searches, weight sync, offloading, evaluations, and the start
and end of a step, when not all stages work.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf, sqrt

from rlsys.cluster.planning.hardware import DEVICE, REACHED, Reached
from rlsys.cluster.planning.placement import CRITIC
from rlsys.cluster.planning.work import EXPECTED, EngineCosts, EpisodeTokens, HardwareCosts
from rlsys.config.derived import concurrent_episodes, megatron_groups
from rlsys.config.schema import Mode, RunConfig
from rlsys.weights.weight_map import Architecture


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
        reached: Reached = REACHED,
    ) -> None:
        self.config, self.model, self.episode = config, model, episode
        self.work = HardwareCosts(config, model, device, reached, episode)
        self.flops, self.ranks = self.work.flops, self.work.ranks
        self.episodes = config.trainer.prompts_per_step * config.algorithm.n_samples

    def stages(self) -> StageSeconds:
        return StageSeconds(self.rollout_s(), self.inference_s(), self.training_s())

    def training_passes(self) -> dict[str, float]:
        """Return the operations of training by group, in forward passes over the step's episodes, values included."""
        passes = self.work.passes()
        critic = {CRITIC: passes[CRITIC] + passes["values"]} if CRITIC in passes else {}
        return {"actor": passes["actor"]} | critic

    def training_s(self) -> float:
        """Return the seconds of training; actor and critic compute one after the other on devices that they share."""
        actor = self.calls_s("actor")
        critic = self.calls_s(CRITIC) + self.calls_s("values")
        together = {*self.ranks["actor"]} & {*self.ranks.get(CRITIC, ())}
        return actor + critic if together else max(actor, critic)

    def inference_s(self) -> float:
        """Return the seconds of computing log-probs of policy and reference."""
        return self.calls_s("inference")

    def pass_flops(self, targets: int) -> float:
        """Return the operations of one forward pass over the step's episodes, with `targets` output positions each."""
        return self.episodes * self.flops.of(self.episode.total, targets)

    def calls_s(self, name: str) -> float:
        """Return the seconds of the calls `name` of a Megatron group over all episodes of the step; 0 without any."""
        passes = self.work.passes().get(name)
        if passes is None:
            return 0.0
        call = self.work.call(name, passes)
        group = CRITIC if name == "values" else name
        settings, ranks = megatron_groups(self.config)[group], self.ranks[group]
        parallel = settings.parallel
        copies = len(ranks) / (parallel.tp * parallel.pp * parallel.cp)
        held = settings.micro_batch_tokens / self.episode.total
        micro_batches = self.episodes / copies / held
        updates = self.config.trainer.mini_batches if call.apply_s else 0
        waiting = call.stages - 1
        bubble = min(waiting / call.stages, sqrt(2 * waiting * max(1, updates) / micro_batches))
        one = call.alike_s((self.episode.total, self.episode.generated), held)
        return micro_batches * one * (1 + bubble) + updates * call.apply_s

    def rollout_s(self) -> float:
        """Return the seconds in which the engines generate all episodes; infinite if an engine has no room for one."""
        config, episode, engine = self.config, self.episode, self.engine
        episodes, requests = self.episodes / self.engines, self.requests
        if requests < 1:
            return inf
        decode = episodes * episode.generated / requests * self.decode_s(requests)
        # The episodes of a group share the prompt's entries in the prefix cache.
        new = episodes * (episode.observations + episode.prompt / config.algorithm.n_samples)
        prefill = new * engine.fill_s(episode.total, 0) / episode.total
        longest = (config.task.max_turns + 1) * config.task.max_turn_tokens
        return decode + prefill + max(0, longest - episode.generated) * self.decode_s(1)

    @cached_property
    def engine(self) -> EngineCosts:
        return self.work.engine()

    @property
    def engines(self) -> int:
        """Number of engines that roll out."""
        return len(self.ranks["rollout"]) // self.config.rollout.engine.tp - (self.config.eval.engines or 0)

    @property
    def requests(self) -> float:
        """Requests that an engine decodes at a time, limited by its episodes, settings and KV cache."""
        most = concurrent_episodes(self.config.task, self.config.rollout)
        return min(self.episodes / self.engines, most, self.config.rollout.engine.max_running, self.room)

    @property
    def room(self) -> float:
        """Number of episodes of mean context that an engine's KV cache holds."""
        return self.engine.cache_tokens / self._context

    def decode_s(self, requests: float) -> float:
        """Return the seconds of one decode step of an engine with this many requests, of mean context."""
        return self.engine.decode_s(requests, requests * self._context)[0]

    @property
    def _context(self) -> float:
        """Mean tokens in the KV cache of an episode while it runs."""
        return self.episode.prompt + (self.episode.observations + self.episode.generated) / 2
