"""Checkpoints between Megatron (torch_dist) and Hugging Face, in one process, bit for bit.

Both directions build the model whole and go through the map that loading and live synchronisation use.
Neither overwrites anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlsys.checkpoint import sharded
from rlsys.config.schema import Device, Dtype, Layers, ModelConfig, ParallelConfig
from rlsys.errors import UserError
from rlsys.megatron import parallel as groups
from rlsys.megatron.model import PolicyModel
from rlsys.weights.families import read_architecture
from rlsys.weights.hf_io import SHARD_BYTES, HfReader, write_hf

_TIMEOUT_S = 600.0


def megatron_to_hf(
    checkpoint: str | Path, out: str | Path, original: str | Path, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write the weights of a Megatron checkpoint as the new Hugging Face folder `out`.

    `original` is the Hugging Face folder that training started from; its config and tokenizer are
    copied. The checkpoint may have been saved under any TP, PP and DP. Raises UserError.
    """
    dtype = Dtype(sharded.read_about(checkpoint)["dtype"])
    with _whole_model(original, dtype) as model:
        model.load_checkpoint(checkpoint)
        names = [name for run in model.export_plan(shard_bytes) for name in run]
        write_hf(model.whole_tensors(names), out, original, shard_bytes)


def hf_to_megatron(source: str | Path, out: str | Path) -> None:
    """Write a Hugging Face folder as a Megatron checkpoint of weights alone, at step 0.

    An actor that loads it starts training with a new optimiser. Raises UserError.
    """
    dtype = _dtype_of(source)
    with _whole_model(source, dtype) as model:
        model.load_hf(source)
        about: dict[str, Any] = {"step": 0, "optimizer": False, "dtype": dtype.value, "extra": {}}
        sharded.save(out, {"model": model.sharded_state()}, about)


@contextmanager
def _whole_model(hf: str | Path, dtype: Dtype) -> Iterator[PolicyModel]:
    """A model on one device, in a group of this process alone."""
    architecture = read_architecture(hf)
    device = Device.gpu if torch.cuda.is_available() else Device.cpu
    # Port 0: a group of one listens wherever there is room.
    alone = groups.Rendezvous(0, 1, "127.0.0.1", 0, device, _TIMEOUT_S)
    place = groups.start(alone, ParallelConfig(), seed=0)
    try:
        yield PolicyModel(architecture, ModelConfig(str(hf), Layers.auto, dtype), ParallelConfig(), place)
    finally:
        groups.stop()


def _dtype_of(source: str | Path) -> Dtype:
    reader = HfReader(source)
    found = {str(reader.get(name).dtype).removeprefix("torch.") for name in sorted(reader.names())}
    if len(found) != 1 or not found <= {dtype.value for dtype in Dtype}:
        raise UserError(
            f"{source} holds tensors of {', '.join(sorted(found))}; give one with float32 or bfloat16 alone."
        )
    return Dtype(found.pop())
