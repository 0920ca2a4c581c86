"""Lists the parts of the benchmark, and runs one of them: `python -m bench.gpu.part NAME DEVICE SCALE MODEL OUTPUT`.

Each part is a module with a generator `measure`, which yields figures. They are appended to the file OUTPUT one by one,
as lines of JSON, so that a part that fails or hangs loses no earlier figure. A last line says that the part is
complete, was skipped (`NotHereError`) or failed.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from bench.gpu.figures import PROJECT, SCALES, Figure, NotHereError, Setting
from rlsys.config.schema import Device

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the benchmark."""

    module: str
    """Module of `bench.gpu` with its `measure`."""
    limit_s: float
    """Time limit on a cold machine: imports, kernels compiled at run time, and 6 GB of weights."""
    packages: tuple[str, ...] = ()
    """Packages that it needs besides `COMMON`, and without which it is skipped."""
    on_gpu: tuple[str, ...] = ()
    """More packages that it needs on a GPU."""
    more: tuple[str, ...] = ()
    """Packages without which it measures less."""
    needs_model: bool = True
    """True if it reads the model with random weights."""
    on_cpu: bool = True
    """True if it runs without a GPU, with --small."""


MEGATRON, TE = ("megatron-core",), ("transformer-engine",)
TE_WHEELS = ("transformer-engine-cu13", "transformer-engine-torch")
"""Packages that Transformer Engine consists of on PyPI; a build from its repository has none of them."""
SGLANG = ("sglang", "transformers")
RUN = tuple(
    re.split(r"[<>=]", line)[0].lower().replace("_", "-")
    for line in (PROJECT / "requirements/base.txt").read_text().splitlines()
    if not line.startswith("#")
)
"""Packages that `rlsys train` imports, besides torch and the engine."""
COMMON = ("torch", "numpy", "psutil", "rich", "annotated-types", "pyyaml", "xxhash")
"""Packages that the benchmark itself and every part import."""
MODEL_LIMIT_S = 120.0
"""Time limit for writing the model with random weights."""
PARTS: Mapping[str, Part] = {
    "logprobs": Part("logprobs", 150, needs_model=False),
    "hash": Part("hashing", 90, needs_model=False),
    "sync": Part("sync", 300, MEGATRON),
    "nccl": Part("nccl", 90, needs_model=False),
    "local": Part("step", 390, MEGATRON),
    "te": Part("step", 360, (*MEGATRON, *TE), more=TE_WHEELS, on_cpu=False),
    "parity": Part("parity", 390, MEGATRON, more=(*TE, *TE_WHEELS)),
    "offload": Part("offload", 180, MEGATRON),
    "engine": Part("engine", 660, SGLANG, more=("torch-memory-saver",)),
    "agreement": Part("agreement", 360, (*SGLANG, *MEGATRON), more=(*TE, *TE_WHEELS)),
    "colocated": Part(
        "colocated", 480, (*RUN, *SGLANG), on_gpu=(*TE, "torch-memory-saver"), more=TE_WHEELS, needs_model=False
    ),
}
"""Name -> part, in the order in which they run: the cheapest and most certain first. All limits sum to an hour."""


def lacks(part: Part, device: Device, installed: Callable[[str], Any]) -> str:
    """Return the reason for which `part` cannot run on `device`; empty if it can.

    `installed` takes the name of a package and returns a true value, such as its version, if it is installed.
    """
    if device is Device.cpu and not part.on_cpu:
        return "needs a GPU"
    needed = (*part.packages, *(part.on_gpu if device is Device.gpu else ()))
    missing = [name for name in dict.fromkeys(needed) if not installed(name)]
    return f"needs {', '.join(missing)}" if missing else ""


def in_new_process(call: Callable[..., T], *arguments: Any, environment: Mapping[str, str] | None = None) -> T:
    """Return `call(*arguments)` from a new process, whose environment has the variables `environment` too.

    Raises what the call raises, and BrokenProcessPool if the process dies.
    """
    before = dict(os.environ)
    os.environ.update(environment or {})
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(call, *arguments).result()
    finally:
        os.environ.clear()
        os.environ.update(before)


def run(setting: Setting, output: Path) -> None:
    """Measure the part of `setting` and write its lines to `output`. Raises what the part raises."""
    measure: Callable[[Setting], Iterator[Figure]]
    with output.open("w", buffering=1) as lines:

        def write(**record: Any) -> None:
            lines.write(json.dumps(record) + "\n")

        try:
            measure = importlib.import_module(f"bench.gpu.{PARTS[setting.part].module}").measure
            for figure in measure(setting):
                write(figure=asdict(figure))
            write(complete=True)
        except NotHereError as need:
            write(skipped=str(need))
        except BaseException as error:
            write(failed=" ".join(f"{type(error).__name__}: {error}".split()))
            raise


def read(output: Path) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures in `output` and the record of its end, which is empty if the part was cut off."""
    records: Collection[dict[str, Any]] = ()
    if output.is_file():
        whole = output.read_text().split("\n")[:-1]  # A killed process may leave a partial last line.
        records = [json.loads(line) for line in whole]
    figures = [Figure(**record["figure"]) for record in records if "figure" in record]
    return figures, next((record for record in records if "figure" not in record), {})


if __name__ == "__main__":
    part_name, device_name, scale_name, model_folder, output_file = sys.argv[1:]
    here = Setting(part_name, SCALES[scale_name], Device(device_name), Path(model_folder))
    run(here, Path(output_file))
