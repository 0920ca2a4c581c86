"""The calls into SGLang, and nothing else. Import it only after `sglang_cpu.prepare`.

SGLang's engine object offers weight updates only as blocking calls that run an event loop of their own,
which a running loop refuses. The coroutines behind them, on its tokenizer manager, are awaited instead.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import torch
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    CheckWeightsReqInput,
    EndWeightUpdateReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

from rlsys.rollout import sglang_cpu
from rlsys.weights.buckets import Bucket

Answer = tuple[bool, str]
"""Success and, without it, why."""


class _CpuEngine(Engine):
    """SGLang's engine with the scheduler process that a CPU needs; a hook that its class offers."""

    run_scheduler_process_func = staticmethod(sglang_cpu.scheduler_entry)


class SglangProcess:
    """A running SGLang engine. The constructor blocks until the model is loaded."""

    def __init__(self, arguments: dict[str, Any], on_cpu: bool) -> None:
        self._engine = (_CpuEngine if on_cpu else Engine)(**arguments)
        self._manager = self._engine.tokenizer_manager

    async def freeze_gc(self) -> None:
        """Take what was loaded at the start out of garbage collection, here and in the children.

        SGLang collects each time it empties the prefix cache, and that walks all objects.
        """
        await self._manager.freeze_gc()

    async def generate(self, input_ids: list[int], sampling: dict[str, Any], rid: str) -> dict[str, Any]:
        """SGLang's answer for one request, log-probs of the output included."""
        output: dict[str, Any] = await self._engine.async_generate(
            input_ids=input_ids, sampling_params=sampling, return_logprob=True, rid=rid
        )
        return output

    def running(self) -> list[str]:
        """Ids of the requests under way."""
        return list(self._manager.rid_to_state)

    def abort(self, rid: str) -> None:
        """End one request; it returns what it has."""
        self._manager.abort_request(rid)

    async def begin_update(self) -> Answer:
        """Open a weight update."""
        answer: Answer = await self._manager.begin_weight_update(BeginWeightUpdateReqInput())
        return answer

    async def load_bucket(self, bucket: Bucket, version: int, ranks: int) -> Answer:
        """Load the tensors of a bucket on every tensor-parallel rank."""
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[_serialize(bucket) for _ in range(ranks)],
            load_format="flattened_bucket",
            flush_cache=False,
            weight_version=str(version),
        )
        answer: Answer = await self._manager.update_weights_from_tensor(request)
        return answer

    async def end_update(self, flush_timeout_s: float) -> Answer:
        """Close the update and empty the prefix cache, which speaks of the old weights."""
        success, message = await self._manager.end_weight_update(EndWeightUpdateReqInput())
        if not success:
            return False, message
        flushed = await self._manager.flush_cache(timeout_s=flush_timeout_s)
        return flushed.success, f"the prefix cache was not emptied: {flushed.message}"

    async def checksums(self) -> tuple[Answer, list[dict[str, str]]]:
        """Each rank's tensor names and hashes, by SGLang's own weight checker."""
        request = CheckWeightsReqInput(action="checksum")
        success, message, ranks, _ = await self._manager.check_weights(request)
        return (success, message), [rank["checksums"] for rank in ranks or []]

    def shutdown(self) -> None:
        """End SGLang's processes, and all other children of this process; blocks until they are gone."""
        self._engine.shutdown()
        # SGLang kills and does not join; asking for the living joins the dead.
        multiprocessing.active_children()


def gpu_hash(tensor: torch.Tensor) -> str:
    """SGLang's hash of a tensor on a GPU: its kernel, run here over the tensor that was received."""
    from sglang.kernels.ops.memory.gpu_tensor_hash import gpu_tensor_hash

    return f"{gpu_tensor_hash(tensor.cuda()):016x}"


def _serialize(bucket: Bucket) -> bytes:
    """A bucket as SGLang's flattened bucket: one tensor in shared memory, and where each name lies."""
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
    # The copy makes read-only memory, as an object store hands it out, fit to be shared.
    payload = {"flattened_tensor": torch.from_numpy(bucket.data.copy()), "metadata": metadata}
    serialized: bytes = MultiprocessingSerializer.serialize(payload)
    return serialized
