"""A rollout process: groups of episodes on one SGLang engine, and weight updates that are proven to have arrived.

`RolloutWorker` runs the episodes and receives new weights. `Engine` drives SGLang; under it are the values of a request,
the watch over SGLang's processes (`Liveness`) and the weights of one version beside the engine (`StagedVersion`).

Contract of an engine:
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

from rlsys.config.schema import Device, EngineConfig, OnUpdate, RolloutConfig, SearchConfig, TaskConfig
from rlsys.data.question import Question
from rlsys.data.trajectory import Finish, Trajectory
from rlsys.errors import RunError, UserError
from rlsys.rollout import sglang_cpu
from rlsys.rollout.agent.episode import (
    EngineActivity,
    EngineDied,
    EpisodeGroup,
    EpisodeTools,
    Generation,
    Heard,
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
    digest,
    open_receiver,
    unpack,
)

if TYPE_CHECKING:
    from rlsys.rollout.sglang_process import Answer, SglangProcess

T = TypeVar("T")
Hasher = Callable[[Tensor], str]

FLUSH_TIMEOUT_S = 30.0
"""For aborted requests to leave the scheduler before it sleeps."""
POLL_S = 0.5
"""Between two looks at SGLang's processes."""
VOCAB_PADDING = 64
"""Rows; SGLang's default."""
CPU_WIDTH_PADDING = 32
"""Columns or rows of an MLP, on each tensor-parallel rank of an engine on a CPU."""

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_OF_EXPERTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<module>\w+)\.weight")

_log = logging.getLogger(__name__)


@dataclass
class EngineCounts:
    """Sums since the start of an engine."""

    requests: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    busy_s: float = 0.0
    """Wall time in which at least one request ran."""
    updates: int = 0
    update_bytes: int = 0
    update_s: float = 0.0
    """Wall time of updates, from `begin_update` to the verified end; mostly beside generation."""
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
        longest: int = model.max_position_embeddings
        self._context_tokens = min(longest, config.kv_cache_tokens or longest)
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
        """The device's memory is free for others while the engine is asleep."""
        self.version = 0
        """Policy version of the weights."""
        self.counts = EngineCounts()

    def require_room(self, task: TaskConfig) -> None:
        """Raise UserError unless the engine takes the longest episode of `task`, prompt and output together."""
        if task.max_total_tokens > self._context_tokens:
            raise UserError(
                f"task.max_total_tokens={task.max_total_tokens} is more than the {self._context_tokens} tokens that the "
                f"model at {self._model_path} and rollout.engine.kv_cache_tokens allow; lower it.",
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
            while not starting.done():  # Its processes may be yet to come; without them the start returns.
                for child in _children():
                    if child.pid not in before:
                        child.kill()
                await asyncio.wait({starting}, timeout=0.2)
            raise RunError(
                f"{self._name} was not ready after rollout.engine.start_timeout_s={self._config.start_timeout_s:g} s."
            )
        try:
            self._process = starting.result()
        except Exception as error:
            raise RunError(f"{self._name} did not start: {error}") from error
        self._liveness = Liveness(self._name, [child for child in _children() if child.pid not in before])
        await self._process.freeze_gc()

    async def generate(
        self, input_ids: list[int], sampling: TurnSampling, rid: str, heard: Heard | None = None
    ) -> Generation:
        """Continue `input_ids`; on cancellation the request is aborted in the engine.

        `rid` names the request in logs; it is made unique. `heard` follows it token by token.
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
        request = asyncio.create_task(read_stream(call, heard) if heard else call)
        if not self._requests:
            self._busy_since = perf_counter()
        self._requests.add(request)
        try:
            generation = as_generation(await self._outcome(request))
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
        """Open an update to `version` and forget what is staged. Raises RunError while another is being switched to."""
        if not self._open.is_set():
            raise RunError(f"The update to version {version} began before the last one had ended.")
        self._update = StagedVersion(version, self._layout, self._hasher)
        self._update_began = perf_counter()

    async def load_bucket(self, bucket: Bucket) -> None:
        """Check and stage a bucket. Raises RunError, and fails the update, if it is not as sent or finds no room."""
        update = self._staged()
        try:
            async with self._staging:
                await asyncio.to_thread(update.take, bucket, to_host=self._asleep)
            if self._asleep:
                _give_back()  # What checking it took.
        except ChecksumError as error:
            self._refuse(str(error))
        except torch.OutOfMemoryError as error:
            fix = f"lower rollout.engine.memory_fraction={self._config.memory_fraction:g}"
            if isinstance(bucket.data, Tensor):
                fix += ", or stage in host memory with cluster.sync_mode=tensor"
            self._refuse(
                f"after {update.nbytes} bytes of version {update.version} the engine's GPU had no room for more beside "
                f"weights and KV cache; {fix} ({error})"
            )

    async def finish_update(self, version: int, expected_digest: str) -> None:
        """Switch to the staged weights and verify every tensor; generation is held back meanwhile.

        `expected_digest` is the sender's over all tensors. Raises RunError if what came or what the engine holds is
        anything else, and while asleep: then the update stays staged and can be finished after `wake`.
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
            "version %d: %d bytes in %.3f s, of it %.3f s paused; verified", version, update.nbytes, seconds, pause_s
        )

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
        process, self._process = self._process, None
        if self._liveness is not None:
            self._liveness.stop()
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
    def _alive(self) -> Liveness:
        if self._liveness is None:
            raise RunError(f"{self._name} is not running.")
        return self._liveness

    @property
    def _sglang(self) -> SglangProcess:
        if self._process is None:
            raise RunError(f"{self._name} is not running.")
        return self._process

    async def _outcome(self, request: asyncio.Task[dict[str, Any]]) -> dict[str, Any]:
        """Await `request`. Raises RunError for one that `_reject` has ended."""
        await self._alive.first_of(request)
        if request.cancelled():
            raise RunError(self._refusal)
        return request.result()

    async def _answer(self, call: Coroutine[Any, Any, T]) -> T:
        """Await SGLang's answer to `call`. Raises EngineDied once one of its processes is gone."""
        return await self._alive.guard(call)

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


def _give_back() -> None:
    """Return GPU memory that this process has freed to the device: torch keeps it, and what SGLang had a handle to."""
    if torch.cuda.is_initialized():
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def sampling_params(sampling: TurnSampling, eos_id: int) -> dict[str, Any]:
    """SGLang's parameters for a turn, which its stop strings or `eos_id` end."""
    fixed = {"no_stop_trim": True, "stop_token_ids": [eos_id], "spaces_between_special_tokens": False}
    return {**asdict(sampling), "stop": list(sampling.stop), **fixed}


def _token_ids(output: dict[str, Any]) -> list[int]:
    """The sampled tokens of an answer, or of a part of one, in which SGLang repeats what it said before."""
    return [token for _, token, _ in output["meta_info"]["output_token_logprobs"]]


async def read_stream(call: Awaitable[AsyncIterable[dict[str, Any]]], heard: Heard) -> dict[str, Any]:
    """The last part of a streamed answer, which is the whole; `heard` is told of each.

    Raises RunError, with SGLang's reason, for a request that was refused or given up, and where nothing came. One that
    was aborted here is an answer, as far as it came.
    """
    output: dict[str, Any] = {}
    async for output in await call:
        finish = output["meta_info"].get("finish_reason") or {}
        if finish.get("status_code"):
            raise RunError(f"SGLang has not answered: {str(finish.get('message')).rstrip('.')}.")
        if "output_token_logprobs" in output["meta_info"]:
            heard(_token_ids(output))
    if not output:
        raise RunError("SGLang has not answered: its stream ended before it began.")
    return output


def as_generation(output: dict[str, Any]) -> Generation:
    """Read a whole answer. Raises RunError where SGLang does not say which version sampled each token."""
    meta, sampled = output["meta_info"], _token_ids(output)
    # A version that is guessed would hide a stale token, so the spans [start, end) must cover all.
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": len(sampled)}]
    versions = [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
    if len(versions) != len(sampled):
        raise RunError(f"SGLang names versions for {len(versions)} of the {len(sampled)} tokens of {meta['id']}.")
    return Generation(
        token_ids=sampled,
        logprobs=[logprob for logprob, _, _ in meta["output_token_logprobs"]],
        finish=meta["finish_reason"]["type"],
        # SGLang leaves it out for a request that was aborted while it waited.
        cached_tokens=meta.get("cached_tokens", 0),
        versions=versions,
    )


class Liveness:
    """Waits on processes that may die: an answer, or an error that says they are gone. Never a hang.

    Watches `processes` from construction to `stop`; belongs to one running event loop. SGLang's own watchdog signals the
    main thread, which in a Ray worker runs no Python: nobody would hear it.
    """

    def __init__(self, name: str, processes: Sequence[psutil.Process]) -> None:
        self._name = name
        self._processes = processes
        self._death = asyncio.create_task(self._watch())

    async def guard(self, call: Coroutine[Any, Any, T]) -> T:
        """Await `call`. Raises EngineDied, and cancels it, as soon as a process is gone."""
        task = asyncio.ensure_future(call)
        try:
            await self.first_of(task)
            return task.result()
        finally:
            task.cancel()

    async def first_of(self, task: asyncio.Task[Any]) -> None:
        """Wait until `task` has ended, in whatever way. Raises EngineDied if a process is gone before."""
        await asyncio.wait({task, self._death}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise EngineDied(f"{self._name} died: its process {self._death.result()} is gone.")

    def stop(self) -> None:
        """Watch no more."""
        self._death.cancel()

    async def _watch(self) -> int:
        """The id of the first process that is gone."""
        while True:
            for process in self._processes:
                if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                    return process.pid
            await asyncio.sleep(POLL_S)


def sha256_prefix(tensor: Tensor) -> str:
    """SGLang's hash of a tensor in host memory: 8 bytes of SHA-256 over its bytes, in hex."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.data).digest()[:8].hex()


@dataclass(frozen=True, slots=True)
class Layout:
    """The form in which an engine holds a model of the Llama, Qwen2, Qwen3 or Qwen3-MoE family."""

    tp: int
    kv_heads: int
    tied: bool
    """The output layer is the embedding; a separate `lm_head.weight` is ignored."""
    dtype: torch.dtype
    experts: int = 0
    """Experts of a layer; 0 is a dense model."""
    width_padding: int = 1
    """An MLP's width on a rank is padded to a multiple of this."""


class StagedVersion:
    """The buckets of one version beside the engine, and the hashes that the engine must report once it holds them.

    Contract: `take` copies a bucket once and checks the copy, so that nothing that happens to the sender's
    memory afterwards can change what is loaded. `check` passes only for exactly the tensors that were sent.
    Handing the buckets out frees them one by one.

    Buckets are kept where they come: in host memory, or on a device, where a whole copy of the model then lies beside
    the engine. A bucket that comes on a device can be moved to host memory. Then it is checked before, for a device hashes
    much faster; that the move changed nothing, as that the load did not, shows in what the engine reports (`mismatches`).

    SGLang's weight checker reports one hash for each of the engine's own tensors on each tensor-parallel rank. They are
    predicted: the Hugging Face tensors are fused and cut as SGLang does (`qkv_proj` is q, k, v; `gate_up_proj` is gate, up;
    `w13_weight` is gate, up of expert 0, then of expert 1 and so on, `w2_weight` is down of each; rows are cut over ranks
    before they are fused; the vocabulary is padded with zeros to a multiple of 64, and on a CPU the width of an MLP to one
    of 32) and hashed. A prediction that comes true for every tensor means that the engine holds what was sent. A fused
    tensor is kept until its parts are in, which for experts is a layer's worth of them; nothing else is kept.
    """

    def __init__(self, version: int, layout: Layout, hasher: Hasher) -> None:
        self.version = version
        self.nbytes = 0
        """Taken so far."""
        self.hashes: list[dict[str, str]] = [{} for _ in range(layout.tp)]
        """For each tensor-parallel rank: the engine's tensor name -> its hash."""
        self._layout = layout
        self._hasher = hasher
        self._parts: dict[str, dict[int, Tensor]] = {}
        self._checksums: dict[str, str] = {}
        self._buckets: list[Bucket] = []

    def take(self, bucket: Bucket, to_host: bool = False) -> None:
        """Copy and check a bucket, `to_host` if it is not there. Raises ChecksumError for a tensor that is not as sent."""
        moves = to_host and isinstance(bucket.data, Tensor)
        staged = bucket.copy(to_host)
        for record, tensor in unpack(bucket if moves else staged):
            self.predict(record.name, tensor)
            self._checksums[record.name] = record.checksum
        self._buckets.append(staged)
        self.nbytes += staged.flat.nbytes

    def check(self, version: int, expected_digest: str) -> None:
        """Raise ChecksumError unless this is `version`, and all of what the sender's digest speaks of."""
        if version != self.version:
            raise ChecksumError(f"version {version} was finished while version {self.version} was staged")
        if digest(self._checksums) != expected_digest:
            raise ChecksumError(f"{len(self._checksums)} tensors came, and they are not the ones that were sent")

    def leave_device(self) -> None:
        """Move what lies on a device to host memory."""
        self._buckets = [each.copy(to_host=True) if isinstance(each.data, Tensor) else each for each in self._buckets]

    def hand_out(self) -> Iterator[Bucket]:
        """The buckets in the order in which they came; each is forgotten when the next is asked for."""
        while self._buckets:
            yield self._buckets.pop(0)

    def predict(self, name: str, tensor: Tensor) -> None:
        """Hash a whole Hugging Face tensor as the engine will hold it, once all that it is fused with is there."""
        if self._layout.tied and name == "lm_head.weight":
            return
        tensor = tensor.to(self._layout.dtype)
        target, index, parts = _place(name, self._layout.experts)
        known = self._parts.setdefault(target, {})
        known[index] = tensor if parts == 1 else tensor.clone()
        if len(known) == parts:
            del self._parts[target]
            self._hash(target, [known[index] for index in range(parts)])

    def mismatches(self, reported: Sequence[Mapping[str, str]]) -> list[str]:
        """Names of tensors that were not sent, are not held, or differ, on any rank; `reported` is as `hashes`."""
        if len(reported) != len(self.hashes):
            raise ValueError(f"{len(reported)} ranks reported, {len(self.hashes)} expected")
        wrong = set(self._parts)
        for expected, held in zip(self.hashes, reported, strict=True):
            wrong |= {name for name in expected.keys() | held.keys() if expected.get(name) != held.get(name)}
        return sorted(wrong)

    def _hash(self, target: str, parts: Sequence[Tensor]) -> None:
        for rank, hashes in enumerate(self.hashes):
            pieces = [self._piece(target, index, part, rank) for index, part in enumerate(parts)]
            hashes[target] = self._hasher(torch.cat(pieces) if len(pieces) > 1 else pieces[0])

    def _piece(self, target: str, index: int, part: Tensor, rank: int) -> Tensor:
        """Rank `rank`'s share of one part of the engine's tensor `target`."""
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


def _place(name: str, experts: int) -> tuple[str, int, int]:
    """The engine's tensor with the Hugging Face tensor `name`, its index among the parts, and their number."""
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
    """`matrix` with zeros behind, up to the next `multiple` along `dim`."""
    missing = -matrix.shape[dim] % multiple
    return matrix if not missing else pad(matrix, [0, 0] * (matrix.dim() - 1 - dim) + [0, missing])


class DrainLock:
    """Lets calls through side by side; closing it blocks new ones, waits for those inside, and always opens again."""

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


class RolloutWorker:
    """Runs groups of episodes on its own engine. `start` it first; `stop` leaves no process.

    Contract:
    - All methods belong to one event loop and may be called concurrently.
    - All episodes and turns of a group run on this worker's engine, so later turns and siblings find their
      prefix in its cache. Never more than `max_episodes` run at once.
    - `run_group` returns as many trajectories as were asked for, or raises. An episode that takes longer than
      `episode_timeout_s`, or whose group is aborted, comes back with what it had, whatever the engine does. Episodes
      that were begun elsewhere go on, with all of that time before them.
    - At the switch to a new version, `on_update` says what becomes of groups in flight: with `finish` they end on the old
      one, new groups wait, and all tokens of a group have one version; with `continue` they pause.

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
        """`memory_saver` lets `sleep` free the device's memory; `sampled_answers` draws answers as in training."""
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
        self._in_flight: dict[asyncio.Timeout, tuple[str, EpisodeGroup]] = {}
        """Key and group of each that has not been returned, by what expires when it is aborted."""
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
        """Run `n_samples` episodes of one question, side by side, drawn as in training unless `sampling` says otherwise.

        They are its samples from `first` on. `key` names the group for `abort_group` and `in_flight`; `progress` has the
        episodes of it that were begun elsewhere, each at most once. Raises UserError for a question that is too long and
        RunError for an engine that has refused.
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
        """Run one episode of an evaluation, as number `sample` of its question. Temperature 0 is greedy."""
        sampling = evaluation_sampling(self._rollout.sampling, temperature, as_rollouts=self._sampled_answers)
        return (await self.run_group(question, 1, key, first=sample, sampling=sampling))[0]

    async def abort_group(self, key: str) -> None:
        """End the groups and answers that were started as `key`: their calls return at once, with what there is."""
        for until_aborted, (started_as, _) in self._in_flight.items():
            if started_as == key and not until_aborted.expired():
                until_aborted.reschedule(asyncio.get_running_loop().time())

    def in_flight(self, keys: Sequence[str]) -> dict[str, tuple[EpisodeProgress, ...]]:
        """The groups of `keys` that run here, with their episodes that have ended or have a whole turn."""
        return {key: group.progress() for key, group in self._in_flight.values() if key in keys}

    def activity(self) -> EngineActivity:
        """The engine's state, and what episodes wait for, right now."""
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
        """Switch to the new version, with `OnUpdate.finish` after the groups in flight; see `Engine.finish_update`."""
        if self._on_update is not OnUpdate.finish:
            await self.engine.finish_update(version, digest)
            return
        started = perf_counter()
        async with self._draining.closed():
            self._drain_s += perf_counter() - started
            await self.engine.finish_update(version, digest)

    def metrics(self) -> dict[str, float]:
        """`EngineCounts`, sums of the worker's own, and ratios of them. Seconds end in `_s`, shares are of 1.

        `drain_s` is time before a switch in which groups in flight ended and no group began.
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
