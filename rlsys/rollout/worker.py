"""One rollout worker: an engine, a search client, and episodes between them.

Contract: all methods belong to one event loop and may be called concurrently. All episodes and turns of
a group run on this worker's engine, so later turns and siblings find their prefix in its cache. Never
more than `max_episodes` run at once; one that takes longer than `episode_timeout_s` comes back aborted,
so `run_group` always returns as many trajectories as were asked for, or raises.
"""

from __future__ import annotations

import asyncio

from transformers import AutoTokenizer

from rlsys.agent.codec import Codec
from rlsys.agent.episode import EpisodeTools, TurnSampling, run_episode
from rlsys.agent.trajectory import Finish, Trajectory
from rlsys.config.schema import Device, RolloutConfig, SearchConfig, TaskConfig
from rlsys.data.question import Question
from rlsys.errors import UserError
from rlsys.rollout.engine import Engine
from rlsys.search.client import SearchClient
from rlsys.weights.buckets import Bucket


class RolloutWorker:
    """Runs groups of episodes on its own engine. `start` it first; `stop` leaves no process.

    `search.url` must name a running server. Workers with different `seed` sample differently.
    """

    def __init__(
        self,
        model_path: str,
        rollout: RolloutConfig,
        task: TaskConfig,
        search: SearchConfig,
        device: Device,
        seed: int,
    ) -> None:
        if search.url is None:
            raise UserError("search.url is null, so a rollout worker has no server; start one and name it.")
        self._rollout = rollout
        self._search = SearchClient(
            search.url,
            topk=search.topk,
            timeout_s=search.timeout_s,
            retries=search.retries,
            max_concurrent=search.max_concurrent,
        )
        self.engine = Engine(model_path, rollout.engine, device, seed)
        if task.max_total_tokens > self.engine.context_tokens:
            raise UserError(
                f"task.max_total_tokens={task.max_total_tokens} is more than the {self.engine.context_tokens} "
                f"tokens that the model at {model_path} and rollout.engine.kv_cache_tokens allow; lower it."
            )
        codec = Codec(AutoTokenizer.from_pretrained(model_path))
        self._tools = EpisodeTools(self.engine, self._search, codec, task)
        self._slots = asyncio.Semaphore(rollout.max_episodes)
        self._episodes = 0
        self._aborted = 0

    async def start(self) -> None:
        """Start the engine. Raises RunError if it does not come up in time."""
        await self.engine.start()

    async def run_group(self, question: Question, n_samples: int, greedy: bool = False) -> list[Trajectory]:
        """`n_samples` episodes of one question, side by side; `greedy` decodes at temperature 0.

        Raises UserError for a question that is too long and RunError for an engine that has refused.
        """
        sampling = self._sampling(greedy)
        episodes = [
            asyncio.create_task(self._run_episode(question, sample, sampling)) for sample in range(n_samples)
        ]
        try:
            return list(await asyncio.gather(*episodes))
        finally:
            # After an error or a cancellation, no sibling may go on unseen.
            for episode in episodes:
                episode.cancel()
            await asyncio.gather(*episodes, return_exceptions=True)

    async def begin_update(self, version: int) -> None:
        """See `Engine.begin_update`."""
        await self.engine.begin_update(version)

    async def load_bucket(self, bucket: Bucket) -> None:
        """See `Engine.load_bucket`."""
        await self.engine.load_bucket(bucket)

    async def finish_update(self, version: int, digest: str) -> None:
        """See `Engine.finish_update`."""
        await self.engine.finish_update(version, digest)

    def metrics(self) -> dict[str, float]:
        """Sums since the start, and ratios of them. Seconds end in `_s`, shares are of 1."""
        counts = self.engine.counts
        return {
            "episodes": self._episodes,
            "episodes_aborted": self._aborted,
            "requests": counts.requests,
            "requests_running": self.engine.running,
            "requests_aborted": counts.aborted,
            "prompt_tokens": counts.prompt_tokens,
            "generated_tokens": counts.generated_tokens,
            "tokens_per_s": counts.generated_tokens / counts.busy_s if counts.busy_s else 0.0,
            "cached_fraction": counts.cached_tokens / max(counts.prompt_tokens, 1),
            "updates": counts.updates,
            "update_s": counts.update_s,
            "update_bytes": counts.update_bytes,
            "version": self.engine.version,
        }

    async def stop(self) -> None:
        """End the search client and the engine's processes. May be called again."""
        await self._search.close()
        await self.engine.stop()

    async def _run_episode(self, question: Question, sample: int, sampling: TurnSampling) -> Trajectory:
        async with self._slots:
            trajectory = await run_episode(
                question, sample, self._tools, sampling, self._rollout.episode_timeout_s
            )
        self._episodes += 1
        self._aborted += trajectory.finish is Finish.ABORTED
        return trajectory

    def _sampling(self, greedy: bool) -> TurnSampling:
        sampling = self._rollout.sampling
        stop = tuple(sampling.stop)
        if greedy:
            return TurnSampling(temperature=0.0, stop=stop)
        return TurnSampling(sampling.temperature, sampling.top_p, sampling.top_k, stop)
