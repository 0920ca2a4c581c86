"""Hugging Face safetensors folders, in and out, one tensor at a time.

A written folder appears under its final name only when it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlsys.errors import UserError

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 1000**3
"""Most bytes of one safetensors file, as Hugging Face writes them."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", INDEX)


class HfReader:
    """Reads tensors by name from a folder with one or more safetensors files."""

    def __init__(self, path: str | Path) -> None:
        """Raises UserError if `path` holds no safetensors."""
        self._folder = Path(path)
        self._files: dict[str, Any] = {}
        self._file_of = self._index()

    def names(self) -> set[str]:
        """Every tensor in the folder."""
        return set(self._file_of)

    def get(self, name: str) -> Tensor:
        """One tensor, on the CPU, in the dtype it is stored in. KeyError if there is none."""
        return self._open(self._file_of[name]).get_tensor(name)

    def _index(self) -> dict[str, str]:
        index = self._folder / INDEX
        if index.is_file():
            return dict(json.loads(index.read_text())["weight_map"])
        files = sorted(self._folder.glob("*.safetensors"))
        if not files:
            raise UserError(
                f"{self._folder} holds no safetensors; give a folder with a Hugging Face checkpoint."
            )
        return {name: file.name for file in files for name in sorted(self._open(file.name).keys())}

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self._folder / file
            if not path.is_file():
                raise UserError(f"{path} is named in {INDEX} but is not there; complete the checkpoint.")
            self._files[file] = safe_open(path, framework="pt")
        return self._files[file]


def write_hf(
    tensors: Iterable[tuple[str, Tensor]],
    out: str | Path,
    original: str | Path,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `tensors` as a Hugging Face folder `out` with the config and tokenizer of `original`.

    `out` must not exist. Raises UserError.
    """
    out, original = Path(out), Path(original)
    if out.exists():
        raise UserError(f"{out} exists already; give a folder that does not, or remove it first.")
    if not (original / "config.json").is_file():
        raise UserError(f"{original} has no config.json; give the original Hugging Face folder.")
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        dtype = _write_shards(tensors, partial, shard_bytes)
        _copy_companions(original, partial, dtype)
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_shards(tensors: Iterable[tuple[str, Tensor]], folder: Path, shard_bytes: int) -> torch.dtype:
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total = 0
    dtype = torch.float32

    def flush() -> None:
        if pending:
            save_file(pending, folder / f"shard-{len(shards):05d}", metadata={"format": "pt"})
            shards.append(list(pending))
            pending.clear()

    for name, tensor in tensors:
        if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > shard_bytes:
            flush()
        # Tensors may be views of a buffer that is reused; safetensors wants memory of their own.
        pending[name] = tensor.detach().cpu().clone().contiguous()
        total, dtype = total + tensor.nbytes, tensor.dtype
    flush()
    _name_shards(folder, shards, total)
    return dtype


def _name_shards(folder: Path, shards: list[list[str]], total: int) -> None:
    if len(shards) == 1:
        (folder / "shard-00000").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number:05d}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _copy_companions(original: Path, folder: Path, dtype: torch.dtype) -> None:
    for file in original.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHTS):
            shutil.copyfile(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
