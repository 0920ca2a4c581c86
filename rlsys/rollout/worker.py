"""One rollout worker: an engine, a search client, and episodes between them.

Contract:
- All methods belong to one event loop and may be called concurrently.
- All episodes and turns of a group run on this worker's engine, so later turns and siblings find their
  prefix in its cache. Never more than `max_episodes` run at once.
- `run_group` returns as many trajectories as were asked for, or raises. An episode that takes longer than
  `episode_timeout_s`, or whose group is aborted, comes back with what it had, whatever the engine does. Episodes
  that were begun elsewhere go on, with all of that time before them.
- A new version is taken in and staged while episodes run. At the switch, `on_update` says what becomes of
  groups in flight: with `finish` they end on the old version, new groups wait, and all tokens of a group
  have one version; with `continue` they pause, and each token tells its version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from transformers import AutoTokenizer

from rlsys.config.schema import Device, OnUpdate, RolloutConfig, SearchConfig, TaskConfig
from rlsys.data.question import Question
from rlsys.data.trajectory import Finish, Trajectory
from rlsys.errors import RunError
from rlsys.rollout.agent.begun import Begun
from rlsys.rollout.agent.codec import Codec
from rlsys.rollout.agent.doing import Doing
from rlsys.rollout.agent.episode import EpisodeTools, TurnSampling
from rlsys.rollout.agent.group import EpisodeGroup
from rlsys.rollout.agent.within import within
from rlsys.rollout.engine import Engine
from rlsys.rollout.gate import Gate
from rlsys.rollout.sampling import in_training, of_answers
from rlsys.rollout.search_tool import open_tool, search_metrics
from rlsys.weights.transport import BucketHandle, Receiver, TransportSpec, open_receiver


@dataclass(frozen=True, slots=True, eq=False)
class _UnderWay:
    """A group that has not been returned."""

    key: str
    group: EpisodeGroup
    stop: asyncio.Future[None]
    """Done when it is aborted."""


class RolloutWorker:
    """Runs groups of episodes on its own engine. `start` it first; `stop` leaves no process.

    `search.url` must name a running server, unless `search.enabled` is false. Workers with different `seed` sample differently.
    """

    def __init__(
        self,
        model_path: str,
        rollout: RolloutConfig,
        task: TaskConfig,
        search: SearchConfig,
        device: Device,
        seed: int,
        *,
        on_update: OnUpdate = OnUpdate.finish,
        memory_saver: bool = False,
        sampled_answers: bool = False,
    ) -> None:
        """`memory_saver` lets `sleep` free the device's memory, for groups that share devices.

        `sampled_answers` draws answers as in training, whatever temperature is asked for.
        """
        self._sampled_answers = sampled_answers
        self._rollout = rollout
        self._on_update = on_update
        self._search = open_tool(search) if search.enabled else None
        self.engine = Engine(model_path, rollout.engine, device, seed, memory_saver)
        self.engine.require_room(task)
        codec = Codec(AutoTokenizer.from_pretrained(model_path))
        self._tools = EpisodeTools(self.engine, self._search, codec, task)
        self._slots = asyncio.Semaphore(rollout.max_episodes)
        self._gate = Gate()
        self._receiver: Receiver | None = None
        self._receiving = asyncio.Lock()
        self._under_way: set[_UnderWay] = set()
        self._episodes = 0
        self._aborted = 0
        self._drain_s = 0.0

    async def start(self) -> None:
        """Start the engine. Raises RunError if it does not come up in time."""
        await self.engine.start()

    async def run_group(
        self, question: Question, n_samples: int, key: str = "", begun: Sequence[Begun] = ()
    ) -> list[Trajectory]:
        """`n_samples` episodes of one question, side by side, drawn as in training.

        `key` names the group for `abort_group` and `under_way`; `begun` is what there is of it already, each at
        most once. Raises UserError for a question that is too long and RunError for an engine that has refused.
        """
        return await self._run(question, range(n_samples), in_training(self._rollout.sampling), key, begun)

    async def answer(self, question: Question, sample: int = 0, temperature: float = 0.0, key: str = "") -> Trajectory:
        """One episode of an evaluation, as number `sample` of its question. Temperature 0 is greedy.

        Otherwise as `run_group`; with `sampled_answers` it is drawn as in training.
        """
        sampling = of_answers(self._rollout.sampling, temperature, as_rollouts=self._sampled_answers)
        return (await self._run(question, [sample], sampling, key))[0]

    async def abort_group(self, key: str) -> None:
        """End the groups and answers that were started as `key`, if any: their calls return at once.

        Episodes that had ended stay as they are; the others are `Finish.ABORTED` and hold the turns that
        were complete.
        """
        for one in self._under_way:
            if one.key == key and not one.stop.done():
                one.stop.set_result(None)

    def under_way(self, keys: Sequence[str]) -> dict[str, tuple[Begun, ...]]:
        """Of those groups of `keys` that run here: the episodes that have ended or have a whole turn."""
        return {one.key: one.group.begun() for one in self._under_way if one.key in keys}

    def doing(self) -> Doing:
        """What all episodes here are at, at this moment."""
        return Doing(self.engine.busy, dict(+self._tools.awaited))

    async def open_transport(self, spec: TransportSpec) -> None:
        """Meet the sender of the weights, in place of an earlier one. Raises RunError if it does not come."""
        await self._close_transport()
        self._receiver = await asyncio.to_thread(open_receiver, spec)

    async def begin_update(self, version: int) -> None:
        """See `Engine.begin_update`."""
        await self.engine.begin_update(version)

    async def load_bucket(self, handle: BucketHandle) -> None:
        """Take a bucket from the transport; see `Engine.load_bucket`."""
        if self._receiver is None:
            raise RunError("Weights came to a rollout worker without a transport; call open_transport first.")
        async with self._receiving:
            bucket = await asyncio.to_thread(self._receiver.receive, handle)
            await self.engine.load_bucket(bucket)  # Copies: the bytes are lent.
            del bucket
            await asyncio.to_thread(self._receiver.release)

    async def finish_update(self, version: int, digest: str) -> None:
        """Switch to the new version; see `Engine.finish_update`.

        With `OnUpdate.finish` it first waits for the groups in flight, each turn of which may still run.
        """
        if self._on_update is not OnUpdate.finish:
            await self.engine.finish_update(version, digest)
            return
        started = perf_counter()
        async with self._gate.closed():
            self._drain_s += perf_counter() - started
            await self.engine.finish_update(version, digest)

    async def sleep(self) -> None:
        """See `Engine.sleep`."""
        await self.engine.sleep()

    async def wake(self) -> None:
        """See `Engine.wake`."""
        await self.engine.wake()

    def metrics(self) -> dict[str, float]:
        """Sums since the start, and ratios of them. Seconds end in `_s`, shares are of 1.

        `pause_s` is time in which nothing was generated because of a switch; `drain_s` time before it in
        which groups in flight ended and no group began. `asleep_frees_memory` is 0 where sleep frees none.
        """
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
            "pause_s": counts.pause_s,
            "drain_s": self._drain_s,
            "asleep_frees_memory": float(self.engine.frees_memory),
            "version": self.engine.version,
            **(search_metrics(self._search) if self._search else {}),
        }

    async def stop(self) -> None:
        """End the transport, the search client and the engine's processes. May be called again."""
        await self._close_transport()
        if self._search:
            await self._search.close()
        await self.engine.stop()

    async def _close_transport(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            await asyncio.to_thread(receiver.close)

    async def _run(
        self,
        question: Question,
        samples: Sequence[int],
        sampling: TurnSampling,
        key: str,
        begun: Sequence[Begun] = (),
    ) -> list[Trajectory]:
        group = EpisodeGroup(question, samples, self._tools, sampling, begun)
        one = _UnderWay(key, group, asyncio.get_running_loop().create_future())
        self._under_way.add(one)
        try:
            await within(self._play(group), stop=one.stop)
        finally:
            self._under_way.remove(one)
        found = group.trajectories()
        self._episodes += len(found)
        self._aborted += sum(trajectory.finish is Finish.ABORTED for trajectory in found)
        return found

    async def _play(self, group: EpisodeGroup) -> None:
        async with self._gate.inside():
            await group.play(self._slots, self._rollout.episode_timeout_s)
