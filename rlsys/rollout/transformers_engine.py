"""Runs plain transformers in a process of its own as a rollout engine: slow, exact, and for every causal model.

The model is in a child process (transformers_process.py), so that a forward pass does not block this event loop. A thread
sends messages in order, so that the loop never waits for a full pipe, and another one receives them. If the child dies,
`EngineDriver` notices: it watches `processes`. If this process dies, the child ends by itself.
"""

from __future__ import annotations

import asyncio
import itertools
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

from rlsys.config.schema import Device
from rlsys.errors import RunError
from rlsys.rollout.agent.recorder import Generation, OnTokens, TurnSampling
from rlsys.rollout.interface import EngineCapabilities, EngineError, EngineSetup, RolloutEngine
from rlsys.search.server_process import child_with_pipe

if TYPE_CHECKING:
    import psutil

    from rlsys.rollout.transformers_process import DecoderSpec
    from rlsys.weights.bucket import Bucket

_JOIN_S = 5.0
"""Time for the child to end by itself before it is killed."""
_READY = "ready"
"""Call that the child answers once the model is loaded."""


class TransformersEngine(RolloutEngine):
    """A Hugging Face model in a child process, on one device."""

    capabilities = EngineCapabilities(
        max_tp={Device.cpu: 1, Device.gpu: 1}, continues=True, frees_memory=True, returns_routes=True
    )
    program = "rlsys.rollout.transformers_process"
    """Module that the child process runs."""

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        self._config = setup.config
        self._process: subprocess.Popen[bytes] | None = None
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._calls: dict[str, asyncio.Future[Any]] = {}
        """Id of a request or call -> its result."""
        self._listeners: dict[str, OnTokens] = {}
        self._numbers = itertools.count()
        self._messages = 0
        """Number of messages from the child; it sends one for each token of a batch."""
        self._version = 0
        """Version of the open update."""

    async def start(self) -> None:
        """Start the child and load the model. Raises the child's UserError for a folder without a complete model."""
        from rlsys.rollout.transformers_process import DecoderSpec

        setup = self.setup
        spec = DecoderSpec(
            setup.model_path,
            self._config.dtype.value,
            "cuda:0" if setup.device is Device.gpu else "cpu",
            self._config.max_running,
            setup.seed,
            setup.eos_id,
            setup.frees_memory,
            setup.architecture.layers if setup.architecture and setup.returns_routes else 0,
        )
        self._calls[_READY] = asyncio.get_running_loop().create_future()
        self._launch(spec)
        await self._calls[_READY]

    def processes(self) -> Sequence[psutil.Process]:
        """Return the child."""
        import psutil

        return [psutil.Process(self._child.pid)]

    def progress(self) -> float:
        """Return the number of messages from the child."""
        return float(self._messages)

    async def generate(
        self, input_ids: list[int], sampling: TurnSampling, rid: str, on_tokens: OnTokens | None = None
    ) -> Generation:
        """Continue `input_ids`; its draws depend on the seed, the version and `rid`, not on other requests."""
        if on_tokens is not None:
            self._listeners[rid] = on_tokens
        try:
            generation: Generation = await self._ask("generate", input_ids, sampling, on_tokens is not None, key=rid)
        except asyncio.CancelledError:
            self._outbox.put(("abort", rid))
            raise
        finally:
            self._listeners.pop(rid, None)
        return generation

    def abort_all(self) -> None:
        """End all requests."""
        self._outbox.put(("abort_all", ""))

    async def pause(self) -> None:
        """Stop after the current token."""
        await self._ask("pause")

    async def resume(self) -> None:
        """Continue; after an update, the KV cache of requests in flight is computed anew."""
        await self._ask("resume")

    async def begin_update(self, version: int) -> None:
        """Drop the KV cache."""
        self._version = version
        await self._ask("begin_update")

    async def load_bucket(self, bucket: Bucket) -> None:
        """Copy a bucket to the child and from there into the model."""
        import torch

        on_device = isinstance(bucket.data, torch.Tensor)
        data = (await asyncio.to_thread(bucket.flat.cpu)).numpy()
        await self._ask("load_bucket", bucket.records, on_device, data=data)

    async def finish_update(self) -> None:
        """Sample under the new version from the next token on."""
        await self._ask("finish_update", self._version)

    async def hashes(self) -> list[dict[str, str]]:
        """Return the checksums of the model's tensors, by their names in a checkpoint."""
        return [await self._ask("hashes")]

    async def sleep(self) -> None:
        """Drop the KV cache, and move the model to host memory if the GPU's memory shall be freed."""
        await self._ask("sleep")

    async def wake(self) -> None:
        """Move the model back."""
        await self._ask("wake")

    def stop(self) -> None:
        """End the child; kill it if it does not end in time."""
        process, self._process = self._process, None
        if process is None:
            return
        self._outbox.put(None)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_JOIN_S)
        process.kill()
        process.wait()

    @property
    def _child(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RunError(f"The engine on {self.setup.model_path} is not running.")
        return self._process

    def _launch(self, spec: DecoderSpec) -> None:
        self._process, pipe = child_with_pipe(self.program)
        self._outbox.put(spec)
        Thread(target=_send, args=(pipe, self._outbox), daemon=True).start()
        Thread(target=self._receive, args=(pipe, asyncio.get_running_loop()), daemon=True).start()

    async def _ask(self, call: str, *arguments: Any, key: str = "", data: Any = None) -> Any:
        """Send a call and return its answer; `data` are bytes that follow it. Raises EngineError with the child's reason."""
        self._child  # noqa: B018 (raises without a child)
        key = key or f"{call} {next(self._numbers)}"
        answer = self._calls[key] = asyncio.get_running_loop().create_future()
        self._outbox.put((call, key, *arguments))
        if data is not None:
            self._outbox.put(data)
        try:
            return await answer
        finally:
            self._calls.pop(key, None)

    def _receive(self, pipe: Connection, loop: asyncio.AbstractEventLoop) -> None:
        """Pass the child's messages to the event loop until the child ends; runs in a thread."""
        with suppress(RuntimeError):  # The loop may be closed.
            while True:
                try:
                    message = pipe.recv()
                except (EOFError, OSError):
                    loop.call_soon_threadsafe(self._ended)
                    return
                loop.call_soon_threadsafe(self._take, *message)

    def _take(self, kind: str, key: str, value: Any) -> None:
        self._messages += 1
        call = self._calls.get(key)
        if kind == "tokens":
            if key in self._listeners:
                self._listeners[key](value)
        elif call is None or call.done():  # The caller has left.
            return
        elif kind == "answer":
            call.set_result(value)
        else:
            call.set_exception(value if isinstance(value, Exception) else EngineError(value))

    def _ended(self) -> None:
        """Fail a start in progress; otherwise the death of the process says it all."""
        ready = self._calls.get(_READY)
        if ready is not None and not ready.done():
            code = self._process.wait() if self._process is not None else None
            ready.set_exception(RunError(f"its process ended with exit code {code}; its log has the reason"))


def _send(pipe: Connection, outbox: SimpleQueue[Any]) -> None:
    """Send messages in order, bytes as they are, until one is None or the child has ended; runs in a thread."""
    with suppress(OSError):
        while (message := outbox.get()) is not None:
            if hasattr(message, "nbytes"):
                pipe.send_bytes(message)
            else:
                pipe.send(message)
