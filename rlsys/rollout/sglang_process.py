"""Wraps SGLang's engine object. Import this module only after `sglang_cpu.prepare`.

The engine object offers weight updates only as blocking calls that run an event loop, which fails inside a running
loop. This module instead awaits the underlying coroutines of the engine's tokenizer manager.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    CheckWeightsReqInput,
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

from rlsys.files import remove_shared_memory
from rlsys.rollout import sglang_cpu, sglang_entry
from rlsys.rollout.memory_saver import start_variables
from rlsys.weights.bucket import Bucket
from rlsys.weights.sockets import INTERFACE_VARIABLES, environment_variables, listener

# SGLang's modules make uvloop's policy that of the process. Under it, a loop of asyncio cannot start programs, such as
# agents and MCP servers.
asyncio.set_event_loop_policy(None)

_LOGGING = Path(__file__).with_name("sglang_logging.json")
"""Log settings of SGLang in this process and in SGLang's own processes, whatever `log_level` says.

Without these settings, SGLang removes the handlers of this process's root logger and silences warnings of all other
loggers.
"""
_HERE = "127.0.0.1"
Answer = tuple[bool, str]
"""(True, any text) for a success; (False, reason) for a failure."""


class _Engine(Engine):
    """SGLang's engine, with the main functions of `sglang_entry`."""

    run_scheduler_process_func = staticmethod(sglang_entry.scheduler)
    run_detokenizer_process_func = staticmethod(sglang_entry.detokenizer)


class _ForkedEngine(_Engine):
    """SGLang's engine on CPUs, whose processes are forked from one that has imported SGLang (`sglang_cpu`).

    On GPUs they need variables of their own from their first instruction, such as LD_PRELOAD.
    """

    @classmethod
    def _launch_scheduler_processes(
        cls, server_args: Any, port_args: Any, run_scheduler_process_func: Callable[..., None], **kwargs: Any
    ) -> Any:
        with _forked(run_scheduler_process_func) as main:
            return super()._launch_scheduler_processes(server_args, port_args, main, **kwargs)

    @classmethod
    def _launch_detokenizer_subprocesses(
        cls, server_args: Any, port_args: Any, run_detokenizer_process_func: Callable[..., None]
    ) -> Any:
        with _forked(run_detokenizer_process_func) as main:
            return super()._launch_detokenizer_subprocesses(server_args, port_args, main)


@contextmanager
def _forked(main: Callable[..., None]) -> Iterator[Callable[..., None]]:
    """Let multiprocessing fork in the body, and yield `main` with this process's environment."""
    sglang_cpu.start_fork_server()  # Starts another one if the first one has died.
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        yield partial(sglang_entry.in_environment, dict(os.environ), main)
    finally:
        multiprocessing.set_start_method("spawn", force=True)  # As SGLang has set it.


class SglangProcess:
    """A running SGLang engine. The constructor blocks until the model is loaded."""

    def __init__(self, arguments: dict[str, Any], on_cpu: bool) -> None:
        os.environ.setdefault("SGLANG_LOGGING_CONFIG_PATH", str(_LOGGING))
        # An engine's ranks are on one machine, but SGLang's own store would listen on all interfaces.
        descriptor, port = listener(_HERE, 0)
        self._store = dist.TCPStore(_HERE, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
        variables = {
            "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": "env://",
            "MASTER_ADDR": _HERE,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **dict(zip(INTERFACE_VARIABLES, ("lo", "=lo"), strict=True)),
        }
        if arguments.get("enable_memory_saver"):
            variables |= start_variables()
        with environment_variables(variables):
            self.engine = (_ForkedEngine if on_cpu else _Engine)(**arguments)
        self._manager = self.engine.tokenizer_manager
        ranks = range(arguments["tp_size"])
        self._devices = [torch.device("cpu") if on_cpu else torch.device("cuda", rank) for rank in ranks]
        """Device of each tensor-parallel rank."""

    def processes(self) -> list[psutil.Process]:
        """Return the schedulers and detokenizers, whose death ends generation. Raises psutil.NoSuchProcess if one is gone.

        Their helpers exit by themselves: torch.compile's pool after a minute without work.
        """
        return [psutil.Process(pid) for pid in self.engine.get_all_child_pids()]

    @property
    def last_message_s(self) -> float:
        """Time of the last message from SGLang's processes, in seconds since the epoch."""
        return float(self._manager.last_receive_tstamp)

    async def freeze_gc(self) -> None:
        """Exclude the objects loaded at the start from garbage collection, here and in the children.

        SGLang collects garbage each time it empties the prefix cache, and the collection would visit all objects.
        """
        await self._manager.freeze_gc()

    def abort_all(self) -> None:
        """Abort all requests; each returns its tokens so far."""
        self._manager.abort_request(abort_all=True)

    async def pause(self) -> None:
        """Pause generation: requests in flight lose their place in the KV cache and keep their tokens."""
        await self._manager.pause_generation(PauseGenerationReqInput(mode="retract"))

    async def resume(self) -> None:
        """Resume after `pause`; the KV cache of requests in flight is recomputed."""
        await self._manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    async def begin_update(self) -> Answer:
        """Open a weight update."""
        return await self._manager.begin_weight_update(BeginWeightUpdateReqInput())

    async def load_bucket(self, bucket: Bucket, version: int) -> Answer:
        """Load the tensors of a bucket on every tensor-parallel rank.

        The bucket is copied in a thread, so that this process answers other calls meanwhile.
        """
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=await asyncio.to_thread(_serialize, bucket, self._devices),
            load_format="flattened_bucket",
            flush_cache=False,
            weight_version=str(version),
        )
        return await self._manager.update_weights_from_tensor(request)

    async def end_update(self) -> Answer:
        """Close the update and empty the prefix cache, which holds states of the old weights. Call after `pause`."""
        success, message = await self._manager.end_weight_update(EndWeightUpdateReqInput())
        # With a timeout, SGLang would wait for the paused requests, which count as running.
        return await self._empty_cache(timeout_s=0.0) if success else (False, message)

    async def sleep(self, flush_timeout_s: float) -> Answer:
        """Empty the prefix cache. If SGLang runs with its memory saver, also free device memory.

        Waits up to `flush_timeout_s` for aborted requests to leave: SGLang crashes if a request is left when it sleeps.
        """
        emptied = await self._empty_cache(flush_timeout_s)
        if emptied[0]:
            await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput())
        return emptied

    async def wake(self) -> None:
        """Allocate device memory again and restore the weights."""
        await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput())

    async def checksums(self) -> tuple[Answer, list[dict[str, str]]]:
        """Return success, and for each rank tensor name -> hash, from SGLang's weight checker."""
        request = CheckWeightsReqInput(action="checksum")
        success, message, ranks, _ = await self._manager.check_weights(request)
        return (success, message), [rank["checksums"] for rank in ranks or []]

    async def _empty_cache(self, timeout_s: float) -> Answer:
        emptied = await self._manager.flush_cache(timeout_s=timeout_s)
        return emptied.success, f"the prefix cache was not emptied: {emptied.message}"

    def shutdown(self) -> None:
        """Stop SGLang's processes and all other children of this process; blocks until they are gone."""
        self.engine.shutdown()
        # SGLang kills its processes without joining them; active_children joins all dead children.
        multiprocessing.active_children()
        remove_shared_memory(Path(tempfile.gettempdir()), os.getpid())


def gpu_hash(parts: Sequence[torch.Tensor]) -> str:
    """Return SGLang's hash of a tensor on a GPU, computed with SGLang's own kernel."""
    from sglang.kernels.ops.memory.gpu_tensor_hash import gpu_tensor_hash

    whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    return f"{gpu_tensor_hash(whole.cuda()):016x}"


def _serialize(bucket: Bucket, devices: Sequence[torch.device]) -> list[bytes]:
    """Return a bucket as SGLang's flattened bucket for each rank, on the rank's device of `devices`.

    On a CPU, the first serialisation copies the tensor to shared memory, and the others refer to this copy. On GPUs, each
    is a handle to a copy on the rank's own device, which torch frees when the rank has released it; a bucket that is
    there already is not copied. A rank that read another device's memory would write its weights from that device, which
    may not access them under SGLang's memory saver (sglang#12664).
    """
    metadata = [
        FlattenedTensorMetadata(
            name=record.name,
            shape=torch.Size(record.shape),
            dtype=getattr(torch, record.dtype),
            start_idx=record.offset,
            end_idx=record.offset + record.nbytes,
            numel=record.nbytes,
        )
        for record in bucket.records
    ]
    flat = bucket.flat
    return [
        MultiprocessingSerializer.serialize({"flattened_tensor": flat.to(device), "metadata": metadata})
        for device in devices
    ]
