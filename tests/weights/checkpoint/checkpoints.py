"""Small distributed checkpoints, what they hold, and objects that run something where a pickle is trusted."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsys.config.schema import ParallelConfig
from rlsys.weights.checkpoint.megatron_reader import MegatronCheckpoint
from rlsys.weights.checkpoint.store import About
from rlsys.weights.checkpoint.torch_dist_writer import TorchDistWriter
from rlsys.weights.hf_io import HfReader
from rlsys.weights.weight_map import Entry, WeightMap, read_architecture


def write(
    folder: Path,
    hf: Path,
    parallel: ParallelConfig | None = None,
    dtype: torch.dtype = torch.float32,
    file_bytes: int = 1 << 30,
    order: Callable[[list[Any]], list[Any]] = lambda jobs: jobs,
) -> TorchDistWriter:
    """Write a model's weights as a distributed checkpoint."""
    reader, weights = HfReader(hf), WeightMap(read_architecture(hf))

    def parts_of(entry: Entry) -> Sequence[Tensor]:
        return [reader.get(name).to(dtype) for name in entry.hf]

    writer = TorchDistWriter(weights, lambda _: dtype, parallel or ParallelConfig(), file_bytes)
    receipts = [writer.write(folder, job, parts_of) for job in order(writer.files)]
    writer.finish(folder, json.loads(json.dumps(receipts)), About(step=5))
    return writer


def read(checkpoint: MegatronCheckpoint, hf: Path) -> dict[str, Tensor]:
    """All Hugging Face tensors of a checkpoint of that model."""
    weights = WeightMap(read_architecture(hf))
    checkpoint.check(weights)
    return {name: part for entry in weights.entries() for name, part in checkpoint.parts(entry, weights)}


def assert_holds(checkpoint: MegatronCheckpoint, hf: Path) -> None:
    """Assert that a checkpoint is that model, bit for bit."""
    found, expected = read(checkpoint, hf), HfReader(hf)
    assert found.keys() == expected.names()
    assert [name for name, part in found.items() if not torch.equal(part, expected.get(name))] == []
    weights = WeightMap(read_architecture(hf))
    assert {checkpoint.dtype(entry) for entry in weights.entries()} == {part.dtype for part in found.values()}


class Evil:
    """Makes a folder where its pickle is read with trust."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)
