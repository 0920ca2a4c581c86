"""Tests of what SGLang is asked for, with spies in place of its processes."""

from __future__ import annotations

from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import torch

from rlsys.config.schema import Device
from rlsys.rollout import sglang_cpu
from rlsys.weights.bucket import Bucket
from tests.support.tensors import pack, raw, some_tensors


@pytest.mark.parametrize(
    ("on_cpu", "devices"), [(True, ["cpu"]), (False, ["cuda:0"]), (False, ["cuda:0", "cuda:1", "cuda:2"])]
)
async def test_each_rank_gets_the_bucket_on_its_own_device(
    on_cpu: bool, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sglang_cpu.prepare(Device.cpu)
    from rlsys.rollout import sglang_process

    def serialize(payload: dict[str, Any]) -> Any:
        return payload["flattened_tensor"]

    monkeypatch.setattr(sglang_process, "_ForkedEngine" if on_cpu else "_Engine", Mock())
    monkeypatch.setattr(sglang_process.MultiprocessingSerializer, "serialize", serialize)
    process = sglang_process.SglangProcess({"tp_size": len(devices)}, on_cpu)
    update = process._manager.update_weights_from_tensor = AsyncMock(return_value=(True, ""))
    flat = Mock(to=lambda device: ("copy", device))
    assert await process.load_bucket(Mock(spec=Bucket, flat=flat, records=()), version=1) == (True, "")
    sent = update.call_args.args[0].serialized_named_tensors
    assert sent == [("copy", torch.device(device)) for device in devices]


def test_ranks_on_a_cpu_read_every_bit_of_a_bucket() -> None:
    sglang_cpu.prepare(Device.cpu)
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    from rlsys.rollout.sglang_process import _serialize

    sent = dict(some_tensors(version=1)[0])
    for one in _serialize(next(pack(sent.items(), 10**6)), [torch.device("cpu")] * 2):
        read = FlattenedTensorBucket(**MultiprocessingSerializer.deserialize(one)).reconstruct_tensors()
        assert {name: raw(tensor) for name, tensor in read} == {name: raw(tensor) for name, tensor in sent.items()}
