"""A Hugging Face folder becomes a Megatron checkpoint (torch_dist), bit for bit, one Megatron tensor at a time.

What is written is weights alone, at step 0: an actor that loads it begins with a new optimiser. It holds what
belongs to the model besides weights too, so that it converts back without its original.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsys.config.schema import ParallelConfig
from rlsys.errors import UserError
from rlsys.weights.bijection import Entry, WeightMap
from rlsys.weights.checkpoint.about import About
from rlsys.weights.checkpoint.torch_dist_writer import TorchDistWriter
from rlsys.weights.convert.companions import companions, copy_companions
from rlsys.weights.convert.dtypes import cast, chosen, most, name_of
from rlsys.weights.convert.engine import Job, OnBytes, Outcome, run
from rlsys.weights.convert.fingerprint import fingerprint
from rlsys.weights.convert.source import MODEL, architecture_in, check_hf
from rlsys.weights.hf_io import HfReader


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

    It loads under any TP, PP and EP; `parallel` is the one that it is laid out for. `values` makes a critic's,
    with a head of zeros where the source has none. The dtype of each tensor is kept unless one is given. See
    `engine.run` for `processes`, `show` and the errors.
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
    """See `engine.Conversion`."""

    source: Path
    reader: HfReader
    weights: WeightMap
    values: bool
    parallel: ParallelConfig
    dtype: torch.dtype | None

    def recipe(self) -> Mapping[str, Any]:
        """See `engine.Conversion`."""
        files = [file.relative_to(self.source) for file in self.reader.files()]
        parallel = self.parallel
        return {
            "to": "megatron",
            "source": [
                str(self.source.resolve()),
                fingerprint(self.source, [*files, *companions(self.source)]),
            ],
            "parallel": [parallel.tp, parallel.pp, parallel.ep, parallel.pp_layers],
            "values": self.values,
            "dtype": None if self.dtype is None else name_of(self.dtype),
        }

    def jobs(self, folder: Path) -> Sequence[Job]:
        """See `engine.Conversion`."""
        return [Job(file.name, file.nbytes) for file in self._writer(folder).files]

    def write(self, name: str, folder: Path) -> Any:
        """See `engine.Conversion`."""
        writer = self._writer(folder)
        job = next(file for file in writer.files if file.name == name)
        return writer.write(job, self._parts)

    def finish(self, folder: Path, receipts: Mapping[str, Any]) -> Sequence[str]:
        """See `engine.Conversion`."""
        notes = copy_companions(self.source, folder / MODEL)
        writer = self._writer(folder)
        # Last, because it says that the checkpoint is complete.
        writer.finish([receipts[file.name] for file in writer.files], About(step=0))
        return notes

    @cached_property
    def _writers(self) -> dict[Path, TorchDistWriter]:
        return {}

    def _writer(self, folder: Path) -> TorchDistWriter:
        """Made once: it plans every weight."""
        if folder not in self._writers:
            self._writers[folder] = TorchDistWriter(folder, self.weights, self._dtype, self.parallel)
        return self._writers[folder]

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
        dtype, shapes = self._dtype(entry), self.weights.hf_shapes(entry)
        return [self._part(name, shape, dtype) for name, shape in zip(entry.hf, shapes, strict=True)]

    def _part(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if name not in self.reader.names():
            # A critic's head, or its bias: values begin at zero.
            return torch.zeros(shape, dtype=dtype)
        return cast(name, self.reader.get(name), dtype)
