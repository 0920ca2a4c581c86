"""Measures speed and memory of checkpoint conversion in both directions.

    python -m bench.convert [--gigabytes 2] [--processes N] [--folder DIR]      # a minute on two free cores

A model of random bfloat16 weights with the layers of Qwen2.5-3B is converted to Megatron and back. The baseline is
`cp -r` of the source, timed before and after each conversion; `fraction` is the conversion's speed over the baseline's.
The best of several repeats counts for both, to exclude other load on the machine. The source is read from the page
cache if it fits, and enough memory for the output is free.

Memory is the largest resident set of any writing process, mapped files included, minus what was resident before the
conversion (Python and torch). `ratio` divides it by the size of the largest layer: a transformer layer or the
embedding.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rlsys.apps.convert.verify import verify
from rlsys.weights.convert.conversion import SHARD_BYTES, hf_to_megatron, megatron_to_hf
from rlsys.weights.convert.model_folder import bytes_in
from rlsys.weights.hf_io import TensorSpec, write_safetensors
from rlsys.weights.weight_map import WeightMap, architecture_of, read_architecture

RESULT = Path("outputs/bench/convert.json")
CONFIG: Mapping[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
"""Config of Qwen2.5-3B without the number of layers."""
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Row:
    """Measurement of one direction."""

    way: str
    nbytes: int
    seconds: float
    gb_s: float
    copy_gb_s: float
    fraction: float
    peak_bytes: int
    largest_layer_bytes: int
    layers_in_memory: float
    """`peak_bytes` over `largest_layer_bytes`."""


def main() -> None:
    """Measure, print the table and write the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0, help="GB of weights")
    parser.add_argument("--processes", type=int, help="writing processes; default: chosen by size and cores")
    parser.add_argument("--folder", type=Path, help="folder with room for four times the weights")
    given = parser.parse_args()
    with TemporaryDirectory(prefix="rlsys-bench-", dir=given.folder) as name:
        rows = measure(Path(name), int(given.gigabytes * 1e9), given.processes)
    console = Console()
    console.print(table(rows))
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps({"repeats": REPEATS, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    console.print(f"Written to {RESULT}")


def measure(home: Path, nbytes: int, processes: int | None) -> list[Row]:
    """Convert in both directions, in `home`. Raises AssertionError if the result differs from the original."""
    model, megatron, back = home / "model", home / "megatron", home / "back"
    largest = make_model(model, nbytes)
    there = best("hf2mg", model, megatron, processes, largest)
    here = best("mg2hf", megatron, back, processes, largest)
    assert verify(model, back, logits=False).same
    return [there, here]


def make_model(folder: Path, nbytes: int) -> int:
    """Write a model of about `nbytes`, one tensor at a time. Returns the bytes of its largest layer."""
    folder.mkdir()
    config = {**CONFIG, "num_hidden_layers": 1}
    sizes = layer_sizes(config)
    layers = max(1, round((nbytes - sum(sizes) + sizes[0]) / sizes[0]))
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    weights = WeightMap(read_architecture(folder))
    for number, specs in enumerate(shards(weights)):
        write_safetensors(folder / f"model-{number:05d}.safetensors", specs, random_tensors(specs))
    return max(sizes)


def layer_sizes(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the bytes of a transformer layer and of the embedding."""
    weights = WeightMap(architecture_of(config))
    layer = other = 0
    for entry in weights.entries():
        nbytes = sum(2 * prod(shape) for shape in entry.rule.shapes)
        if entry.layer is None:
            other += nbytes
        else:
            layer += nbytes
    return layer, other


def shards(weights: WeightMap) -> Iterator[list[TensorSpec]]:
    """Yield the tensors of each file of a model."""
    specs: list[TensorSpec] = []
    for entry in weights.entries():
        for name, shape in zip(entry.hf, entry.rule.shapes, strict=True):
            if sum(spec.nbytes for spec in specs) + 2 * prod(shape) > SHARD_BYTES:
                yield specs
                specs = []
            specs.append(TensorSpec(name, torch.bfloat16, tuple(shape)))
    yield specs


def random_tensors(specs: Sequence[TensorSpec]) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of random bits for each of `specs`."""
    for spec in specs:
        bits = torch.randint(-(2**15), 2**15, spec.shape, dtype=torch.int16)
        yield spec.name, bits.view(torch.bfloat16)


def best(way: str, source: Path, out: Path, processes: int | None, largest: int) -> Row:
    """Time `REPEATS` conversions and the copies between them; the fastest of each counts. `out` is kept."""
    nbytes, copies, taken = bytes_in(source), [copy_seconds(source)], []
    for _ in range(REPEATS):
        if out.exists():
            shutil.rmtree(out)
        taken.append(in_a_new_process(way, source, out, processes))
        copies.append(copy_seconds(source))
    seconds, peak = min(seconds for seconds, _ in taken), max(peak for _, peak in taken)
    copy, speed = nbytes / min(copies) / 1e9, nbytes / seconds / 1e9
    return Row(way, nbytes, seconds, speed, copy, speed / copy, peak, largest, peak / largest)


def in_a_new_process(way: str, source: Path, out: Path, processes: int | None) -> tuple[float, int]:
    """Convert in a new process. Returns seconds and peak bytes."""
    here, there = Pipe()
    child = get_context("spawn").Process(target=converted, args=(way, source, out, processes, there))
    child.start()
    there.close()
    seconds, peak = here.recv()
    child.join()
    return seconds, peak


def converted(way: str, source: Path, out: Path, processes: int | None, pipe: Connection) -> None:
    """Convert in this process, and send seconds and peak bytes through `pipe`."""
    torch.set_num_threads(1)
    before = resident("VmRSS")
    touch_memory(source)
    # Reset the peak.
    Path("/proc/self/clear_refs").write_text("5")
    started = time.perf_counter()
    (hf_to_megatron if way == "hf2mg" else megatron_to_hf)(source, out, processes=processes)
    seconds = time.perf_counter() - started
    others = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    pipe.send((seconds, max(resident("VmHWM"), others) - before))


def resident(key: str) -> int:
    """Return the size in bytes of an entry of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{key}:")).split()[1])


def copy_seconds(source: Path) -> float:
    """Time `cp -r`, the baseline. Returns the seconds."""
    copy = source.with_name("copy")
    touch_memory(source)
    started = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(copy)], check=True)
    seconds = time.perf_counter() - started
    shutil.rmtree(copy)
    return seconds


def touch_memory(source: Path) -> None:
    """Use and free as much memory as a copy needs: a virtual machine gets it from its host before the copy is timed."""
    junk = source.with_name(f"junk-{os.getpid()}")
    block = bytes(2**24)
    with junk.open("wb") as file:
        for _ in range(bytes_in(source) // len(block) + 1):
            file.write(block)
    junk.unlink()


def table(rows: Sequence[Row]) -> Table:
    """Return a table with one row per direction."""
    shown = Table(title="Conversion compared with cp of the same bytes")
    shown.add_column("direction", no_wrap=True)
    for name in ("GB", "s", "GB/s", "cp GB/s", "fraction", "peak MB", "largest layer MB", "ratio"):
        shown.add_column(name, justify="right")
    for row in rows:
        speeds = (row.seconds, row.gb_s, row.copy_gb_s, row.fraction)
        memory = (row.peak_bytes / 1e6, row.largest_layer_bytes / 1e6)
        shown.add_row(
            row.way,
            f"{row.nbytes / 1e9:.2f}",
            *(f"{value:.2f}" for value in speeds),
            *(f"{value:.0f}" for value in memory),
            f"{row.layers_in_memory:.2f}",
        )
    return shown


if __name__ == "__main__":
    main()
