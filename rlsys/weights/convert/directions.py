"""Converts both ways between a Megatron checkpoint and a Hugging Face folder, bit for bit, one Megatron tensor at a time.

A critic, known by its value head, is in Hugging Face a token classification of one label. A Megatron checkpoint (torch_dist) is
written as weights alone, at step 0: an actor that loads it begins with a new optimiser. It holds what belongs to the model
besides weights too, so that it converts back without its original.
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

from rlsys.config.schema import ParallelConfig
from rlsys.errors import UserError
from rlsys.weights.bijection import Entry, WeightMap
from rlsys.weights.checkpoint.megatron_reader import MegatronCheckpoint, open_checkpoint
from rlsys.weights.checkpoint.store import About
from rlsys.weights.checkpoint.torch_dist_writer import TorchDistWriter
from rlsys.weights.convert.conversion import Job, OnBytes, Outcome, run
from rlsys.weights.convert.model_folder import (
    MODEL,
    adjust_config,
    architecture_in,
    cast,
    check_hf,
    chosen,
    companions,
    copy_companions,
    fingerprint,
    is_critic,
    model_of,
    most,
    name_of,
)
from rlsys.weights.hf_io import INDEX, SINGLE, HfReader, TensorSpec, file_bytes, write_safetensors
from rlsys.weights.sizes import packed

SHARD_BYTES = 5 * 1000**3  # Most bytes of one safetensors file, as Hugging Face writes them.


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

    `original` is the Hugging Face folder that training started from: its config and tokenizer are copied, its weights
    are not needed. Without it, the checkpoint is one that `hf_to_megatron` made. The dtype of each tensor is kept
    unless one is given. See `conversion.run` for `processes`, `show` and the errors.
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
    entries: tuple[Entry, ...]  # In the order in which they are written: that of export, larger dtypes first.
    specs: tuple[TensorSpec, ...]  # Of all their Hugging Face tensors, in that order.


@dataclass(frozen=True)
class ToHf:
    """See `Conversion`."""

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
        return {
            "to": "hugging face",
            "checkpoint": fingerprint(self.checkpoint.folder, self.checkpoint.files()),
            "original": fingerprint(self.original, companions(self.original)),
            "dtype": None if self.dtype is None else name_of(self.dtype),
            "shard_bytes": self.shard_bytes,
        }

    def jobs(self, folder: Path) -> Sequence[Job]:  # noqa: ARG002
        return [Job(shard.name, file_bytes(shard.specs)) for shard in self.shards.values()]

    def write(self, name: str, folder: Path) -> None:
        shard = self.shards[name]
        write_safetensors(folder / name, shard.specs, self._tensors(shard))

    def finish(self, folder: Path, receipts: Mapping[str, Any]) -> Sequence[str]:  # noqa: ARG002
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
        pairs = ((entry, self._specs(entry)) for entry in self.weights.entries())
        runs = packed(pairs, lambda pair: sum(spec.nbytes for spec in pair[1]), self.shard_bytes)
        for number, held in enumerate(runs, 1):
            name = SINGLE if len(runs) == 1 else f"model-{number:05d}-of-{len(runs):05d}.safetensors"
            held.sort(key=lambda pair: -pair[1][0].dtype.itemsize)
            yield Shard(name, tuple(entry for entry, _ in held), tuple(spec for _, specs in held for spec in specs))

    def _specs(self, entry: Entry) -> list[TensorSpec]:
        dtype = self.dtype or self.checkpoint.dtype(entry)
        shapes = entry.rule.shapes
        return [TensorSpec(name, dtype, shape) for name, shape in zip(entry.hf, shapes, strict=True)]


def hf_to_megatron(
    source: str | Path,
    out: str | Path,
    *,
    parallel: ParallelConfig | None = None,
    dtype: str | None = None,
    values: bool = False,
    processes: int | None = None,
    show: OnBytes | None = None,
) -> Outcome:
    """Write the Hugging Face folder `source` as the new Megatron checkpoint `out`.

    It loads under any TP, PP and EP; `parallel` is the one that it is laid out for. `values` makes a critic's, with a
    head of zeros where the source has none. The dtype of each tensor is kept unless one is given. See `conversion.run`
    for `processes`, `show` and the errors.
    """
    source, parallel = Path(source), parallel or ParallelConfig()
    for key, size in (("tp", parallel.tp), ("pp", parallel.pp), ("ep", parallel.ep)):
        if size < 1:
            raise UserError(f"{key} is {size}; give 1 or more.")
    weights = WeightMap(architecture_in(source), values=values)
    reader = HfReader(source)
    check_hf(reader, weights, source, values)
    made = ToMegatron(source, reader, weights, values, parallel, chosen(dtype))
    return run(made, Path(out), processes, show)


@dataclass(frozen=True)
class ToMegatron:
    """See `Conversion`."""

    source: Path
    reader: HfReader
    weights: WeightMap
    values: bool
    parallel: ParallelConfig
    dtype: torch.dtype | None

    def recipe(self) -> Mapping[str, Any]:
        files = [file.relative_to(self.source) for file in self.reader.files()]
        parallel = self.parallel
        return {
            "to": "megatron",
            "source": fingerprint(self.source, [*files, *companions(self.source)]),
            "parallel": [parallel.tp, parallel.pp, parallel.ep, parallel.pp_layers],
            "values": self.values,
            "dtype": None if self.dtype is None else name_of(self.dtype),
        }

    def jobs(self, folder: Path) -> Sequence[Job]:  # noqa: ARG002
        return [Job(file.name, file.nbytes) for file in self._writer.files]

    def write(self, name: str, folder: Path) -> Any:
        job = next(file for file in self._writer.files if file.name == name)
        return self._writer.write(folder, job, self._parts)

    def finish(self, folder: Path, receipts: Mapping[str, Any]) -> Sequence[str]:
        notes = copy_companions(self.source, folder / MODEL)
        # Last, because it says that the checkpoint is complete.
        self._writer.finish(folder, [receipts[file.name] for file in self._writer.files], About(step=0))
        return notes

    @cached_property
    def _writer(self) -> TorchDistWriter:
        """Made once: it plans every weight."""
        return TorchDistWriter(self.weights, self._dtype, self.parallel)

    def _dtype(self, entry: Entry) -> torch.dtype:
        if self.dtype is not None:
            return self.dtype
        found = {self.reader.spec(name).dtype for name in entry.hf if name in self.reader.names()}
        if len(found) > 1:
            raise UserError(
                f"{self.source} has {', '.join(entry.hf)} in {' and '.join(sorted(map(name_of, found)))}, and "
                "they are one tensor in Megatron; give --dtype."
            )
        return found.pop() if found else most(self.reader.spec(name) for name in self.reader.names())

    def _parts(self, entry: Entry) -> list[Tensor]:
        dtype, shapes = self._dtype(entry), entry.rule.shapes
        return [self._part(name, shape, dtype) for name, shape in zip(entry.hf, shapes, strict=True)]

    def _part(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if name not in self.reader.names():
            # A critic's head, or its bias: values begin at zero.
            return torch.zeros(shape, dtype=dtype)
        return cast(name, self.reader.get(name), dtype)
