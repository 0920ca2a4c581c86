"""The rollout worker: runs prompt groups on one SGLang engine and verifies every weight update.

`RolloutWorker` runs the episodes and receives new weights. `Engine` drives SGLang. `Liveness` watches SGLang's
processes, and `StagedVersion` holds the staged weights of one version.

Contract of an engine:
- All methods must be called on one event loop: the loop on which `generate` is first called.
- Buckets are staged while generation continues: in host memory, or on the engine's first device with
  `cluster.sync_mode=ipc` and an engine that is awake.
- `finish_update` activates the staged weights: it pauses generation, loads and verifies the weights, and resumes
  generation. Requests in flight keep their tokens; new requests wait. Each token has the version that sampled it, and
  its log-prob is under that version.
- `finish_update` succeeds only if every tensor that the engine reports has the hash of the received tensor.
- After a failed update, requests in flight and later requests raise the reason, until another update succeeds.
- If SGLang dies, every call raises EngineDied.
- A sleeping engine neither generates nor activates weights. It stages buckets in host memory, because other worker
  groups use its device. After waking, it holds the same weights as before.
- SGLang signals SIGQUIT to this process when one of its processes dies, and kills every child of this process on
  shutdown: give an engine a process of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import re
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import psutil
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoConfig, AutoTokenizer

from rlsys.config.schema import Device, EngineConfig, OnUpdate, RolloutConfig, SearchConfig, SyncMode, TaskConfig
from rlsys.data.question import Question
from rlsys.data.trajectory import Finish, Trajectory
from rlsys.errors import RunError, UserError
from rlsys.rollout import sglang_cpu
from rlsys.rollout.agent.episode import (
    EngineActivity,
    EngineDied,
    EpisodeGroup,
    EpisodeTools,
)
from rlsys.rollout.agent.recorder import (
    Generation,
    OnTokens,
    TurnSampling,
    evaluation_sampling,
    training_sampling,
)
from rlsys.rollout.agent.tokens import Codec, EpisodeProgress
from rlsys.rollout.tools.search_tool import open_tool, search_metrics
from rlsys.weights.transport import (
    Bucket,
    BucketHandle,
    ChecksumError,
    Receiver,
    TransportSpec,
    bytes_of,
    digest,
    open_receiver,
    unpack,
)

if TYPE_CHECKING:
    from rlsys.rollout.sglang_process import Answer, SglangProcess

T = TypeVar("T")
Hasher = Callable[[Sequence[Tensor]], str]
"""Parts of a tensor, concatenated along dimension 0 -> the hash that SGLang reports for it."""

FLUSH_TIMEOUT_S = 30.0
"""Maximum time for aborted requests to leave SGLang's scheduler before the engine sleeps."""
POLL_S = 0.5
"""Interval between checks of SGLang's processes."""
VOCAB_PADDING = 64
"""SGLang pads the number of vocabulary rows to a multiple of this by default."""
CPU_WIDTH_PADDING = 32
"""SGLang pads the width of an MLP to a multiple of this on each tensor-parallel rank, if the engine is on a CPU."""

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_OF_EXPERTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<module>\w+)\.weight")

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
    pause_s: float = 0.0
    """Wall time for which activation paused generation."""


class Engine:
    """An SGLang engine on `model_path`. Call `start`, then `generate`, and `stop` at the end."""

    def __init__(
        self, model_path: str, config: EngineConfig, device: Device, seed: int, memory_saver: bool = False
    ) -> None:
        """`memory_saver` makes `sleep` free device memory; it has no effect on a CPU."""
        self._model_path = model_path
        self._name = f"The engine on {model_path}"
        self._asleep_reason = f"{self._name} is asleep: wake it first."
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
        longest: int = model.max_position_embeddings
        self._context_tokens = min(longest, config.kv_cache_tokens or longest)
        self._rids = itertools.count()
        self._not_switching = asyncio.Event()
        self._not_switching.set()
        self._requests: set[asyncio.Task[Any]] = set()
        self._busy_since = 0.0
        self._update: StagedVersion | None = None
        self._update_began = 0.0
        self._staging = asyncio.Lock()
        self._session_open = False
        self._failure = ""
        self._asleep = False
        self._sleep_lock = asyncio.Lock()
        self.frees_memory = memory_saver and device is Device.gpu
        """True if `sleep` frees the device's memory for other groups."""
        self.version = 0
        """Weight version in use."""
        self.counts = EngineCounts()

    def require_room(self, task: TaskConfig) -> None:
        """Raise UserError if the longest episode of `task` exceeds the engine's context."""
        if task.max_total_tokens > self._context_tokens:
            raise UserError(
                f"task.max_total_tokens={task.max_total_tokens} is more than the {self._context_tokens} tokens that the "
                f"model at {self._model_path} and rollout.engine.kv_cache_tokens allow: lower it.",
                code="out_of_range",
                key="task.max_total_tokens",
            )

    async def start(self) -> None:
        """Start SGLang's processes and load the model. Raises RunError after `start_timeout_s`."""
        sglang_cpu.prepare(self._device)
        before = {child.pid for child in _children()}
        starting = asyncio.create_task(asyncio.to_thread(self._launch))
        done, _ = await asyncio.wait({starting}, timeout=self._config.start_timeout_s)
        if not done:
            while not starting.done():  # More processes may still start. Once all are killed, the launch returns.
                for child in _children():
                    if child.pid not in before:
                        child.kill()
                await asyncio.wait({starting}, timeout=0.2)
            raise RunError(
                f"{self._name} was not ready after rollout.engine.start_timeout_s={self._config.start_timeout_s:g} s."
            )
        try:
            self._process = starting.result()
            self._liveness = Liveness(self._name, self._process.processes())
        except Exception as error:
            raise RunError(f"{self._name} did not start: {error}") from error
        await self._process.freeze_gc()

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
        unique, params = f"{rid}~{next(self._rids)}", sampling_params(sampling, self._eos_id)
        call = self._sglang.engine.async_generate(
            input_ids=input_ids, sampling_params=params, return_logprob=True, rid=unique, stream=on_tokens is not None
        )
        request = asyncio.create_task(read_stream(call, on_tokens) if on_tokens else call)
        if not self._requests:
            self._busy_since = perf_counter()
        self._requests.add(request)
        try:
            generation = as_generation(await self._await_request(request))
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
        self._update = StagedVersion(version, self._layout, self._hasher)
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
            fix = f"lower rollout.engine.memory_fraction={self._config.memory_fraction:g}"
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
            success, message = await self._await_call(self._sglang.sleep(FLUSH_TIMEOUT_S))
            if not success:
                self._asleep = False
                raise RunError(f"{self._name} could not sleep: {message}.")

    async def wake(self) -> None:
        """Allocate device memory again and restore the weights. Idempotent."""
        async with self._sleep_lock:
            if self._asleep:
                await self._await_call(self._sglang.wake())
                self._asleep = False

    async def stop(self) -> None:
        """Stop SGLang's processes and wait for their exit. Idempotent; may be called without a `start`."""
        self._failure = f"{self._name} is not running."
        process, self._process = self._process, None
        if self._liveness is not None:
            self._liveness.stop()
        if process is not None:
            await asyncio.to_thread(process.shutdown)

    @property
    def running(self) -> int:
        """Number of requests in flight."""
        return len(self._requests)

    @property
    def busy(self) -> bool:
        """True if the engine generates, or holds requests back during a weight switch."""
        return bool(self._requests) or not self._not_switching.is_set()

    @property
    def _alive(self) -> Liveness:
        if self._liveness is None:
            raise RunError(f"{self._name} is not running.")
        return self._liveness

    @property
    def _sglang(self) -> SglangProcess:
        if self._process is None:
            raise RunError(f"{self._name} is not running.")
        return self._process

    async def _await_request(self, request: asyncio.Task[dict[str, Any]]) -> dict[str, Any]:
        """Await `request`. Raises RunError if `_discard_update` cancelled it."""
        await self._alive.first_of(request)
        if request.cancelled():
            raise RunError(self._failure)
        return request.result()

    async def _await_call(self, call: Coroutine[Any, Any, T]) -> T:
        """Await `call`. Raises EngineDied if one of SGLang's processes exits first."""
        return await self._alive.guard(call)

    def _launch(self) -> SglangProcess:
        """Blocking part of `start`; runs in a thread."""
        # SGLang may be imported only now, after `prepare`.
        from rlsys.rollout.sglang_process import SglangProcess, gpu_hash

        if self._device is Device.gpu:
            self._hasher = gpu_hash
        return SglangProcess(self._arguments(), on_cpu=self._device is Device.cpu)

    def _arguments(self) -> dict[str, Any]:
        """Return SGLang's server arguments."""
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
            # The weights move to host memory; the trainer's state there is much larger.
            arguments |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
        backend = config.attention_backend
        if self._device is Device.cpu:
            arguments["device"] = "cpu"
            # Otherwise SGLang's scheduler polls all the time, on a core that training could use.
            arguments["sleep_on_idle"] = True
            backend = "torch_native" if backend == "auto" else backend
        else:
            if self._layout.experts:
                # On Blackwell, other kernels permute the experts' weights; `StagedVersion` does not predict that order.
                arguments["moe_runner_backend"] = "triton"
            if config.cuda_graphs:
                # By default SGLang has graphs for up to 256 requests on 80 GB, and decodes larger batches without one.
                arguments["cuda_graph_max_bs_decode"] = config.max_running
            else:
                arguments |= {"cuda_graph_backend_decode": "disabled", "cuda_graph_backend_prefill": "disabled"}
        if backend != "auto":
            arguments["attention_backend"] = backend
        return arguments

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Pause generation. Any failure in the body fails the update."""
        self._not_switching.clear()
        started = perf_counter()
        try:
            await self._await_call(self._sglang.pause())
            yield
        except EngineDied:
            self._update = None  # Waiting calls raise EngineDied themselves.
            raise
        except BaseException as error:
            if self._update is not None:
                self._discard_update(f"it was interrupted ({type(error).__name__}: {error})")
            with suppress(RunError):  # Nothing may be sampled from partly updated weights.
                self._sglang.abort_all()
            raise
        finally:
            try:
                with suppress(RunError):  # Raised if the engine is dead or stopped.
                    await self._await_call(self._sglang.resume())
            finally:
                self.counts.pause_s += perf_counter() - started
                self._not_switching.set()

    async def _switch(self, update: StagedVersion) -> None:
        """Load the staged weights, empty the prefix cache and verify the loaded tensors."""
        if not self._session_open:  # A failed update leaves SGLang's session open.
            self._require_success(await self._await_call(self._sglang.begin_update()))
            self._session_open = True
        for bucket in update.pop_buckets():
            self._require_success(
                await self._await_call(self._sglang.load_bucket(bucket, update.version, self._config.tp))
            )
        self._require_success(await self._await_call(self._sglang.end_update()))
        self._session_open = False
        answer, reported = await self._await_call(self._sglang.checksums())
        self._require_success(answer)
        if wrong := update.mismatches(reported):
            self._fail_update(
                f"{len(wrong)} of its tensors differ from those sent, first {wrong[0]}; "
                f"version {update.version} is not used"
            )

    def _open_update(self) -> StagedVersion:
        if self._update is None:
            raise RunError(
                self._failure or "The engine received weights without an open update: call begin_update first."
            )
        return self._update

    def _require_success(self, answer: Answer) -> None:
        """Fail the update unless `answer` is a success."""
        success, message = answer
        if not success:
            self._fail_update(message)

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


def _release_cached_memory() -> None:
    """Return cached GPU memory of this process to the device, including memory to which SGLang had a handle."""
    if torch.cuda.is_initialized():
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def sampling_params(sampling: TurnSampling, eos_id: int) -> dict[str, Any]:
    """Return SGLang's parameters for a turn, which ends at its stop strings or `eos_id`."""
    fixed = {"no_stop_trim": True, "stop_token_ids": [eos_id], "spaces_between_special_tokens": False}
    return {**asdict(sampling), "stop": list(sampling.stop), **fixed}


def _token_ids(output: dict[str, Any]) -> list[int]:
    """Return the sampled tokens of an output. In a stream, every output has all tokens so far."""
    return [token for _, token, _ in output["meta_info"]["output_token_logprobs"]]


async def read_stream(call: Awaitable[AsyncIterable[dict[str, Any]]], on_tokens: OnTokens) -> dict[str, Any]:
    """Consume a stream and return its last output, which is complete; `on_tokens` is called for each output.

    Raises RunError with SGLang's reason for a rejected or abandoned request, and for an empty stream. If `abort_all`
    ended the request, the output so far is returned.
    """
    output: dict[str, Any] = {}
    async for output in await call:
        finish = output["meta_info"].get("finish_reason") or {}
        if finish.get("status_code"):
            raise RunError(f"SGLang rejected or abandoned the request: {str(finish.get('message')).rstrip('.')}.")
        if "output_token_logprobs" in output["meta_info"]:
            on_tokens(_token_ids(output))
    if not output:
        raise RunError("SGLang returned an empty stream.")
    return output


def as_generation(output: dict[str, Any]) -> Generation:
    """Convert a complete output. Raises RunError if SGLang omits the version of a token."""
    meta, sampled = output["meta_info"], _token_ids(output)
    # A guessed version would hide a stale token, so the spans [start, end) must cover all tokens.
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": len(sampled)}]
    versions = [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
    if len(versions) != len(sampled):
        raise RunError(f"SGLang reported versions for {len(versions)} of the {len(sampled)} tokens of {meta['id']}.")
    return Generation(
        token_ids=sampled,
        logprobs=[logprob for logprob, _, _ in meta["output_token_logprobs"]],
        finish=meta["finish_reason"]["type"],
        # SGLang omits the count if the request was aborted in the queue.
        cached_tokens=meta.get("cached_tokens", 0),
        versions=versions,
    )


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
        """Stop watching."""
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


def sha256_prefix(parts: Sequence[Tensor]) -> str:
    """Return SGLang's hash of a tensor in host memory: the first 8 bytes of SHA-256 over its bytes, in hex."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(bytes_of(part).data)
    return whole.digest()[:8].hex()


@dataclass(frozen=True, slots=True)
class Layout:
    """Storage format of a model in an engine, for the Llama, Qwen2, Qwen3 and Qwen3-MoE families."""

    tp: int
    kv_heads: int
    tied: bool
    """True if the output layer is the embedding; a separate `lm_head.weight` is then ignored."""
    dtype: torch.dtype
    experts: int = 0
    """Experts per layer; 0 for a dense model."""
    width_padding: int = 1
    """The width of an MLP is padded to a multiple of this on each rank."""


class StagedVersion:
    """Staged buckets of one version, and the hashes that the engine must report after loading them.

    Contract: `stage` copies a bucket once and checks the copy, so later changes to the sender's memory have no effect.
    `check` passes only for exactly the tensors that were sent. `pop_buckets` frees the buckets one by one.

    Buckets stay where they arrive: in host memory, or on a device, which then holds a second copy of the model. A
    bucket that moves from a device to host memory is checked before the move, because hashing is much faster on the
    device. The hashes that the engine reports after loading verify the move too (`mismatches`).

    SGLang's weight checker reports one hash per engine tensor and tensor-parallel rank. The expected hashes are
    computed from the Hugging Face tensors, which are fused, cut and padded as in SGLang:

        qkv_proj              q, k, v (rows are cut over ranks before they are fused);
        gate_up_proj          gate, up (cut likewise);
        w13_weight            gate, up of expert 0, then of expert 1, and so on;
        w2_weight             down of each expert;
        embed_tokens, lm_head padded with zero rows to a multiple of 64;
        MLP on a CPU          width padded to a multiple of 32 per rank.

    If all hashes match, the engine holds the weights that were sent. Besides the buckets, only the parts of fused
    tensors are kept that a bucket leaves incomplete; for experts, these are parts of one layer.
    """

    def __init__(self, version: int, layout: Layout, hasher: Hasher) -> None:
        self.version = version
        self.nbytes = 0
        """Number of bytes staged so far."""
        self.hashes: list[dict[str, str]] = [{} for _ in range(layout.tp)]
        """Per tensor-parallel rank: engine tensor name -> expected hash."""
        self._layout = layout
        self._hasher = hasher
        self._parts: dict[str, dict[int, Tensor]] = {}
        self._checksums: dict[str, str] = {}
        self._buckets: list[Bucket] = []

    def stage(self, bucket: Bucket, to_host: bool = False) -> None:
        """Copy and check a bucket; `to_host` moves a device bucket to host memory.

        Raises ChecksumError for a tensor that differs from the tensor that was sent.
        """
        moves = to_host and isinstance(bucket.data, Tensor)
        staged = bucket.copy(to_host)
        for record, tensor in unpack(bucket if moves else staged):
            self.predict(record.name, tensor)
            self._checksums[record.name] = record.checksum
        if moves:  # The parts of incomplete tensors must outlive the arriving bucket.
            for parts in self._parts.values():
                parts |= {index: part.clone() for index, part in parts.items() if _shares(part, bucket.flat)}
        self._buckets.append(staged)
        self.nbytes += staged.flat.nbytes

    def check(self, version: int, expected_digest: str) -> None:
        """Raise ChecksumError unless `version` is staged and the received tensors have the digest `expected_digest`."""
        if version != self.version:
            raise ChecksumError(f"finish_update({version}) was called, but version {self.version} is staged")
        if digest(self._checksums) != expected_digest:
            raise ChecksumError(f"the {len(self._checksums)} received tensors are not those that were sent")

    def move_to_host(self) -> None:
        """Move device buckets to host memory."""
        self._buckets = [each.copy(to_host=True) if isinstance(each.data, Tensor) else each for each in self._buckets]

    def pop_buckets(self) -> Iterator[Bucket]:
        """Yield the buckets in order of arrival; each bucket is freed when the next is requested."""
        while self._buckets:
            yield self._buckets.pop(0)

    def predict(self, name: str, tensor: Tensor) -> None:
        """Add a Hugging Face tensor. Hash an engine tensor once all of its parts have been added."""
        if self._layout.tied and name == "lm_head.weight":
            return
        tensor = tensor.to(self._layout.dtype)
        target, index, parts = _engine_tensor(name, self._layout.experts)
        known = self._parts.setdefault(target, {})
        known[index] = tensor
        if len(known) == parts:
            del self._parts[target]
            self._hash(target, [known[index] for index in range(parts)])

    def mismatches(self, reported: Sequence[Mapping[str, str]]) -> list[str]:
        """Return names of tensors that are incomplete, missing, unexpected or different on any rank.

        `reported` has the format of `hashes`.
        """
        if len(reported) != len(self.hashes):
            raise ValueError(f"{len(reported)} ranks reported, {len(self.hashes)} expected")
        wrong = set(self._parts)
        for expected, held in zip(self.hashes, reported, strict=True):
            wrong |= {name for name in expected.keys() | held.keys() if expected.get(name) != held.get(name)}
        return sorted(wrong)

    def _hash(self, target: str, parts: Sequence[Tensor]) -> None:
        for rank, hashes in enumerate(self.hashes):
            hashes[target] = self._hasher([self._piece(target, n, part, rank) for n, part in enumerate(parts)])

    def _piece(self, target: str, index: int, part: Tensor, rank: int) -> Tensor:
        """Return the shard that `rank` holds of one part of the engine tensor `target`."""
        tp = self._layout.tp
        *_, module, leaf = target.rsplit(".", 2)
        module = leaf if leaf in _OF_EXPERTS else module
        if module in ("embed_tokens", "lm_head"):
            return _padded(part, VOCAB_PADDING, dim=0).chunk(tp)[rank]
        if module == "qkv_proj" and index > 0 and self._layout.kv_heads < tp:
            return part.chunk(self._layout.kv_heads)[rank * self._layout.kv_heads // tp]
        multiple = tp * self._layout.width_padding if module in ("gate_up_proj", "down_proj", *_OF_EXPERTS) else 1
        if module in (*_FUSED, "w13_weight"):
            return _padded(part, multiple, dim=0).chunk(tp)[rank]
        if module in ("o_proj", "down_proj", "w2_weight") and part.dim() == 2:
            return _padded(part, multiple, dim=1).chunk(tp, dim=1)[rank]
        return part


def _shares(part: Tensor, flat: Tensor) -> bool:
    return part.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def _engine_tensor(name: str, experts: int) -> tuple[str, int, int]:
    """Return the name of the engine tensor that contains the Hugging Face tensor `name`.

    Also return the index of `name` among the parts of the engine tensor, and the number of parts.
    """
    if expert := _EXPERT.fullmatch(name):
        for fused, modules in _OF_EXPERTS.items():
            if expert["module"] in modules:
                index = int(expert["number"]) * len(modules) + modules.index(expert["module"])
                return (f"{expert['experts']}.{fused}", index, experts * len(modules))
    for fused, modules in _FUSED.items():
        for index, module in enumerate(modules):
            if f".{module}." in name:
                return (name.replace(f".{module}.", f".{fused}."), index, len(modules))
    return (name, 0, 1)


def _padded(matrix: Tensor, multiple: int, dim: int) -> Tensor:
    """Return `matrix` padded with zeros along `dim`, to the next multiple of `multiple`."""
    missing = -matrix.shape[dim] % multiple
    return matrix if not missing else pad(matrix, [0, 0] * (matrix.dim() - 1 - dim) + [0, missing])


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
      while new groups wait, so all tokens of a group have one version. With `continue` they only pause.

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
    ) -> None:
        """`memory_saver` makes `sleep` free device memory; `sampled_answers` makes `answer` sample as in training."""
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
        self._stages_in_host = True
        self._receiving = asyncio.Lock()
        self._in_flight: dict[asyncio.Timeout, tuple[str, EpisodeGroup]] = {}
        """Timeout that aborts a group -> key and group, for each group in flight."""
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
        """Run `n_samples` episodes of one question concurrently, sampled as in training unless `sampling` is given.

        The episodes are the samples `first`, `first` + 1, ... of the question. `key` names the group for `abort_group`
        and `in_flight`. `progress` has the episodes that began elsewhere, each at most once. Raises UserError for a
        question that is too long and RunError after a failed weight update.
        """
        drawn = sampling or training_sampling(self._rollout.sampling)
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

    def in_flight(self, keys: Sequence[str]) -> dict[str, tuple[EpisodeProgress, ...]]:
        """Return key -> progress of each group in `keys` that is in flight here.

        The progress has the episodes that have finished or completed a turn.
        """
        return {key: group.progress() for key, group in self._in_flight.values() if key in keys}

    def activity(self) -> EngineActivity:
        """Return the engine's current state and the tools that episodes wait for."""
        return EngineActivity(self.engine.busy, dict(+self._tools.awaited))

    async def open_transport(self, spec: TransportSpec) -> None:
        """Connect to the weight sender, replacing an earlier transport. Raises RunError if it does not connect."""
        await self._close_transport()
        self._receiver = await asyncio.to_thread(open_receiver, spec)
        self._stages_in_host = spec.mode is not SyncMode.ipc

    async def load_bucket(self, handle: BucketHandle) -> None:
        """Receive a bucket from the transport and stage it; see `Engine.load_bucket`."""
        if self._receiver is None:
            raise RunError("The rollout worker received weights without a transport: call open_transport first.")
        async with self._receiving:
            bucket = await asyncio.to_thread(self._receiver.receive, handle)
            # Copies the bytes, which the receiver reuses.
            await self.engine.load_bucket(bucket, to_host=self._stages_in_host)
            del bucket
            await asyncio.to_thread(self._receiver.release)

    async def finish_update(self, version: int, digest: str) -> None:
        """Switch to the new version; see `Engine.finish_update`.

        With `OnUpdate.finish`, first wait until the groups in flight have ended.
        """
        if self._on_update is not OnUpdate.finish:
            await self.engine.finish_update(version, digest)
            return
        started = perf_counter()
        async with self._draining.closed():
            self._drain_s += perf_counter() - started
            await self.engine.finish_update(version, digest)

    def metrics(self) -> dict[str, float]:
        """Return totals of the engine and the worker since the start, and ratios of totals.

        Metrics named `..._s` are in seconds. `drain_s` is the time for which activations waited until the groups in
        flight had ended; no group begins meanwhile.
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
        """Close the transport and the search client, and stop the engine's processes. Idempotent."""
        await self._close_transport()
        if self._search:
            await self._search.close()
        await self.engine.stop()

    async def _close_transport(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            await asyncio.to_thread(receiver.close)
