"""Drives a rollout engine, such as SGLang, and verifies every weight update.

`EngineDriver` drives a `RolloutEngine`. `Liveness` watches the engine's processes.

Contract of a driver:
- All methods must be called on one event loop: the loop on which `generate` is first called.
- Buckets are staged while generation continues: in host memory, or on the engine's first device with
  `cluster.sync_mode=ipc` and an engine that is awake.
- `finish_update` activates the staged weights: it pauses generation, loads and verifies the weights, and resumes
  generation. Requests in flight keep their tokens, or end before the pause if the engine cannot continue them under
  other weights; new requests wait. Each token has the version that sampled it, and its log-prob is under that version.
- `finish_update` succeeds only if every tensor that the engine reports has the hash of the received tensor, or with
  `model.lora.sync=adapters` of the tensor that `AdapterMerger` has computed from the received adapters.
- After a failed update, requests in flight and later requests raise the reason, until another update succeeds.
- If a process of the engine dies, every call raises EngineDied.
- A sleeping engine neither generates nor activates weights. It stages buckets in host memory, because other worker
  groups use its device. After waking, it holds the same weights as before.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import Any, NoReturn, TypeVar

import numpy as np
import psutil
import torch
from transformers import AutoConfig, AutoTokenizer

from rlsys.components import one_line
from rlsys.config.custom import OwnComponent
from rlsys.config.schema import CustomEngine, Device, EngineConfig, TaskConfig
from rlsys.data.trajectory import routes_type
from rlsys.errors import RunError, UserError
from rlsys.rollout.agent.episode import EngineDied
from rlsys.rollout.agent.recorder import Generation, OnTokens, TurnSampling
from rlsys.rollout.interface import EngineError, EngineSetup
from rlsys.rollout.kinds import open_engine
from rlsys.rollout.staging import AdapterMerger, StagedVersion
from rlsys.weights.bucket import Bucket, ChecksumError
from rlsys.weights.weight_map import Architecture

T = TypeVar("T")
POLL_S = 0.5
"""Interval between checks of the engine's processes."""
_ROUNDING = 1e-3
"""Largest log-prob of an engine from outside of the package; rounding may exceed 0 a little."""

_log = logging.getLogger(__name__)


@dataclass
class EngineCounts:
    """Totals since the start of an engine."""

    requests: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    busy_s: float = 0.0
    """Wall time with at least one request in flight."""
    updates: int = 0
    update_bytes: int = 0
    update_s: float = 0.0
    """Wall time of updates, from `begin_update` to verification; mostly overlaps generation."""
    drain_s: float = 0.0
    """Wall time for which activation waited for requests or groups in flight."""
    pause_s: float = 0.0
    """Wall time for which activation paused generation."""


class EngineDriver:
    """Drives the engine that `config` chooses on `model_path`. Call `start`, then `generate`, and `stop` at the end.

    Effect of a call by the engine's state; `failed` lasts until another update is activated:

                        awake       switching   failed      asleep
        generate        runs        waits       raises      raises
        begin_update    opens       raises      opens       opens
        load_bucket     stages      -           raises *    stages in host memory
        finish_update   switches    -           raises *    raises; the update stays staged
        sleep           sleeps      raises      sleeps      nothing
        wake            nothing     nothing     nothing     wakes

    * `load_bucket` and `finish_update` raise in every state without an open update; a failure closes it, and
    `begin_update` opens the next. -: not called then. After `stop`, `generate` and `finish_update` raise. All raise
    RunError.
    """

    def __init__(
        self,
        model_path: str,
        config: EngineConfig,
        device: Device,
        seed: int,
        memory_saver: bool = False,
        architecture: Architecture | None = None,
        *,
        returns_routes: bool = False,
        merger: AdapterMerger | None = None,
    ) -> None:
        """`memory_saver` makes `sleep` free device memory; it has no effect on a CPU. `architecture` is None for an
        engine that gets no other weights. `returns_routes` is a field of `EngineSetup`. `merger` is set if versions are
        adapters alone."""
        kind = f" {config.kind}" if isinstance(config, CustomEngine) else ""
        self._name = f"The engine{kind} on {model_path}"
        self._asleep_reason = f"{self._name} is asleep: wake it first."
        self._config = config
        self.frees_memory = memory_saver and device is Device.gpu
        """True if `sleep` frees the device's memory for other groups."""
        model, eos_id = _read(model_path)
        setup = EngineSetup(
            model_path, model, eos_id, device, config, seed, self.frees_memory, architecture, returns_routes
        )
        self._engine, self._merger = open_engine(setup), merger
        longest: int = model.max_position_embeddings
        reserved = self._engine.capabilities.reserved_tokens
        self._context_tokens = min(longest, self._engine.max_context or longest) - reserved
        self._liveness: Liveness | None = None
        self._rids = itertools.count()
        self._not_switching = asyncio.Event()
        self._not_switching.set()
        self._requests: set[asyncio.Task[Any]] = set()
        self._busy_since = 0.0
        self._update: StagedVersion | None = None
        self._update_began = 0.0
        self._staging = asyncio.Lock()
        self._failure = ""
        self._asleep = False
        self._sleep_lock = asyncio.Lock()
        self.version = 0
        """Weight version in use."""
        self.counts = EngineCounts()

    def require_room(self, task: TaskConfig) -> None:
        """Raise UserError if the longest episode of `task` exceeds the engine's context."""
        if task.max_total_tokens > self._context_tokens:
            raise UserError(
                f"task.max_total_tokens={task.max_total_tokens} is more than the {self._context_tokens} tokens that the "
                "model's config.json and the keys of rollout.engine allow: lower it.",
                code="out_of_range",
                key="task.max_total_tokens",
            )

    async def start(self) -> None:
        """Start the engine. Raises RunError after `start_timeout_s`, and UserError for a model that it cannot run."""
        before = {child.pid for child in _children()}
        starting = asyncio.create_task(self._named(self._engine.start()))
        done, _ = await asyncio.wait({starting}, timeout=self._config.start_timeout_s)
        if not done:
            while not starting.done():  # More processes may still start. Once all are killed, the launch returns.
                for child in _children():
                    if child.pid not in before:
                        child.kill()
                if isinstance(self._config, CustomEngine):  # It may wait for something else.
                    starting.cancel()
                await asyncio.wait({starting}, timeout=0.2)
            raise RunError(
                f"{self._name} was not ready after rollout.engine.start_timeout_s={self._config.start_timeout_s:g} s."
            )
        try:
            starting.result()
            self._liveness = Liveness(self._name, self._engine.processes())
        except UserError:
            raise
        except Exception as error:
            raise RunError(f"{self._name} did not start: {error}") from error

    async def generate(
        self, input_ids: list[int], sampling: TurnSampling, rid: str, on_tokens: OnTokens | None = None
    ) -> Generation:
        """Continue `input_ids`; on cancellation, abort the request in the engine.

        `rid` names the request in logs and is made unique. `on_tokens` receives tokens as they arrive. Blocks during a
        weight switch. Raises RunError while the engine is asleep, and after a failed update.
        """
        while not self._not_switching.is_set():  # A switch may begin between the event and this task's resumption.
            await self._not_switching.wait()
        if self._asleep or self._failure:
            raise RunError(self._asleep_reason if self._asleep else self._failure)
        call = self._engine.generate(input_ids, sampling, f"{rid}~{next(self._rids)}", on_tokens)
        request = asyncio.create_task(self._named(self._sound(call, sampling, len(input_ids))))
        if not self._requests:
            self._busy_since = perf_counter()
        self._requests.add(request)
        try:
            generation = await self._await_request(request)
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

    async def begin_update(self, version: int) -> None:
        """Open an update to `version` and discard staged buckets. Raises RunError during a weight switch."""
        if not self._not_switching.is_set():
            raise RunError(
                f"The update to version {version} began during another weight switch: finish that one first."
            )
        with self._naming():
            self._update = StagedVersion(version, self._engine.weight_check(), self._merger)
        self._update_began = perf_counter()

    async def load_bucket(self, bucket: Bucket, to_host: bool = False) -> None:
        """Check and stage a bucket, in host memory if `to_host` is set or the engine is asleep.

        A wrong checksum or a lack of memory fails the update and raises RunError.
        """
        update = self._open_update()
        try:
            async with self._staging:
                await asyncio.to_thread(update.stage, bucket, to_host=to_host or self._asleep)
            if self._asleep:
                _release_cached_memory()  # The check used memory of the device.
        except ChecksumError as error:
            self._fail_update(str(error))
        except torch.OutOfMemoryError as error:
            fix = self._engine.memory_fix(self._config)
            if not to_host:
                fix += ", or stage in host memory with cluster.sync_mode=tensor"
            self._fail_update(
                f"the engine's GPU ran out of memory next to weights and KV cache, after {update.nbytes} bytes of version "
                f"{update.version}: {fix} ({error})"
            )

    async def finish_update(self, version: int, expected_digest: str) -> None:
        """Switch to the staged weights and verify every tensor; generation pauses meanwhile.

        `expected_digest` is the digest that the sender computed over all tensors. Raises RunError if the received
        tensors have another digest, or if the loaded tensors differ from the received ones. Also raises RunError if the
        engine is asleep; the update then stays staged and can be finished after `wake`.
        """
        update = self._open_update()
        if self._asleep:
            raise RunError(f"{self._asleep_reason} Version {version} stays staged until then.")
        try:
            update.check(version, expected_digest)
        except ChecksumError as error:
            self._fail_update(str(error))
        pause_before = self.counts.pause_s
        async with self._paused():
            await self._switch(update)
            self.version = version
            self._update = None
            self._failure = ""
        _release_cached_memory()
        seconds, pause_s = perf_counter() - self._update_began, self.counts.pause_s - pause_before
        self.counts.updates += 1
        self.counts.update_s += seconds
        self.counts.update_bytes += update.nbytes
        _log.info(
            "version %d: %d bytes in %.3f s, paused for %.3f s; verified", version, update.nbytes, seconds, pause_s
        )

    async def sleep(self) -> None:
        """Empty the prefix cache and free device memory; see `frees_memory`. Idempotent.

        Raises RunError while requests are in flight or weights are switched.
        """
        async with self._sleep_lock:
            if self._asleep:
                return
            if self._requests or not self._not_switching.is_set():
                raise RunError(
                    f"{self._name} cannot sleep while {self.running} requests run or its weights are switched: wait until "
                    "both have ended."
                )
            self._asleep = True  # Before the first await, so that no request slips in.
            async with self._staging:  # Wait for a bucket that is being staged on the device.
                if self._update is not None:
                    await asyncio.to_thread(self._update.move_to_host)
            _release_cached_memory()
            try:
                await self._await_call(self._engine.sleep())
            except EngineError as error:
                self._asleep = False
                raise RunError(f"{self._name} could not sleep: {error}.") from error

    async def wake(self) -> None:
        """Allocate device memory again and restore the weights. Idempotent."""
        async with self._sleep_lock:
            if self._asleep:
                try:
                    await self._await_call(self._engine.wake())
                except EngineError as error:
                    raise RunError(f"{self._name} could not wake: {error}.") from error
                self._asleep = False

    async def stop(self) -> None:
        """Stop the engine's processes and wait for their exit. Idempotent; may be called without a `start`."""
        self._failure = f"{self._name} is not running."
        if self._liveness is not None:
            self._liveness.stop()
        await self._named(asyncio.to_thread(self._engine.stop))

    async def settle(self) -> None:
        """Wait until no weight switch runs."""
        await self._not_switching.wait()

    @property
    def running(self) -> int:
        """Number of requests in flight."""
        return len(self._requests)

    @property
    def busy(self) -> bool:
        """True if the engine generates, or holds requests back during a weight switch."""
        return bool(self._requests) or not self._not_switching.is_set()

    @property
    def progress(self) -> float | None:
        """Number that has changed if the engine's processes have done anything; None if the engine cannot tell."""
        with self._naming():
            of_engine = self._engine.progress()
        return None if of_engine is None else of_engine + self.counts.requests + self.counts.updates

    @property
    def _alive(self) -> Liveness:
        if self._liveness is None:
            raise RunError(f"{self._name} is not running.")
        return self._liveness

    async def _await_request(self, request: asyncio.Task[Generation]) -> Generation:
        """Await `request`. Raises RunError if the engine refuses it, and if `_discard_update` cancelled it."""
        await self._alive.first_of(request)
        if request.cancelled():
            raise RunError(self._failure)
        try:
            return request.result()
        except EngineError as error:
            raise RunError(f"{self._name} failed a request: {error}.") from error

    async def _await_call(self, call: Coroutine[Any, Any, T]) -> T:
        """Await `call`. Raises EngineDied if one of the engine's processes exits first."""
        return await self._alive.guard(self._named(call))

    async def _update_call(self, call: Coroutine[Any, Any, T]) -> T:
        """Await `call`; a refusal fails the update and raises RunError."""
        try:
            return await self._await_call(call)
        except EngineError as error:
            self._fail_update(str(error))

    async def _named(self, call: Coroutine[Any, Any, T]) -> T:
        """Await `call`; an unexpected error of an engine from outside of the package becomes a UserError with its name."""
        with self._naming():
            return await call

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Like `_named`, but for the body of a response."""
        try:
            yield
        except (EngineError, RunError, UserError):
            raise
        except (Exception, SystemExit) as error:  # SystemExit would end the event loop.
            if not isinstance(self._config, CustomEngine):
                raise
            raise OwnComponent(self._config).error(f"failed ({one_line(error)})") from error

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Pause generation, after the requests in flight if the engine cannot keep them. Any failure fails the update."""
        self._not_switching.clear()
        started = perf_counter()
        try:
            if self._requests and not self._engine.capabilities.continues:
                await self._await_call(asyncio.wait(self._requests))
                drained = perf_counter()
                self.counts.drain_s += drained - started
                started = drained
            await self._update_call(self._engine.pause())
            yield
        except EngineDied:
            self._update = None  # Waiting calls raise EngineDied themselves.
            raise
        except BaseException as error:
            if self._update is not None:
                self._discard_update(f"it was interrupted ({type(error).__name__}: {error})")
            with suppress(RunError):  # Nothing may be sampled from partly updated weights.
                self._engine.abort_all()
            raise
        finally:
            try:
                with suppress(RunError):  # Raised if the engine is dead or stopped; a refusal fails all requests.
                    await self._update_call(self._engine.resume())
            finally:
                self.counts.pause_s += perf_counter() - started
                self._not_switching.set()

    async def _switch(self, update: StagedVersion) -> None:
        """Load the staged weights and verify the loaded tensors."""
        if self._merger is not None:
            self._merger.loaded = False
        await self._update_call(self._engine.begin_update(update.version))
        for bucket in update.pop_buckets():
            await self._update_call(self._engine.load_bucket(bucket))
        await self._update_call(self._engine.finish_update())
        reported = await self._update_call(self._engine.hashes())
        with self._naming():
            wrong = update.weights.mismatches(reported)
        if wrong:
            self._fail_update(
                f"{len(wrong)} of its tensors differ from those sent, first {wrong[0]}; "
                f"version {update.version} is not used"
            )
        if self._merger is not None:
            self._merger.loaded = True

    async def _sound(
        self, call: Coroutine[Any, Any, Generation], sampling: TurnSampling, input_tokens: int
    ) -> Generation:
        """Await `call`. Raises UserError for an impossible result of an engine from outside of the package."""
        generation = await call
        if not isinstance(self._config, CustomEngine):
            return generation
        ids, logprobs, versions = generation.token_ids, generation.logprobs, generation.versions
        wrong = {
            f"{len(logprobs)} log-probs and {len(versions)} versions for {len(ids)} tokens": not (
                len(ids) == len(logprobs) == len(versions)
            ),
            f"{len(ids)} tokens for max_new_tokens={sampling.max_new_tokens}": len(ids) > sampling.max_new_tokens,
            f"finish={generation.finish!r}": generation.finish not in ("stop", "length", "abort"),
            "a log-prob that is not a number of at most 0": not all(-inf < one <= _ROUNDING for one in logprobs),
            f"versions other than {self.version} and older": not all(0 <= one <= self.version for one in versions),
            "other routes than `Generation.routes` describes": not self._has_routes(generation, sampling, input_tokens),
        }
        for problem, is_so in wrong.items():
            if is_so:
                raise OwnComponent(self._config).error(f"returned {problem}", "correct its generate")
        return generation

    def _has_routes(self, generation: Generation, sampling: TurnSampling, input_tokens: int) -> bool:
        """Return True if `generation` has the routes that were asked for, each with different experts of the model."""
        routes, first, model = generation.routes, sampling.routes_from, self._engine.setup.architecture
        if first is None or model is None or (routes is None and generation.finish == "abort"):
            return True
        shape = input_tokens + len(generation.token_ids) - 1 - first, model.layers, model.experts_per_token
        if not isinstance(routes, np.ndarray) or (routes.shape, routes.dtype) != (shape, routes_type(model.experts)):
            return False
        ordered = np.sort(routes, axis=-1).astype(int)
        return bool((ordered >= 0).all() and (ordered < model.experts).all() and np.diff(ordered).all())

    def _open_update(self) -> StagedVersion:
        if self._update is None:
            raise RunError(
                self._failure or "The engine received weights without an open update: call begin_update first."
            )
        return self._update

    def _fail_update(self, reason: str) -> NoReturn:
        """Fail the update with `reason` and raise RunError."""
        self._discard_update(reason)
        raise RunError(self._failure)

    def _discard_update(self, reason: str) -> None:
        """Discard the update and end requests in flight. These and all later requests raise RunError with `reason`."""
        self._update = None
        self._failure = f"{self._name} refused a weight update: {reason.rstrip('.')}."
        for request in self._requests:
            request.cancel()


def _read(model_path: str) -> tuple[Any, int]:
    """Return the config of a model and its tokenizer's end token. Raises UserError if a file is unreadable."""
    try:
        return AutoConfig.from_pretrained(model_path), AutoTokenizer.from_pretrained(model_path).eos_token_id
    except Exception as problem:  # The tokenizers library raises no narrower class.
        raise UserError(
            f"model.path={model_path} cannot be read ({one_line(problem)}): give a complete model folder.",
            code="malformed",
            key="model.path",
        ) from problem


def _release_cached_memory() -> None:
    """Return cached GPU memory of this process to the device, including memory to which an engine had a handle."""
    if torch.cuda.is_initialized():
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


class Liveness:
    """Awaits calls to processes that may die: raises EngineDied instead of hanging.

    Watches `processes` from construction to `stop`, on one running event loop. SGLang's own watchdog is not enough: it
    signals the main thread, and in a Ray worker this thread runs no Python code.
    """

    def __init__(self, name: str, processes: Sequence[psutil.Process]) -> None:
        self._name = name
        self._processes = processes
        self._death = asyncio.create_task(self._watch())

    async def guard(self, call: Coroutine[Any, Any, T]) -> T:
        """Await `call`. If a process exits first, cancel the call and raise EngineDied."""
        task = asyncio.ensure_future(call)
        try:
            await self.first_of(task)
            return task.result()
        finally:
            task.cancel()

    async def first_of(self, task: asyncio.Task[Any]) -> None:
        """Wait until `task` is done, with any outcome. Raises EngineDied if a process exits first."""
        await asyncio.wait({task, self._death}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise EngineDied(f"{self._name} died: its process {self._death.result()} is gone.")

    def stop(self) -> None:
        self._death.cancel()

    async def _watch(self) -> int:
        """Return the id of the first process that is gone."""
        while True:
            for process in self._processes:
                if _is_gone(process):
                    return process.pid
            await asyncio.sleep(POLL_S)


def _is_gone(process: psutil.Process) -> bool:
    """True if the process has ended, also as a zombie. It may vanish between two questions about it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
