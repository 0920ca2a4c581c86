"""Writes a Hugging Face folder of a given shape with random weights, for metrics that do not depend on the weights.

python -m bench.gpu.random_model SHAPE FOLDER DEVICE
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from bench.gpu.figures import PROJECT
from rlsys.config.schema import Device
from rlsys.weights.hf_io import TensorSpec, write_safetensors
from rlsys.weights.weight_map import WeightMap, read_architecture

TOKENIZER = PROJECT / "examples/searchr1/tiny/policy"
"""Folder of the tokenizer for all shapes. It fits because its vocabulary is smaller than the vocabulary of any shape,
and prompts are random tokens."""
_SPREAD = 0.02


def write_random_model(shape: Path, folder: Path, device: Device) -> int:
    """Write a model with `shape`'s config.json to the new `folder`. Returns the number of its parameters.

    Weights are drawn on `device`, as bfloat16 on a GPU and float32 on a CPU: matrices are normally distributed, norms
    are one, biases zero.
    """
    folder.mkdir(parents=True)
    dtype, where = (torch.bfloat16, "cuda") if device is Device.gpu else (torch.float32, "cpu")
    weights = WeightMap(read_architecture(str(shape)))
    specs = [
        TensorSpec(name, dtype, sizes)
        for entry in weights.entries()
        for name, sizes in zip(entry.hf, entry.rule.shapes, strict=True)
    ]
    write_safetensors(folder / "model.safetensors", specs, _tensors(specs, where))
    shutil.copy(shape / "config.json", folder)
    for file in TOKENIZER.glob("*token*"):
        shutil.copy(file, folder)
    return sum(prod(spec.shape) for spec in specs)


def _tensors(specs: list[TensorSpec], device: str) -> Iterator[tuple[str, Tensor]]:
    torch.manual_seed(0)
    for spec in specs:
        drawn = torch.empty(spec.shape, dtype=spec.dtype, device=device)
        if len(spec.shape) > 1:
            drawn.normal_(0.0, _SPREAD)
        else:
            drawn.fill_(0.0 if spec.name.endswith(".bias") else 1.0)
        yield spec.name, drawn.cpu()


if __name__ == "__main__":
    shape_folder, model_folder, device_name = sys.argv[1:]
    write_random_model(Path(shape_folder), Path(model_folder), Device(device_name))
