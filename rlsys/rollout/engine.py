"""One SGLang engine: generation, abort, and weight updates that are proven to have arrived.

Contract:
- All methods belong to one event loop, the one that first generates.
- Between `begin_update` and `finish_update` nothing is generated: running generations end first, later
  ones wait. So all tokens of a `Generation` come from one version.
- `finish_update` succeeds only if every tensor that the engine reports hashes to what was received.
  After a failed update the engine refuses to generate until another succeeds.
- SGLang signals SIGQUIT to this process when one of its processes dies, and ends every child of this
  process on shutdown: give an engine a process of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import torch
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from rlsys.agent.episode import Generation, TurnSampling
from rlsys.config.schema import Device, EngineConfig
from rlsys.errors import RunError
from rlsys.rollout import sglang_cpu
from rlsys.rollout.held_weights import Hasher, HeldWeights, Layout, sha256_prefix
from rlsys.rollout.liveness import Liveness
from rlsys.weights.buckets import Bucket, ChecksumError, digest, unpack

if TYPE_CHECKING:
    from rlsys.rollout.sglang_process import Answer, SglangProcess

T = TypeVar("T")

FLUSH_TIMEOUT_S = 30.0
"""For aborted requests to leave the scheduler, so that the prefix cache can be emptied."""

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
    """Wall time of updates, from the first bucket to the verified end."""
    update_bytes: int = 0


@dataclass
class _Update:
    """An update under way."""

    version: int
    held: HeldWeights
    checksums: dict[str, str]
    started: float
    nbytes: int = 0


class Engine:
    """An SGLang engine on `model_path`. `start` it, then `generate`; `stop` it in the end."""

    def __init__(self, model_path: str, config: EngineConfig, device: Device, seed: int) -> None:
        self._model_path = model_path
        self._config = config
        self._device = device
        self._seed = seed
        self._process: SglangProcess | None = None
        self._liveness: Liveness | None = None
        self._hasher: Hasher = sha256_prefix
        self._eos_id: int = AutoTokenizer.from_pretrained(model_path).eos_token_id
        model = AutoConfig.from_pretrained(model_path)
        self._layout = _layout(model, config)
        self.context_tokens: int = min(
            model.max_position_embeddings, config.kv_cache_tokens or model.max_position_embeddings
        )
        """Longest sequence, prompt and output together, that the engine takes."""
        self._rids = itertools.count()
        self._open = asyncio.Event()
        self._idle = asyncio.Event()
        self._open.set()
        self._idle.set()
        self._running = 0
        self._busy_since = 0.0
        self._update: _Update | None = None
        self._session_open = False
        self._refusal = ""
        self.version = 0
        """Policy version of the weights."""
        self.counts = EngineCounts()

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
                f"The engine on {self._model_path} was not ready after "
                f"rollout.engine.start_timeout_s={self._config.start_timeout_s:g} s."
            )
        try:
            self._process = starting.result()
        except Exception as error:
            raise RunError(f"The engine on {self._model_path} did not start: {error}") from error
        children = [c for c in psutil.Process().children(recursive=True) if c.pid not in before]
        self._liveness = Liveness(f"The engine on {self._model_path}", children)
        await self._process.freeze_gc()

    async def generate(self, input_ids: list[int], sampling: TurnSampling, rid: str) -> Generation:
        """Continue `input_ids`; on cancellation the request is aborted in the engine.

        `rid` names the request in logs and for `abort`; it is made unique. Waits while weights are
        updated. Raises RunError once an update has failed.
        """
        while not self._open.is_set():  # An update may begin between the event and this task's turn.
            await self._open.wait()
        if self._refusal:
            raise RunError(self._refusal)
        self._enter()
        try:
            output = await self._answer(
                self._sglang.generate(
                    input_ids, _sampling_params(sampling, self._eos_id), f"{rid}~{next(self._rids)}"
                )
            )
        except BaseException:
            self.counts.aborted += 1
            raise
        finally:
            self._leave()
        return self._count(_as_generation(output), len(input_ids))

    def abort(self, rid: str) -> None:
        """End the requests that were made as `rid`; they return what they have, `finish` "abort"."""
        for running in self._sglang.running():
            if running.rpartition("~")[0] == rid:
                self._sglang.abort(running)

    async def begin_update(self, version: int) -> None:
        """Wait for running generations, hold back new ones and open an update to `version`."""
        if self._update is not None:
            raise RunError(
                f"Update to version {version} began before the one to {self._update.version} ended."
            )
        self._open.clear()
        await self._idle.wait()
        self._update = _Update(version, HeldWeights(self._layout, self._hasher), {}, perf_counter())
        if not self._session_open:  # A refused update leaves SGLang's session open.
            self._require(await self._answer(self._sglang.begin_update()))
            self._session_open = True

    async def load_bucket(self, bucket: Bucket) -> None:
        """Check a bucket's tensors and load them. Raises RunError for one that is not what was sent."""
        update = self._running_update()
        try:
            for record, tensor in unpack(bucket):
                update.held.feed(record.name, tensor)
                update.checksums[record.name] = record.checksum
        except ChecksumError as error:
            self._refuse(str(error))
        update.nbytes += bucket.data.nbytes
        self._require(await self._answer(self._sglang.load_bucket(bucket, update.version, self._config.tp)))

    async def finish_update(self, version: int, expected_digest: str) -> None:
        """Close the update, empty the prefix cache, verify every tensor and let generation go on.

        `expected_digest` is the sender's digest over all tensors. Raises RunError, and generates no
        more, if what came or what the engine holds is anything else.
        """
        update = self._running_update()
        if update.version != version:
            self._refuse(f"version {version} was finished while version {update.version} was being loaded")
        if digest(update.checksums) != expected_digest:
            self._refuse(f"{len(update.checksums)} tensors came, and they are not the ones that were sent")
        self._require(await self._answer(self._sglang.end_update(FLUSH_TIMEOUT_S)))
        self._session_open = False
        await self._verify(update)
        seconds = perf_counter() - update.started
        self.counts.updates += 1
        self.counts.update_s += seconds
        self.counts.update_bytes += update.nbytes
        _log.info("version %d: %d bytes in %.3f s, verified", version, update.nbytes, seconds)
        self.version = version
        self._update = None
        self._refusal = ""
        self._open.set()

    async def stop(self) -> None:
        """End SGLang's processes and wait until they are gone. May be called again, or without a start."""
        if self._liveness is not None:
            self._liveness.stop()
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(process.shutdown)

    @property
    def running(self) -> int:
        """Requests under way."""
        return self._running

    @property
    def _sglang(self) -> SglangProcess:
        if self._process is None:
            raise RunError(f"The engine on {self._model_path} is not running.")
        return self._process

    async def _answer(self, call: Coroutine[Any, Any, T]) -> T:
        """What SGLang answers to `call`. Raises RunError once one of its processes is gone."""
        if self._liveness is None:
            raise RunError(f"The engine on {self._model_path} is not running.")
        return await self._liveness.guard(call)

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
        backend = config.attention_backend
        if self._device is Device.cpu:
            arguments["device"] = "cpu"
            backend = "torch_native" if backend == "auto" else backend
        if backend != "auto":
            arguments["attention_backend"] = backend
        return arguments

    async def _verify(self, update: _Update) -> None:
        """Compare the hashes that the engine reports with those of what was received."""
        answer, reported = await self._answer(self._sglang.checksums())
        self._require(answer)
        wrong = update.held.mismatches(reported)
        if wrong:
            self._refuse(
                f"{len(wrong)} of its tensors are not what was sent, first {wrong[0]}; "
                f"version {update.version} is not used"
            )

    def _running_update(self) -> _Update:
        if self._update is None:
            raise RunError(self._refusal or "Weights came to an engine that was not told of an update.")
        return self._update

    def _require(self, answer: Answer) -> None:
        """Refuse unless SGLang's (success, message) is a success."""
        success, message = answer
        if not success:
            self._refuse(message)

    def _refuse(self, reason: str) -> None:
        """Fail the update: waiting generations, and what else comes of it, end with the reason."""
        self._update = None
        self._refusal = f"The engine on {self._model_path} refused a weight update: {reason}."
        self._open.set()
        raise RunError(self._refusal)

    def _enter(self) -> None:
        if self._idle.is_set():
            self._idle.clear()
            self._busy_since = perf_counter()
        self._running += 1

    def _leave(self) -> None:
        self._running -= 1
        if self._running == 0:
            self.counts.busy_s += perf_counter() - self._busy_since
            self._idle.set()

    def _count(self, generation: Generation, prompt_tokens: int) -> Generation:
        self.counts.requests += 1
        self.counts.aborted += generation.finish == "abort"
        self.counts.prompt_tokens += prompt_tokens
        self.counts.cached_tokens += generation.cached_tokens
        self.counts.generated_tokens += len(generation.token_ids)
        return generation


def _layout(model: PretrainedConfig, config: EngineConfig) -> Layout:
    return Layout(
        tp=config.tp,
        kv_heads=model.num_key_value_heads,
        tied=model.tie_word_embeddings,
        dtype=getattr(torch, config.dtype.value),
    )


def _sampling_params(sampling: TurnSampling, eos_id: int) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "stop": list(sampling.stop),
        "no_stop_trim": True,
        "stop_token_ids": [eos_id],
        "spaces_between_special_tokens": False,
    }


def _as_generation(output: dict[str, Any]) -> Generation:
    meta = output["meta_info"]
    logprobs = meta["output_token_logprobs"]
    return Generation(
        token_ids=[token for _, token, _ in logprobs],
        logprobs=[logprob for logprob, _, _ in logprobs],
        finish=meta["finish_reason"]["type"],
        cached_tokens=meta["cached_tokens"],
        version=int(meta["weight_version"]),
    )


def _kill_children_except(before: set[int]) -> None:
    """End the processes that a failed start has left, so that the start returns."""
    for child in psutil.Process().children(recursive=True):
        if child.pid not in before:
            child.kill()
