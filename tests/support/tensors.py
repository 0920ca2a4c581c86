"""Tensors of many dtypes, shapes and strides, their exact content, buckets of them, and files of models."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlsys.weights.bucket import Bucket, digest, pack_into
from rlsys.weights.weight_map import aligned, packed


def some_tensors(version: int, buckets: int = 5, nbytes: int = 40_000) -> list[list[tuple[str, Tensor]]]:
    """Tensors of each bucket of `version`, with different dtypes, shapes and strides, and random bits."""
    generator = torch.Generator().manual_seed(version)
    noise = torch.randint(0, 256, (buckets, nbytes), dtype=torch.uint8, generator=generator)
    return [
        [
            (f"{number}.matrix", bits[: nbytes // 2].view(torch.bfloat16).view(-1, 50)),
            (f"{number}.bias", bits[nbytes // 2 : nbytes // 2 + 12].view(torch.float32)),
            (f"{number}.turned", bits[-4000:].view(torch.float32).view(20, 50).t()),
            (f"{number}.empty", torch.zeros(0, 7)),
            (f"{number}.steps", torch.tensor(version * 2**40 + number)),
        ]
        for number, bits in enumerate(noise)
    ]


def pack(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Copy tensors, in order, into host buckets of at most `bucket_bytes`; a larger tensor gets a bucket of its own."""
    for run in packed(tensors, lambda named: aligned(named[1].nbytes), bucket_bytes):
        yield pack_into(np.empty(sum(aligned(tensor.nbytes) for _, tensor in run), dtype=np.uint8), run)


def raw(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """Dtype, shape and bytes; equal only if every bit is equal, NaNs included."""
    flat = tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else torch.empty(0)
    return str(tensor.dtype), tuple(tensor.shape), flat.numpy().tobytes()


def digest_of(buckets: Iterable[Bucket], base: str = "") -> str:
    return digest({record.name: record.checksum for bucket in buckets for record in bucket.records}, base)


@torch.no_grad()
def randomised(model: Any, scale: float = 0.15) -> Any:
    """Fill a model with random numbers, also its biases and norms, so that a tensor in the wrong place shows.

    In gpt-oss, every fifth gate and up is far beyond the limit of 7, and no other is near it, where rounding would decide.
    """
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        parameter.copy_(1.0 + 0.1 * noise if "norm" in name else scale * noise)
        if name.endswith("gate_up_proj_bias"):
            parameter += 12 * noise.sign() * (noise.abs() > 1.3)
    return model


def save_model(model: Any, folder: str | Path, **options: Any) -> None:
    """Save `model` as transformers does; with $RLSYS_TEST_WEIGHTS_OFFSET set, see `begin_weights_at`."""
    model.save_pretrained(folder, **options)
    if offset := os.environ.get("RLSYS_TEST_WEIGHTS_OFFSET"):
        begin_weights_at(int(offset), Path(folder))


def begin_weights_at(offset: int, folder: Path) -> None:
    """Pad the header of each file of weights with spaces, so that its first tensor begins at byte `offset` modulo 64.

    Kernels round differently for operands at other addresses, and readers map the tensors where they lie in the file.
    """
    for file in folder.glob("*.safetensors"):
        content = file.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = content[8:end] + b" " * ((offset - end) % 64)
        file.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
