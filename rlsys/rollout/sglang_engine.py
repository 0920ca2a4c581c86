"""Runs SGLang as a rollout engine.

SGLang itself is imported on `start` (sglang_process.py), and torch when it is first needed: a plan asks this module for
the engine's memory. SGLang signals SIGQUIT to the parent of its processes when one of them fails, which is this process, or
on CPUs their template. It kills every child of this process on shutdown: give an engine a process of its own.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import AsyncIterable, Awaitable, Sequence
from dataclasses import asdict, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from rlsys.components import one_line
from rlsys.config.algorithm import RouterReplay
from rlsys.config.schema import Device, Dtype, RunConfig, SglangConfig
from rlsys.data.trajectory import Routes, routes_type
from rlsys.errors import RunError
from rlsys.rollout.agent.recorder import Generation, OnTokens, TurnSampling
from rlsys.rollout.interface import ANY, EngineCapabilities, EngineError, EngineSetup, RolloutEngine

if TYPE_CHECKING:
    import psutil

    from rlsys.rollout.sglang_process import Answer, SglangProcess
    from rlsys.rollout.sglang_weights import SglangWeights
    from rlsys.weights.bucket import Bucket
    from rlsys.weights.weight_map import Architecture

FLUSH_TIMEOUT_S = 30.0
"""Maximum time for aborted requests to leave SGLang's scheduler before the engine sleeps."""
PREFILL_TOKENS = 8192
"""Tokens that an engine prefills at a time on a GPU of 60 to 160 GB (SGLang's `chunked_prefill_size`)."""
_GIB = 1024**3
_GRAPH_BYTES = 2 * 1024**2
"""CUDA graphs for each request of the largest decode batch, as SGLang 0.5.21 reserves for them
(`reserve_for_graph_mb`)."""


class SglangEngine(RolloutEngine):
    capabilities = EngineCapabilities(
        max_tp={Device.cpu: 1, Device.gpu: ANY},
        continues=True,
        frees_memory=True,
        returns_routes=True,
        reserved_tokens=6,  # SGLang 0.5.21 takes inputs below `max_req_input_len`, which is the context less 6.
    )
    packages = ("sglang",)
    _config: SglangConfig

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        assert isinstance(setup.config, SglangConfig)
        self._config = setup.config
        self._has_experts = any(getattr(setup.model, name, 0) for name in ("num_experts", "n_routed_experts"))
        self._process: SglangProcess | None = None
        self._version = 0
        """Version of the open update."""
        self._session_open = False

    @classmethod
    def cache_tokens(cls, config: RunConfig, weights: float, token: float) -> float:
        """Return what `memory_fraction` leaves beside the weights; on devices of unknown memory, one episode."""
        engine, memory_gib = config.rollout.engine, config.cluster.device_memory_gib
        assert isinstance(engine, SglangConfig)
        if engine.kv_cache_tokens is not None or memory_gib is None:
            return engine.kv_cache_tokens or config.task.max_total_tokens
        return max(0.0, engine.memory_fraction * memory_gib * _GIB - weights) / token

    @classmethod
    def memory_beside_cache(cls, config: RunConfig, model: Architecture) -> float:
        """Return the bytes of activations and routes of one prefill, and of the logits of one decode step."""
        engine = config.rollout.engine
        assert isinstance(engine, SglangConfig)
        item = 2 if engine.dtype is Dtype.bfloat16 else 4
        # The residual stream, its norm, queries and output; gate, up and their product for each copy of a token.
        copies, width = (model.experts_per_token, model.expert_ffn) if model.experts else (1, model.ffn)
        of_token = 4 * model.hidden + copies * (3 * width / engine.tp + (model.hidden if model.experts else 0))
        # Logits in the model's dtype, and float32 copies for sampling and for log-probs.
        logits = engine.max_running * model.vocab * (item + 4 + 4)
        replays = config.algorithm.router_replay is RouterReplay.r3
        routes = 4 * PREFILL_TOKENS * model.layers * model.experts_per_token if replays else 0
        return PREFILL_TOKENS * of_token * item + logits + routes

    @classmethod
    def graph_memory(cls, config: RunConfig) -> float:
        """Return the bytes of CUDA graphs, which SGLang's memory saver leaves on the device."""
        engine = config.rollout.engine
        assert isinstance(engine, SglangConfig)
        return engine.max_running * _GRAPH_BYTES if engine.cuda_graphs else 0.0

    @classmethod
    def memory_fix(cls, config: SglangConfig) -> str:
        """Return the setting that lowers the engine's memory."""
        return f"lower rollout.engine.memory_fraction={config.memory_fraction:g}"

    @property
    def max_context(self) -> int | None:
        """Maximum number of tokens of a request: what the KV cache holds."""
        return self._config.kv_cache_tokens

    async def start(self) -> None:
        """Start SGLang's processes and load the model."""
        from rlsys.rollout import sglang_cpu

        sglang_cpu.prepare(self.setup.device)
        if self.setup.device is Device.cpu:
            sglang_cpu.start_fork_server()
        self._process = await asyncio.to_thread(self._launch)
        await self._process.freeze_gc()

    def processes(self) -> Sequence[psutil.Process]:
        """Return the schedulers and detokenizers; a helper may exit."""
        return self._sglang.processes()

    def progress(self) -> float:
        """Return the time of SGLang's last message; a request in flight sends one for every 50 tokens at least."""
        return self._sglang.last_message_s

    async def generate(
        self, input_ids: list[int], sampling: TurnSampling, rid: str, on_tokens: OnTokens | None = None
    ) -> Generation:
        """Continue `input_ids`; SGLang aborts the request on cancellation. Raises EngineError if SGLang rejects it."""
        params = sampling_params(sampling, self.setup.eos_id)
        call = self._sglang.engine.async_generate(
            input_ids=input_ids,
            sampling_params=params,
            return_logprob=True,
            rid=rid,
            stream=on_tokens is not None,
            return_routed_experts=sampling.routes_from is not None,
            routed_experts_start_len=sampling.routes_from or 0,
        )
        try:
            output = await (read_stream(call, on_tokens) if on_tokens else call)
        except ValueError as error:  # SGLang's own, for an input or sampling that it does not take.
            raise EngineError(one_line(error)) from error
        generation, first = as_generation(output), sampling.routes_from
        if first is None:
            return generation
        return replace(generation, routes=self._routes(output, len(input_ids) + len(generation.token_ids) - 1 - first))

    def abort_all(self) -> None:
        self._sglang.abort_all()

    async def pause(self) -> None:
        """Pause generation: requests in flight lose their place in the KV cache and keep their tokens."""
        await self._sglang.pause()

    async def resume(self) -> None:
        """Resume generation; the KV cache of requests in flight is recomputed."""
        await self._sglang.resume()

    def weight_check(self) -> SglangWeights:
        """Return a check that fuses, cuts and pads tensors as SGLang does."""
        import torch

        from rlsys.rollout.sglang_weights import CPU_WIDTH_PADDING, Layout, SglangWeights, sha256_prefix
        from rlsys.weights.weight_map import WeightMap, read_architecture

        hasher, setup, on_cpu = sha256_prefix, self.setup, self.setup.device is Device.cpu
        if not on_cpu:
            from rlsys.rollout.sglang_process import gpu_hash as hasher
        layout = Layout(
            tp=self._config.tp,
            dtype=getattr(torch, self._config.dtype.value),
            width_padding=CPU_WIDTH_PADDING if on_cpu else 1,
        )
        architecture = setup.architecture or read_architecture(setup.model_path, weights_only=True)
        return SglangWeights(WeightMap(architecture), layout, hasher)

    async def begin_update(self, version: int) -> None:
        """Open SGLang's session for an update; a failed update leaves it open."""
        self._version = version
        if not self._session_open:
            _require(await self._sglang.begin_update())
            self._session_open = True

    async def load_bucket(self, bucket: Bucket) -> None:
        """Load a bucket on every tensor-parallel rank."""
        _require(await self._sglang.load_bucket(bucket, self._version))

    async def finish_update(self) -> None:
        """Close the session and empty the prefix cache."""
        _require(await self._sglang.end_update())
        self._session_open = False

    async def hashes(self) -> list[dict[str, str]]:
        """Return the hashes of SGLang's weight checker."""
        answer, reported = await self._sglang.checksums()
        _require(answer)
        return reported

    async def sleep(self) -> None:
        """Empty the prefix cache; with SGLang's memory saver, move the weights to host memory."""
        _require(await self._sglang.sleep(FLUSH_TIMEOUT_S))

    async def wake(self) -> None:
        """Restore the weights."""
        await self._sglang.wake()

    def stop(self) -> None:
        """Stop SGLang's processes and all other children of this process."""
        process, self._process = self._process, None
        if process is not None:
            process.shutdown()

    def _routes(self, output: dict[str, Any], tokens: int) -> Routes | None:
        """Return the routes of `tokens` tokens in an output; None if an aborted request lacks some. Raises RunError."""
        meta, model = output["meta_info"], self.setup.architecture
        assert model is not None
        shape = tokens, model.layers, model.experts_per_token
        found = np.frombuffer(b64decode(meta.get("routed_experts") or ""), np.int32)
        if found.size != prod(shape):
            if meta["finish_reason"]["type"] == "abort":
                return None
            raise RunError(f"SGLang reported {found.size} experts instead of {prod(shape)} for request {meta['id']}.")
        return found.reshape(shape).astype(routes_type(model.experts))

    @property
    def _sglang(self) -> SglangProcess:
        if self._process is None:
            raise RunError(f"The engine on {self.setup.model_path} is not running.")
        return self._process

    def _launch(self) -> SglangProcess:
        """Blocking part of `start`; runs in a thread."""
        # SGLang may be imported only now, after `prepare`.
        from rlsys.rollout.sglang_process import SglangProcess

        return SglangProcess(self._arguments(), on_cpu=self.setup.device is Device.cpu)

    def _arguments(self) -> dict[str, Any]:
        """Return SGLang's server arguments."""
        setup = self.setup
        config = self._config
        arguments: dict[str, Any] = {
            "model_path": setup.model_path,
            "tp_size": config.tp,
            "dtype": config.dtype.value,
            "mem_fraction_static": config.memory_fraction,
            "max_total_tokens": config.kv_cache_tokens,
            "max_running_requests": config.max_running,
            "random_seed": setup.seed,
            "weight_version": "0",
            "grammar_backend": "none",
            "log_level": "error",
        }
        if setup.returns_routes:
            arguments["enable_return_routed_experts"] = True
        if setup.frees_memory:
            # The weights move to host memory; the trainer's state there is much larger.
            arguments |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
        backend = config.attention_backend
        if setup.device is Device.cpu:
            arguments["device"] = "cpu"
            # Otherwise SGLang's scheduler polls all the time, on a core that training could use.
            arguments["sleep_on_idle"] = True
            backend = "torch_native" if backend == "auto" else backend
        else:
            if self._has_experts:
                # On Blackwell, other kernels permute the experts' weights; `SglangWeights` does not predict that order.
                arguments["moe_runner_backend"] = "triton"
            # Later graphs of SGLang's default for prefills overwrite inputs that earlier ones read again (sglang#37606).
            arguments["cuda_graph_backend_prefill"] = "disabled"
            if config.cuda_graphs:
                # By default SGLang has graphs for up to 256 requests on 80 GB, and decodes larger batches without one.
                arguments["cuda_graph_max_bs_decode"] = config.max_running
            else:
                arguments["cuda_graph_backend_decode"] = "disabled"
        if backend != "auto":
            arguments["attention_backend"] = backend
        return arguments


def _require(answer: Answer) -> None:
    success, message = answer
    if not success:
        raise EngineError(message)


def sampling_params(sampling: TurnSampling, eos_id: int) -> dict[str, Any]:
    """Return SGLang's parameters for a turn, which ends at its stop strings or `eos_id`."""
    fixed = {"no_stop_trim": True, "stop_token_ids": [eos_id], "spaces_between_special_tokens": False}
    params = {name: value for name, value in asdict(sampling).items() if name != "routes_from"}
    return {**params, "stop": list(sampling.stop), **fixed}


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
