"""A Megatron checkpoint becomes a Hugging Face folder, bit for bit, one Megatron tensor at a time.

A critic, known by its value head, becomes a token classification of one label.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsys.errors import UserError
from rlsys.weights.bijection import Entry, WeightMap
from rlsys.weights.checkpoint.formats import MegatronCheckpoint, open_checkpoint
from rlsys.weights.convert.companions import adjust_config, companions, copy_companions
from rlsys.weights.convert.dtypes import cast, chosen, most, name_of
from rlsys.weights.convert.engine import Job, OnBytes, Outcome, run
from rlsys.weights.convert.fingerprint import fingerprint
from rlsys.weights.convert.source import architecture_in, is_critic, model_of
from rlsys.weights.hf_io import INDEX, TensorSpec, file_bytes, write_safetensors

SHARD_BYTES = 5 * 1000**3
"""Most bytes of one safetensors file, as Hugging Face writes them."""


def megatron_to_hf(
    checkpoint: str | Path,
    out: str | Path,
    original: str | Path | None = None,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    processes: int | None = None,
    show: OnBytes | None = None,
) -> Outcome:
    """Write the weights of a Megatron checkpoint as the new Hugging Face folder `out`.

    `original` is the Hugging Face folder that training started from: its config and tokenizer are copied, its
    weights are not needed. Without it, the checkpoint is one that `hf_to_megatron` made. The dtype of each
    tensor is kept unless one is given. See `engine.run` for `processes`, `show` and the errors.
    """
    if shard_bytes < 1:
        raise UserError(f"shard_bytes is {shard_bytes}; give 1 or more.")
    opened = open_checkpoint(checkpoint)
    model = model_of(opened.folder, original)
    values = is_critic(opened)
    weights = WeightMap(architecture_in(model), values=values)
    opened.check(weights)
    opened.check_copies(weights)
    return run(ToHf(opened, weights, values, model, chosen(dtype), shard_bytes), Path(out), processes, show)


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file."""

    name: str
    entries: tuple[Entry, ...]
    """In the order in which they are written: that of export, larger dtypes first."""
    specs: tuple[TensorSpec, ...]
    """Of all their Hugging Face tensors, in that order."""


@dataclass(frozen=True)
class ToHf:
    """See `engine.Conversion`."""

    checkpoint: MegatronCheckpoint
    weights: WeightMap
    values: bool
    original: Path
    dtype: torch.dtype | None
    shard_bytes: int

    @cached_property
    def shards(self) -> dict[str, Shard]:
        """The files by name."""
        return {shard.name: shard for shard in self._plan()}

    def recipe(self) -> Mapping[str, Any]:
        """See `engine.Conversion`."""
        return {
            "to": "hugging face",
            "checkpoint": [
                str(self.checkpoint.folder.resolve()),
                fingerprint(self.checkpoint.folder, self.checkpoint.files()),
            ],
            "original": [
                str(self.original.resolve()),
                fingerprint(self.original, companions(self.original)),
            ],
            "dtype": None if self.dtype is None else name_of(self.dtype),
            "shard_bytes": self.shard_bytes,
        }

    def jobs(self, folder: Path) -> Sequence[Job]:  # noqa: ARG002
        """See `engine.Conversion`."""
        return [Job(shard.name, file_bytes(shard.specs)) for shard in self.shards.values()]

    def write(self, name: str, folder: Path) -> None:
        """See `engine.Conversion`."""
        shard = self.shards[name]
        write_safetensors(folder / name, shard.specs, self._tensors(shard))

    def finish(self, folder: Path, receipts: Mapping[str, Any]) -> Sequence[str]:  # noqa: ARG002
        """See `engine.Conversion`."""
        specs = [spec for shard in self.shards.values() for spec in shard.specs]
        if len(self.shards) > 1:
            file_of = {spec.name: shard.name for shard in self.shards.values() for spec in shard.specs}
            total = {"total_size": sum(spec.nbytes for spec in specs)}
            index = {"metadata": total, "weight_map": dict(sorted(file_of.items()))}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        notes = copy_companions(self.original, folder)
        adjust_config(folder, most(specs), self.values)
        return notes

    def _tensors(self, shard: Shard) -> Iterator[tuple[str, Tensor]]:
        for entry in shard.entries:
            for name, tensor in self.checkpoint.parts(entry, self.weights):
                yield name, cast(name, tensor, self.dtype)

    def _plan(self) -> Iterator[Shard]:
        runs: list[list[tuple[Entry, list[TensorSpec]]]] = []
        size = 0
        for entry in self.weights.entries():
            specs = self._specs(entry)
            nbytes = sum(spec.nbytes for spec in specs)
            if not runs or size + nbytes > self.shard_bytes:
                runs.append([])
                size = 0
            runs[-1].append((entry, specs))
            size += nbytes
        for number, one in enumerate(runs, 1):
            whole = len(runs) == 1
            name = "model.safetensors" if whole else f"model-{number:05d}-of-{len(runs):05d}.safetensors"
            one.sort(key=lambda pair: -pair[1][0].dtype.itemsize)
            yield Shard(name, tuple(entry for entry, _ in one), tuple(spec for _, specs in one for spec in specs))

    def _specs(self, entry: Entry) -> list[TensorSpec]:
        dtype = self.dtype or self.checkpoint.dtype(entry)
        shapes = self.weights.hf_shapes(entry)
        return [TensorSpec(name, dtype, shape) for name, shape in zip(entry.hf, shapes, strict=True)]
