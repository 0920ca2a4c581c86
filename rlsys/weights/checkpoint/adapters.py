"""Reads checkpoints of adapters (LoRA), which hold no weight of the model that the adapters were trained beside.

Such a checkpoint names its base: the folder, and a digest of all tensors in it. Whatever is made of the two together is
refused with another base.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsys.config.schema import LoraConfig
from rlsys.errors import UserError
from rlsys.weights.bucket import checksum, digest
from rlsys.weights.checkpoint.megatron_reader import MegatronCheckpoint
from rlsys.weights.checkpoint.store import CheckpointInfo, is_complete, read_checkpoint_info
from rlsys.weights.hf_io import HfReader, check_repeated
from rlsys.weights.lora import A, B, adapter_map, is_target, merged_parts, peft_name, target_modules
from rlsys.weights.weight_map import Architecture, Entry, WeightMap

_BASE = "base"


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The frozen model beside which adapters are trained."""

    path: str
    digest: str
    """Digest of every tensor in the folder."""

    @classmethod
    def of(cls, path: str | Path) -> BaseModel:
        """Read all tensors of a Hugging Face folder. Raises UserError if it cannot be read."""
        return cls(str(Path(path).resolve()), digest(checksums_in(HfReader(path))))


def checksums_in(reader: HfReader) -> dict[str, str]:
    """Return the checksum of every tensor of a Hugging Face folder, by name; reads all of them."""
    return {name: checksum(name, reader.get(name)) for name in reader.names()}


def described(lora: LoraConfig, architecture: Architecture, base: BaseModel) -> dict[str, Any]:
    """Return `CheckpointInfo.adapters` for adapters with the settings `lora`; how they are sent is no part of it."""
    settings = {"rank": lora.rank, "alpha": lora.alpha, "dropout": lora.dropout}
    return settings | {"targets": target_modules(architecture, lora), _BASE: asdict(base)}


def check_adapters(folder: str | Path, info: CheckpointInfo, wanted: Mapping[str, Any] | None) -> None:
    """Raise UserError unless the checkpoint in `folder` holds the adapters `wanted`; None: no adapters.

    `wanted` has the format of `CheckpointInfo.adapters`. Dropout may differ.
    """
    found = info.adapters
    if wanted is None and found is None:
        return
    if wanted is None or found is None:
        there, here = ("adapters", "0") if found else ("a whole model", str((wanted or {})["rank"]))
        rank = found["rank"] if found else 0
        raise UserError(
            f"{folder} holds {there}, but model.lora.rank is {here}: set model.lora.rank={rank}, or give another "
            "checkpoint.",
            code="mismatch",
            key="model.lora.rank",
        )
    for key in ("rank", "alpha", "targets"):
        if found[key] != wanted[key]:
            raise UserError(
                f"{folder} holds adapters with {key} {found[key]}, but model.lora.{key} is {wanted[key]}: set it to "
                f"{found[key]}, or give another checkpoint.",
                code="mismatch",
                key=f"model.lora.{key}",
            )
    if found[_BASE]["digest"] != wanted[_BASE]["digest"]:
        raise _other_base(folder, found[_BASE]["path"], wanted[_BASE]["path"], "model.path")


def _other_base(folder: str | Path, trained: str, given: str | Path, key: str) -> UserError:
    return UserError(
        f"{folder} holds adapters of the model {trained}, and {given} has other weights: give the model that they were "
        "trained beside.",
        code="mismatch",
        key=key,
    )


def adapters_in(folder: Path) -> LoraConfig | None:
    """Return the settings of the adapters in a checkpoint; None if it holds a whole model."""
    found = read_checkpoint_info(folder).adapters if is_complete(folder) else None
    return None if found is None else LoraConfig(**{key: value for key, value in found.items() if key != _BASE})


class MergedCheckpoint(MegatronCheckpoint):
    """A checkpoint of adapters and its base, read as the weights W + (alpha / rank) B A of one model.

    The weights are those of the weight sync.
    """

    def __init__(self, held: MegatronCheckpoint, lora: LoraConfig, base: Path, architecture: Architecture) -> None:
        """`held` has the adapters. Raises UserError if `base` is not the model that they were trained beside."""
        super().__init__(held.folder, held.step, f"adapters of rank {lora.rank}", held.names(), held._pieces)
        self.format = held.format
        self.lora, self.base = lora, base
        self._held, self._reader = held, HfReader(base)
        self._adapters = adapter_map(architecture, lora)
        trained = (read_checkpoint_info(held.folder).adapters or {})[_BASE]
        if BaseModel.of(base).digest != trained["digest"]:
            raise _other_base(held.folder, trained["path"], base, "--hf")
        held.check(self._adapters)

    def check(self, weights: WeightMap) -> None:
        """Raise UserError unless the base holds exactly the weights that `weights` maps."""
        weights.check_hf_names(self._reader.names())

    def check_copies(self, weights: WeightMap) -> None:
        """Raise UserError if the base stores a tied tensor twice with different values."""
        check_repeated(self._reader, weights, self.base)

    def dtype(self, entry: Entry) -> torch.dtype:
        """Return the dtype of a weight in the base."""
        return self._reader.spec(entry.hf[0]).dtype

    def parts(self, entry: Entry, weights: WeightMap) -> list[tuple[str, Tensor]]:  # noqa: ARG002
        """See `MegatronCheckpoint`."""
        found = ((name, self._reader.get(name)) for name in entry.hf)
        return merged_parts(found, self.adapter(entry), self.lora.alpha / self.lora.rank)

    def adapter(self, entry: Entry) -> dict[str, tuple[Tensor, Tensor]]:
        """Return A and B of each Hugging Face weight of `entry` that has an adapter, by its name."""
        stem = entry.name.removesuffix("weight")
        try:
            a, b = (self._adapters.entry(stem + ending) for ending in (A, B))
        except KeyError:
            return {}
        tensors = dict([*self._held.parts(a, self._adapters), *self._held.parts(b, self._adapters)])
        return {
            name: (tensors[peft_name(name, "A")], tensors[peft_name(name, "B")])
            for name in entry.hf
            if is_target(name, self.lora)
        }

    def _read(self, name: str) -> list[Tensor]:
        return self._held._read(name)
