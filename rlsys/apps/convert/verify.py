"""Compares two models: tensor names, shapes, dtypes, checksums, and logits (values of a critic).

Transformers computes the logits of a Hugging Face folder, Megatron the logits of a checkpoint. Both compute in float32,
so that rounding hardly matters.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from rlsys.config.schema import Device, Dtype, Layers, ModelConfig, ParallelConfig
from rlsys.errors import UserError
from rlsys.trainer import mesh
from rlsys.trainer.batches import MicroBatch
from rlsys.weights.bucket import checksum, dtype_name
from rlsys.weights.convert.model_folder import HfModel, StoredModel, open_model
from rlsys.weights.hf_io import TensorSpec, with_attention_scale
from rlsys.weights.weight_map import read_architecture

MISSING = "-"
PROMPTS, LENGTH = 3, 32
TOLERANCE = 1e-3
"""Largest accepted logit difference, relative to the largest logit; allows for another order of summation."""


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """First difference of a tensor; `what` is "present", "shape", "dtype" or "bytes"."""

    name: str
    what: str
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class LogitsCheck:
    """Difference between the logits of two models on the same tokens."""

    positions: int
    largest: float
    """Largest magnitude of a logit of the first model."""
    difference: float
    """Largest difference of two corresponding logits."""
    agreement: float
    """Share of positions at which both models rank the same token first; 1 for a critic."""

    @property
    def same(self) -> bool:
        """True if the logits differ by at most `TOLERANCE`."""
        return self.difference <= TOLERANCE * self.largest


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of two models. `tensors`: number of distinct tensor names. `nbytes`: size of the first model."""

    tensors: int
    nbytes: int
    differences: tuple[TensorDifference, ...]
    logits: LogitsCheck | None
    note: str
    """Reason why requested logits were not compared; else empty."""

    @property
    def same(self) -> bool:
        """True if nothing differs."""
        return not self.differences and (self.logits is None or self.logits.same)


def verify(
    first: str | Path,
    second: str | Path,
    *,
    hf: str | Path | None = None,
    family: str | None = None,
    logits: bool = True,
    show: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Compare two models, each a Hugging Face folder or a Megatron checkpoint. Raises UserError.

    `hf`: Hugging Face folder with the config of a checkpoint that does not include its config. `family`: as in
    `model.family`. Reads every byte, one
    tensor at a time; `show` receives the bytes read so far and the total bytes of both models.
    """
    config = None if hf is None else Path(hf)
    sides = open_model(Path(first), config, family), open_model(Path(second), config, family)
    specs = sides[0].specs(), sides[1].specs()
    for side in sides:
        side.check_repeated()
    sizes = [sum(spec.nbytes for spec in of_side.values()) for of_side in specs]
    done = 0

    def checksums(side: StoredModel) -> dict[str, str]:
        nonlocal done
        sums = {}
        for name, tensor in side.tensors():
            sums[name] = checksum(name, tensor)
            done += tensor.nbytes
            if show is not None:
                show(done, sum(sizes))
        return sums

    sums = checksums(sides[0]), checksums(sides[1])
    differences = tuple(_differences(specs, sums))
    check, note = None, ""
    if logits and any(difference.what in ("present", "shape") for difference in differences):
        note = "Logits were not compared: the models have different shapes."
    elif logits:
        note = _not_computed(sides, family) or _too_large(sides[0])
        check = None if note else _check_logits(*sides)
    return Comparison(len(specs[0].keys() | specs[1].keys()), sizes[0], differences, check, note)


def _differences(
    specs: tuple[dict[str, TensorSpec], dict[str, TensorSpec]], sums: tuple[dict[str, str], dict[str, str]]
) -> Iterator[TensorDifference]:
    for name in sorted(specs[0].keys() | specs[1].keys()):
        one, other = specs[0].get(name), specs[1].get(name)
        if one is None or other is None:
            there = ("yes", MISSING) if other is None else (MISSING, "yes")
            yield TensorDifference(name, "present", *there)
        elif one.shape != other.shape:
            yield TensorDifference(name, "shape", str(list(one.shape)), str(list(other.shape)))
        elif one.dtype != other.dtype:
            yield TensorDifference(name, "dtype", dtype_name(one.dtype), dtype_name(other.dtype))
        elif sums[0][name] != sums[1][name]:
            yield TensorDifference(name, "bytes", sums[0][name], sums[1][name])


def _not_computed(sides: Iterable[StoredModel], family: str | None) -> str:
    """Return a sentence for the user if Megatron does not support the config of a checkpoint; else an empty string."""
    try:
        for side in sides:
            if not isinstance(side, HfModel):
                read_architecture(side.model, family)
    except UserError as error:
        return f"Logits were not compared: {error}"
    return ""


def _too_large(side: StoredModel) -> str:
    """Return a sentence for the user if the model does not fit into memory in float32; else an empty string."""
    numbers = sum(spec.nbytes // spec.dtype.itemsize for spec in side.specs().values())
    needed = int(numbers * 4 * 1.3)  # 4 bytes per weight, plus 30 % for activations.
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else psutil.virtual_memory().available
    if needed <= free:
        return ""
    return (
        f"Logits were not compared: they need {needed / 1e9:.1f} GB of memory, and only {free / 1e9:.1f} GB are free."
    )


def _check_logits(first: StoredModel, second: StoredModel) -> LogitsCheck:
    """Compare the logits, with one model in memory at a time."""
    tokens = prompts(first)
    logits, others = logits_of(first, tokens), logits_of(second, tokens)
    difference = float((logits - others).abs().nan_to_num(torch.inf, torch.inf).max())  # NaN counts as different.
    agreement = float((logits.argmax(-1) == others.argmax(-1)).float().mean())
    return LogitsCheck(len(logits), float(logits.abs().max()), difference, agreement)


def prompts(side: StoredModel) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return random tokens [prompts, length] of the vocabulary, including its first and last token."""
    vocab = side.architecture.vocab
    length = min(LENGTH, side.architecture.max_positions)
    tokens = np.random.default_rng(0).integers(0, vocab, size=(PROMPTS, length))
    tokens[0, :2] = 0, vocab - 1
    return tokens


def logits_of(side: StoredModel, tokens: np.ndarray[Any, Any]) -> Tensor:
    """Return the logits that predict all but the first token of each row: [n, vocabulary], or [n, 1] for a critic."""
    logits = _by_transformers(side, tokens) if isinstance(side, HfModel) else _by_megatron(side, tokens)
    gc.collect()
    return logits


@torch.no_grad()
def _by_transformers(side: StoredModel, tokens: np.ndarray[Any, Any]) -> Tensor:
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    kind = AutoModelForTokenClassification if side.values else AutoModelForCausalLM
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = with_attention_scale(kind.from_pretrained(side.folder, dtype=torch.float32)).to(device).eval()
    rows = [model(torch.tensor(row[None], device=device)).logits[0, :-1].float().cpu() for row in tokens]
    return torch.cat(rows)


def _by_megatron(side: StoredModel, tokens: np.ndarray[Any, Any]) -> Tensor:
    from rlsys.trainer.export import shard_loader
    from rlsys.trainer.forward import context_shares, forward

    with _whole_model(side) as model:
        loader = shard_loader(model)
        for name, tensor in side.tensors():
            loader.feed(name, tensor)
        shares = context_shares(model, [_batch(row[None]) for row in tokens])
        outputs = forward(model, shares, lambda output, _: output.float().cpu())
    logits = torch.cat(outputs)
    return logits[:, None] if side.values else logits[:, : side.architecture.vocab]


@contextmanager
def _whole_model(side: StoredModel) -> Iterator[Any]:
    """Yield Megatron's model on one device, unsharded, with uninitialised weights."""
    from rlsys.trainer.model.stage_model import PolicyModel, ValueModel

    device = Device.gpu if torch.cuda.is_available() else Device.cpu
    # Port 0: a process group of one process may take any free port.
    alone = mesh.Rendezvous(0, 1, "127.0.0.1", 0, device, 600.0)
    place = mesh.start(alone, ParallelConfig(), seed=0)
    try:
        # On a GPU, Transformer Engine would round the operands of float32 products to TF32.
        config = ModelConfig(str(side.model), Layers.local, Dtype.float32)
        kind = ValueModel if side.values else PolicyModel
        model = kind(side.architecture, config, ParallelConfig(), place)
        model.module.eval()
        yield model
    finally:
        mesh.stop()


def _batch(tokens: np.ndarray[Any, Any]) -> MicroBatch:
    """Return a micro-batch of one row [1, length] in which all but the first token are predicted."""
    mask = np.ones(tokens.shape, dtype=bool)
    mask[:, 0] = False
    nothing = np.zeros(tokens.shape, dtype=np.float32)
    lengths = np.array([tokens.shape[1]])
    return MicroBatch(tokens, lengths, mask, nothing, nothing, nothing)
