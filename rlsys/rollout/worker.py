"""The rollout worker: runs the episodes of prompt groups on one engine, and receives its new weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from time import perf_counter

from transformers import AutoTokenizer

from rlsys.config.derived import concurrent_episodes
from rlsys.config.schema import (
    Device,
    LoraConfig,
    LoraSync,
    OnUpdate,
    RolloutConfig,
    SearchConfig,
    SyncMode,
    TaskConfig,
)
from rlsys.data.question import Question
from rlsys.data.trajectory import Finish, Trajectory
from rlsys.errors import RunError
from rlsys.rollout.agent.episode import EngineActivity, EpisodeGroup, EpisodeTools
from rlsys.rollout.agent.recorder import TurnSampling, evaluation_sampling, training_sampling
from rlsys.rollout.agent.tokens import Codec, EpisodeProgress
from rlsys.rollout.engine import EngineDriver
from rlsys.rollout.staging import AdapterMerger
from rlsys.rollout.tools.search_tool import for_run, open_tool, search_metrics
from rlsys.weights.transport import BucketHandle, Receiver, TransportSpec, open_receiver
from rlsys.weights.weight_map import read_architecture


class DrainLock:
    """Lock around calls. Closing it blocks new calls and waits for calls in flight; it always reopens."""

    def __init__(self) -> None:
        self._gate = asyncio.Lock()
        """Held while the lock is closed, and for a moment by each entering call."""
        self._empty = asyncio.Event()
        self._empty.set()
        self._inside = 0

    @asynccontextmanager
    async def inside(self) -> AsyncIterator[None]:
        """Wait until the lock is open, then run the body as a call in flight."""
        async with self._gate:
            self._inside += 1
            self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if self._inside == 0:
                self._empty.set()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Block new calls, wait for calls in flight, then run the body; one caller at a time."""
        async with self._gate:
            await self._empty.wait()
            yield


class RolloutWorker:
    """Runs prompt groups on its own engine. Call `start` first; `stop` leaves no process.

    Contract:
    - All methods must be called on one event loop; calls may overlap.
    - All episodes and turns of a group run on this worker's engine, so that later turns and other episodes of the group
      find their prefix in its cache. At most `max_episodes` episodes run at once.
    - `run_group` returns as many trajectories as requested, or raises. An episode that exceeds `episode_timeout_s`, or
      whose group is aborted, returns its tokens so far, even if the engine does not respond. A resumed episode has the
      full timeout again.
    - `on_update` decides what an activation does to groups in flight. With `finish` they end under the old version
      while new groups wait, so all tokens of a group have one version. With `continue` they only pause, or at most end
      their turn; see `EngineCapabilities.continues`.

    `search.url` must name a running server unless `search.enabled` is false. Workers with different `seed` sample
    differently.
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
        family: str | None = None,
        returns_routes: bool = False,
        lora: LoraConfig | None = None,
    ) -> None:
        """`memory_saver` makes `sleep` free device memory; `sampled_answers` makes `answer` sample as in training;
        `family` is the value of `model.family`; `returns_routes` records the experts of each token of a rollout; `lora`
        are the adapters of the policy."""
        self._sampled_answers = sampled_answers
        self._rollout = rollout
        self._on_update = on_update
        self._search = open_tool(search) if search.enabled else None
        architecture = read_architecture(model_path, family, weights_only=True)
        alone = lora is not None and lora.rank > 0 and lora.sync is LoraSync.adapters
        self.engine = EngineDriver(
            model_path,
            rollout.engine,
            device,
            seed,
            memory_saver,
            architecture,
            returns_routes=returns_routes,
            merger=AdapterMerger(model_path, architecture, lora) if lora is not None and alone else None,
        )
        self._routes_from = 0 if returns_routes else None
        self.engine.require_room(task)
        codec = Codec(AutoTokenizer.from_pretrained(model_path))
        self._tools = EpisodeTools(self.engine, self._search and for_run(self._search, search), codec, task)
        self._slots = asyncio.Semaphore(concurrent_episodes(task, rollout))
        self._draining = DrainLock()
        self._receiver: Receiver | None = None
        self._stages_in_host = True
        self._receiving = asyncio.Lock()
        self._in_flight: dict[asyncio.Timeout, tuple[str, EpisodeGroup]] = {}
        """Timeout that aborts a group -> key and group, for each group in flight."""
        self._episodes = 0
        self._aborted = 0
        self.start, self.begin_update = self.engine.start, self.engine.begin_update
        self.sleep, self.wake = self.engine.sleep, self.engine.wake

    async def run_group(
        self,
        question: Question,
        n_samples: int,
        key: str = "",
        progress: Sequence[EpisodeProgress] = (),
        *,
        first: int = 0,
        sampling: TurnSampling | None = None,
    ) -> list[Trajectory]:
        """Run `n_samples` episodes of one question concurrently, sampled as in training unless `sampling` is given.

        The episodes are the samples `first`, `first` + 1, ... of the question. `key` names the group for `abort_group`
        and `in_flight`. `progress` has the episodes that began elsewhere, each at most once. Raises UserError for a
        question that is too long, RunError after a failed weight update, and SearchFailed if no search server answers.
        """
        drawn = sampling or replace(training_sampling(self._rollout.sampling), routes_from=self._routes_from)
        group = EpisodeGroup(question, range(first, first + n_samples), self._tools, drawn, progress)
        until_aborted = asyncio.timeout(None)
        try:
            async with until_aborted:
                self._in_flight[until_aborted] = (key, group)
                async with self._draining.inside():
                    await group.play(self._slots, self._rollout.episode_timeout_s)
        except TimeoutError:
            if not until_aborted.expired():
                raise
        finally:
            self._in_flight.pop(until_aborted, None)
        trajectories = group.trajectories()
        self._episodes += len(trajectories)
        self._aborted += sum(trajectory.finish is Finish.ABORTED for trajectory in trajectories)
        return trajectories

    async def answer(self, question: Question, sample: int = 0, temperature: float = 0.0, key: str = "") -> Trajectory:
        """Run one episode of an evaluation, as sample number `sample` of its question. Temperature 0 is greedy."""
        sampling = evaluation_sampling(self._rollout.sampling, temperature, as_rollouts=self._sampled_answers)
        return (await self.run_group(question, 1, key, first=sample, sampling=sampling))[0]

    async def abort_group(self, key: str) -> None:
        """Abort the groups and answers started as `key`: their calls return at once with the tokens so far."""
        for until_aborted, (started_as, _) in self._in_flight.items():
            if started_as == key and not until_aborted.expired():
                until_aborted.reschedule(asyncio.get_running_loop().time())

    async def settle(self) -> None:
        """End all groups in flight, and wait until no group and no weight switch runs."""
        for key in {key for key, _ in self._in_flight.values()}:
            await self.abort_group(key)
        async with self._draining.closed():
            await self.engine.settle()

    def in_flight(self, keys: Sequence[str]) -> dict[str, tuple[EpisodeProgress, ...]]:
        """Return key -> progress of each group in `keys` that is in flight here.

        The progress has the episodes that have finished or completed a turn.
        """
        return {key: group.progress() for key, group in self._in_flight.values() if key in keys}

    def activity(self) -> EngineActivity:
        """Return the engine's current state and the tools that episodes wait for."""
        return EngineActivity(self.engine.busy, dict(+self._tools.awaited), self.engine.progress)

    async def open_transport(self, spec: TransportSpec) -> None:
        """Connect to the weight sender, replacing an earlier transport. Raises RunError if it does not connect."""
        await self._close_transport()
        self._receiver = await asyncio.to_thread(open_receiver, spec)
        self._stages_in_host = spec.mode is not SyncMode.ipc

    async def load_bucket(self, handle: BucketHandle) -> None:
        """Receive a bucket from the transport and stage it; see `EngineDriver.load_bucket`."""
        if self._receiver is None:
            raise RunError("The rollout worker received weights without a transport: call open_transport first.")
        async with self._receiving:
            bucket = await asyncio.to_thread(self._receiver.receive, handle)
            # Copies the bytes, which the receiver reuses.
            await self.engine.load_bucket(bucket, to_host=self._stages_in_host)
            del bucket
            await asyncio.to_thread(self._receiver.release)

    async def finish_update(self, version: int, digest: str) -> None:
        """Switch to the new version; see `EngineDriver.finish_update`.

        With `OnUpdate.finish`, first wait until the groups in flight have ended.
        """
        if self._on_update is not OnUpdate.finish:
            await self.engine.finish_update(version, digest)
            return
        started = perf_counter()
        async with self._draining.closed():
            self.engine.counts.drain_s += perf_counter() - started
            await self.engine.finish_update(version, digest)

    def metrics(self) -> dict[str, float]:
        """Return totals of the engine and the worker since the start, and ratios of totals.

        Metrics named `..._s` are in seconds. `drain_s` is the time for which activations waited for groups in flight to
        end, or for requests in flight of an engine that cannot continue them; no other begins meanwhile.
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
            "drain_s": counts.drain_s,
            "asleep_frees_memory": float(self.engine.frees_memory),
            **self._tools.metrics(),
            "version": self.engine.version,
            **(search_metrics(self._search) if self._search else {}),
        }

    async def stop(self) -> None:
        """Close the transport, the search client and the tools, and stop the engine's processes. Idempotent."""
        await self._close_transport()
        if self._search:
            await self._search.close()
        await asyncio.to_thread(self._tools.close)  # It waits for servers of tools.
        await self.engine.stop()

    async def _close_transport(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            await asyncio.to_thread(receiver.close)
