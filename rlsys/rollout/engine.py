"""One SGLang engine: generation, abort, and weight updates that are proven to have arrived.

Contract:
- All methods belong to one event loop, the one that first generates.
- An update is staged while generation goes on: in host memory, or on the engine's first device if it comes on
  GPUs (`cluster.sync_mode=ipc`) and the engine is awake. `finish_update` switches: generation pauses,
  requests under way keep their tokens, new ones wait; the weights are loaded and verified; then all go on
  with the new weights. Every token tells the version that sampled it, and its log-prob is of that version.
- `finish_update` succeeds only if every tensor that the engine reports hashes to what was received.
  After a failed update nothing is generated until another succeeds: what is under way and what comes later
  ends with the reason. A paused engine goes on or refuses, however the switch ends. If SGLang dies, every
  call ends with EngineDied.
- Asleep, an engine generates nothing and takes no weights in, but stages them, always in host memory: its device
  belongs to others meanwhile. Awake again, it holds what it held before.
- SGLang signals SIGQUIT to this process when one of its processes dies, and ends every child of this
  process on shutdown: give an engine a process of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import psutil
import torch
from transformers import AutoConfig, AutoTokenizer

from rlsys.config.schema import Device, EngineConfig, OnUpdate, RolloutConfig, SearchConfig, TaskConfig
from rlsys.data.question import Question
from rlsys.data.trajectory import Finish, Trajectory
from rlsys.errors import RunError, UserError
from rlsys.rollout import sglang_cpu
from rlsys.rollout.agent.episode import EngineActivity, EpisodeGroup, EpisodeTools, Generation, TurnSampling
from rlsys.rollout.agent.tokens import Codec, EpisodeProgress
from rlsys.rollout.liveness import EngineDied, Liveness
from rlsys.rollout.requests import Heard, as_generation, followed, in_training, of_answers, sampling_params
from rlsys.rollout.search_tool import open_tool, search_metrics
from rlsys.rollout.staged_weights import CPU_WIDTH_PADDING, Hasher, Layout, StagedVersion, sha256_prefix
from rlsys.weights.transport import Bucket, BucketHandle, ChecksumError, Receiver, TransportSpec, open_receiver

if TYPE_CHECKING:
    from rlsys.rollout.sglang_process import Answer, SglangProcess

T = TypeVar("T")

FLUSH_TIMEOUT_S = 30.0
"""For aborted requests to leave the scheduler before it sleeps."""

_log = logging.getLogger(__name__)


@dataclass
class EngineCounts:
    """Sums since the start."""

    requests: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    busy_s: float = 0.0
    """Wall time in which at least one request ran."""
    updates: int = 0
    update_s: float = 0.0
    """Wall time of updates, from `begin_update` to the verified end; mostly beside generation."""
    update_bytes: int = 0
    """Staged."""
    pause_s: float = 0.0
    """Wall time in which generation was held back by the switch."""


class Engine:
    """An SGLang engine on `model_path`. `start` it, then `generate`; `stop` it in the end."""

    def __init__(
        self, model_path: str, config: EngineConfig, device: Device, seed: int, memory_saver: bool = False
    ) -> None:
        """`memory_saver` lets `sleep` give the device's memory back; there is none to give on a CPU."""
        self._model_path = model_path
        self._name = f"The engine on {model_path}"
        self._asleep_reason = f"{self._name} is asleep; wake it first."
        self._config = config
        self._device = device
        self._seed = seed
        self._process: SglangProcess | None = None
        self._liveness: Liveness | None = None
        self._hasher: Hasher = sha256_prefix
        self._eos_id: int = AutoTokenizer.from_pretrained(model_path).eos_token_id
        model = AutoConfig.from_pretrained(model_path)
        self._layout = Layout(
            tp=config.tp,
            kv_heads=model.num_key_value_heads,
            tied=model.tie_word_embeddings,
            dtype=getattr(torch, config.dtype.value),
            experts=getattr(model, "num_experts", 0),
            width_padding=CPU_WIDTH_PADDING if device is Device.cpu else 1,
        )
        self._context_tokens: int = min(
            model.max_position_embeddings, config.kv_cache_tokens or model.max_position_embeddings
        )
        self._rids = itertools.count()
        self._open = asyncio.Event()
        self._open.set()
        self._requests: set[asyncio.Task[Any]] = set()
        self._busy_since = 0.0
        self._update: StagedVersion | None = None
        self._update_began = 0.0
        self._staging = asyncio.Lock()
        self._session_open = False
        self._refusal = ""
        self._asleep = False
        self._resting = asyncio.Lock()
        self.frees_memory = memory_saver and device is Device.gpu
        """Whether the device's memory is free for others while the engine is asleep."""
        self.version = 0
        """Policy version of the weights."""
        self.counts = EngineCounts()

    def require_room(self, task: TaskConfig) -> None:
        """Raise UserError unless the engine takes the longest episode of `task`, prompt and output together."""
        if task.max_total_tokens > self._context_tokens:
            raise UserError(
                f"task.max_total_tokens={task.max_total_tokens} is more than the {self._context_tokens} tokens that the "
                f"model at {self._model_path} and rollout.engine.kv_cache_tokens allow; lower it."
            )

    async def start(self) -> None:
        """Start SGLang's processes and load the model. Raises RunError after `start_timeout_s`."""
        sglang_cpu.prepare(self._device)
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        starting = asyncio.create_task(asyncio.to_thread(self._launch))
        done, _ = await asyncio.wait({starting}, timeout=self._config.start_timeout_s)
        if not done:
            while not starting.done():  # Its processes may be yet to come.
                _kill_children_except(before)
                await asyncio.wait({starting}, timeout=0.2)
            raise RunError(
                f"{self._name} was not ready after rollout.engine.start_timeout_s={self._config.start_timeout_s:g} s."
            )
        try:
            self._process = starting.result()
        except Exception as error:
            raise RunError(f"{self._name} did not start: {error}") from error
        children = [c for c in psutil.Process().children(recursive=True) if c.pid not in before]
        self._liveness = Liveness(self._name, children)
        await self._process.freeze_gc()

    async def generate(
        self, input_ids: list[int], sampling: TurnSampling, rid: str, heard: Heard | None = None
    ) -> Generation:
        """Continue `input_ids`; on cancellation the request is aborted in the engine.

        `rid` names the request in logs and for `abort`; it is made unique. `heard` follows it token by token.
        Waits while weights are switched. Raises RunError while the engine is asleep, and once an update has failed.
        """
        while not self._open.is_set():  # A switch may begin between the event and this task's turn.
            await self._open.wait()
        if self._asleep or self._refusal:
            raise RunError(self._asleep_reason if self._asleep else self._refusal)
        unique, params = f"{rid}~{next(self._rids)}", sampling_params(sampling, self._eos_id)
        call = self._sglang.engine.async_generate(
            input_ids=input_ids, sampling_params=params, return_logprob=True, rid=unique, stream=heard is not None
        )
        request = asyncio.create_task(followed(call, heard) if heard else call)
        if not self._requests:
            self._busy_since = perf_counter()
        self._requests.add(request)
        try:
            await self._running.first_of(request)
            generation = as_generation(self._outcome(request))
        except BaseException:
            self.counts.aborted += 1
            raise
        finally:
            request.cancel()
            self._requests.remove(request)
            if not self._requests:
                self.counts.busy_s += perf_counter() - self._busy_since
        self.counts.requests += 1
        self.counts.aborted += generation.finish == "abort"
        self.counts.prompt_tokens += len(input_ids)
        self.counts.cached_tokens += generation.cached_tokens
        self.counts.generated_tokens += len(generation.token_ids)
        return generation

    def abort(self, rid: str) -> None:
        """End the requests that were made as `rid`; they return what they have, `finish` "abort"."""
        for running in self._sglang.running():
            if running.rpartition("~")[0] == rid:
                self._sglang.abort(running)

    async def begin_update(self, version: int) -> None:
        """Open an update to `version`; what one that broke off has staged is forgotten. Generation goes on.

        Raises RunError while another version is being switched to.
        """
        if not self._open.is_set():
            raise RunError(f"The update to version {version} began before the last one had ended.")
        self._update = StagedVersion(version, self._layout, self._hasher)
        self._update_began = perf_counter()

    async def load_bucket(self, bucket: Bucket) -> None:
        """Check a bucket and stage it; generation goes on.

        Raises RunError for a bucket that is not what was sent or finds no room; the update has then failed.
        """
        update = self._staged()
        try:
            async with self._staging:
                await asyncio.to_thread(update.take, bucket, to_host=self._asleep)
            if self._asleep:
                _give_back()  # What checking it took.
        except ChecksumError as error:
            self._refuse(str(error))
        except torch.OutOfMemoryError as error:
            self._refuse(self._no_room(update, bucket, error))

    async def finish_update(self, version: int, expected_digest: str) -> None:
        """Switch to the staged weights and verify every tensor; generation is held back meanwhile.

        `expected_digest` is the sender's digest over all tensors. Raises RunError, and generates no
        more, if what came or what the engine holds is anything else. Raises RunError while asleep; the
        update stays staged and can be finished after `wake`.
        """
        update = self._staged()
        if self._asleep:
            raise RunError(f"{self._asleep_reason} Version {version} stays staged until then.")
        try:
            update.check(version, expected_digest)
        except ChecksumError as error:
            self._refuse(str(error))
        pause_before = self.counts.pause_s
        async with self._paused():
            await self._switch(update)
            self.version = version
            self._update = None
            self._refusal = ""
        _give_back()
        seconds, pause_s = perf_counter() - self._update_began, self.counts.pause_s - pause_before
        self.counts.updates += 1
        self.counts.update_s += seconds
        self.counts.update_bytes += update.nbytes
        _log.info(
            "version %d: %d bytes in %.3f s, of it %.3f s paused; verified",
            version, update.nbytes, seconds, pause_s,
        )  # fmt: skip

    async def sleep(self) -> None:
        """Empty the prefix cache and give the device's memory back; see `frees_memory`.

        Raises RunError while requests run or weights are switched. A second call does nothing.
        """
        async with self._resting:
            if self._asleep:
                return
            if self._requests or not self._open.is_set():
                raise RunError(
                    f"{self._name} was sent to sleep while {self.running} requests ran or "
                    "its weights were switched; let that end first."
                )
            self._asleep = True  # Before the first await, so that no request slips in.
            async with self._staging:  # A bucket that is under way was told to stay on the device.
                if self._update is not None:
                    await asyncio.to_thread(self._update.leave_device)
            _give_back()
            success, message = await self._answer(self._sglang.sleep(FLUSH_TIMEOUT_S))
            if not success:
                self._asleep = False
                raise RunError(f"{self._name} could not sleep: {message}.")

    async def wake(self) -> None:
        """Take memory again and hold the same weights as before. A second call does nothing."""
        async with self._resting:
            if self._asleep:
                await self._answer(self._sglang.wake())
                self._asleep = False

    async def stop(self) -> None:
        """End SGLang's processes and wait until they are gone. May be called again, or without a start."""
        self._refusal = f"{self._name} is not running."
        if self._liveness is not None:
            self._liveness.stop()
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(process.shutdown)

    @property
    def running(self) -> int:
        """Requests under way."""
        return len(self._requests)

    @property
    def busy(self) -> bool:
        """It generates, or holds requests back while it takes weights in."""
        return bool(self._requests) or not self._open.is_set()

    @property
    def _sglang(self) -> SglangProcess:
        if self._process is None:
            raise RunError(f"{self._name} is not running.")
        return self._process

    @property
    def _running(self) -> Liveness:
        if self._liveness is None:
            raise RunError(f"{self._name} is not running.")
        return self._liveness

    async def _answer(self, call: Coroutine[Any, Any, T]) -> T:
        """Await SGLang's answer to `call`. Raises RunError once one of its processes is gone."""
        return await self._running.guard(call)

    def _launch(self) -> SglangProcess:
        """Blocking part of `start`; runs in a thread."""
        # SGLang may be imported only now, after `prepare`.
        from rlsys.rollout.sglang_process import SglangProcess, gpu_hash

        if self._device is Device.gpu:
            self._hasher = gpu_hash
        return SglangProcess(self._arguments(), on_cpu=self._device is Device.cpu)

    def _arguments(self) -> dict[str, Any]:
        """SGLang's server arguments."""
        config = self._config
        arguments: dict[str, Any] = {
            "model_path": self._model_path,
            "tp_size": config.tp,
            "dtype": config.dtype.value,
            "mem_fraction_static": config.memory_fraction,
            "max_total_tokens": config.kv_cache_tokens,
            "max_running_requests": config.max_running,
            "random_seed": self._seed,
            "weight_version": "0",
            "grammar_backend": "none",
            "log_level": "error",
        }
        if self.frees_memory:
            # The weights go to host memory meanwhile: little beside what a trainer keeps there.
            arguments |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
        backend = config.attention_backend
        if self._device is Device.cpu:
            arguments["device"] = "cpu"
            # Its scheduler otherwise polls without a break, on a core that training could use.
            arguments["sleep_on_idle"] = True
            backend = "torch_native" if backend == "auto" else backend
        else:
            if self._layout.experts:
                # Blackwell would get kernels that permute the experts' weights, which `StagedVersion` does not predict.
                arguments["moe_runner_backend"] = "triton"
            if not config.cuda_graphs:
                arguments |= {"cuda_graph_backend_decode": "disabled", "cuda_graph_backend_prefill": "disabled"}
        if backend != "auto":
            arguments["attention_backend"] = backend
        return arguments

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Hold generation back. If the body fails, the update has failed, whatever the failure was."""
        self._open.clear()
        started = perf_counter()
        try:
            await self._answer(self._sglang.pause())
            yield
        except EngineDied:
            self._update = None  # Those who wait will be told by their own calls, which is not a refusal.
            raise
        except BaseException as error:
            if self._update is not None:
                self._reject(f"it broke off ({type(error).__name__}: {error})")
            with suppress(RunError):  # Nothing may be sampled from weights of which only some are new.
                self._sglang.abort_all()
            raise
        finally:
            try:
                with suppress(RunError):  # Dead, or stopped.
                    await self._answer(self._sglang.resume())
            finally:
                self.counts.pause_s += perf_counter() - started
                self._open.set()

    async def _switch(self, update: StagedVersion) -> None:
        """Load the staged weights, empty the prefix cache and verify what the engine then holds."""
        if not self._session_open:  # A refused update leaves SGLang's session open.
            self._require(await self._answer(self._sglang.begin_update()))
            self._session_open = True
        for bucket in update.hand_out():
            self._require(await self._answer(self._sglang.load_bucket(bucket, update.version, self._config.tp)))
        self._require(await self._answer(self._sglang.end_update()))
        self._session_open = False
        answer, reported = await self._answer(self._sglang.checksums())
        self._require(answer)
        if wrong := update.mismatches(reported):
            self._refuse(
                f"{len(wrong)} of its tensors are not what was sent, first {wrong[0]}; "
                f"version {update.version} is not used"
            )

    def _staged(self) -> StagedVersion:
        if self._update is None:
            raise RunError(self._refusal or "Weights came to an engine that was not told of an update.")
        return self._update

    def _require(self, answer: Answer) -> None:
        """Refuse unless SGLang's (success, message) is a success."""
        success, message = answer
        if not success:
            self._refuse(message)

    def _no_room(self, update: StagedVersion, bucket: Bucket, error: torch.OutOfMemoryError) -> str:
        """Why `bucket` was not staged, and the way out."""
        fix = f"lower rollout.engine.memory_fraction={self._config.memory_fraction:g}"
        if isinstance(bucket.data, torch.Tensor):
            fix += ", or stage in host memory with cluster.sync_mode=tensor"
        return (
            f"after {update.nbytes} bytes of version {update.version} the engine's GPU had no room for more beside "
            f"weights and KV cache; {fix} ({error})"
        )

    def _refuse(self, reason: str) -> NoReturn:
        """Fail the update with `reason`."""
        self._reject(reason)
        raise RunError(self._refusal)

    def _reject(self, reason: str) -> None:
        """Forget the update and end what is under way; what comes later ends with the reason too."""
        self._update = None
        self._refusal = f"{self._name} refused a weight update: {reason.rstrip('.')}."
        for request in self._requests:
            request.cancel()

    def _outcome(self, request: asyncio.Task[dict[str, Any]]) -> dict[str, Any]:
        """The answer to an ended request. Raises RunError for one that `_reject` has ended."""
        if request.cancelled():
            raise RunError(self._refusal)
        return request.result()


def _give_back() -> None:
    """Return GPU memory that this process has freed to the device: torch keeps it, and what SGLang had a handle to."""
    if torch.cuda.is_initialized():
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def _kill_children_except(before: set[int]) -> None:
    """End the processes that a failed start has left, so that the start returns."""
    for child in psutil.Process().children(recursive=True):
        if child.pid not in before:
            child.kill()


class DrainLock:
    """Reader-drain lock: calls go through side by side; who closes it blocks new calls and waits for those in flight.

    Open from the start. It opens again however the closing ends.
    """

    def __init__(self) -> None:
        self._gate = asyncio.Lock()
        """Held while it is closed, and for the moment in which a call enters."""
        self._empty = asyncio.Event()
        self._empty.set()
        self._inside = 0

    @asynccontextmanager
    async def inside(self) -> AsyncIterator[None]:
        """Enter, once the gate is open, and leave at the end."""
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
        """Let nobody in and wait until nobody is inside; one caller after the other."""
        async with self._gate:
            await self._empty.wait()
            yield


@dataclass(frozen=True, slots=True, eq=False)
class _InFlight:
    """A group that has not been returned."""

    key: str
    group: EpisodeGroup
    until_aborted: asyncio.Timeout
    """Expires when it is aborted."""


class RolloutWorker:
    """The worker of one rollout process: groups of episodes on its own engine. `start` it first; `stop` leaves no process.

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
        self._draining = DrainLock()
        self._receiver: Receiver | None = None
        self._receiving = asyncio.Lock()
        self._in_flight: set[_InFlight] = set()
        self._episodes = 0
        self._aborted = 0
        self._drain_s = 0.0
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
        """`n_samples` episodes of one question, side by side, drawn as in training unless `sampling` says otherwise.

        They are its samples from `first` on. `key` names the group for `abort_group` and `in_flight`; `progress` has the
        episodes of it that were begun elsewhere, each at most once. Raises UserError for a question that is too long and
        RunError for an engine that has refused.
        """
        drawn = sampling or in_training(self._rollout.sampling)
        group = EpisodeGroup(question, range(first, first + n_samples), self._tools, drawn, progress)
        running: _InFlight | None = None
        try:
            async with asyncio.timeout(None) as until_aborted:
                running = _InFlight(key, group, until_aborted)
                self._in_flight.add(running)
                async with self._draining.inside():
                    await group.play(self._slots, self._rollout.episode_timeout_s)
        except TimeoutError:
            if not until_aborted.expired():
                raise
        finally:
            if running:
                self._in_flight.remove(running)
        trajectories = group.trajectories()
        self._episodes += len(trajectories)
        self._aborted += sum(trajectory.finish is Finish.ABORTED for trajectory in trajectories)
        return trajectories

    async def answer(self, question: Question, sample: int = 0, temperature: float = 0.0, key: str = "") -> Trajectory:
        """One episode of an evaluation, as number `sample` of its question. Temperature 0 is greedy.

        Otherwise as `run_group`; with `sampled_answers` it is drawn as in training.
        """
        sampling = of_answers(self._rollout.sampling, temperature, as_rollouts=self._sampled_answers)
        return (await self.run_group(question, 1, key, first=sample, sampling=sampling))[0]

    async def abort_group(self, key: str) -> None:
        """End the groups and answers that were started as `key`, if any: their calls return at once.

        Episodes that had ended stay as they are; the others are `Finish.ABORTED` and hold the turns that
        were complete.
        """
        for running in self._in_flight:
            if running.key == key and not running.until_aborted.expired():
                running.until_aborted.reschedule(asyncio.get_running_loop().time())

    def in_flight(self, keys: Sequence[str]) -> dict[str, tuple[EpisodeProgress, ...]]:
        """Those groups of `keys` that run here, with their episodes that have ended or have a whole turn."""
        return {running.key: running.group.progress() for running in self._in_flight if running.key in keys}

    def activity(self) -> EngineActivity:
        """The engine's state, and what episodes wait for, at this moment."""
        return EngineActivity(self.engine.busy, dict(+self._tools.awaited))

    async def open_transport(self, spec: TransportSpec) -> None:
        """Meet the sender of the weights, in place of an earlier one. Raises RunError if it does not come."""
        await self._close_transport()
        self._receiver = await asyncio.to_thread(open_receiver, spec)

    async def load_bucket(self, parcel: BucketHandle) -> None:
        """Take a bucket from the transport; see `Engine.load_bucket`."""
        if self._receiver is None:
            raise RunError("Weights came to a rollout worker without a transport; call open_transport first.")
        async with self._receiving:
            bucket = await asyncio.to_thread(self._receiver.receive, parcel)
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
        async with self._draining.closed():
            self._drain_s += perf_counter() - started
            await self.engine.finish_update(version, digest)

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
