"""Runs one part of the benchmark: `python -m bench.gpu.part NAME DEVICE SCALE FOLDER`.

The last printed line is the outcome. Each part is a module of that name with a function `measure`, which raises
`NotHereError` if the machine lacks what the part needs.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from bench.gpu.figures import FULL, SMALL, Figure, NotHereError, Outcome, Scale, to_json
from rlsys.config.schema import Device

PARTS = ("step", "logprobs", "sync", "engine", "parity")
"""Parts in the order in which they run."""
SCALES = {"full": FULL, "small": SMALL}


if __name__ == "__main__":
    name, device, scale, folder = sys.argv[1:]
    measure: Callable[[Scale, Device, Path], list[Figure]] = importlib.import_module(f"bench.gpu.{name}").measure
    try:
        outcome = Outcome(tuple(measure(SCALES[scale], Device(device), Path(folder))))
    except NotHereError as need:
        outcome = Outcome(needs=str(need))
    print(to_json(outcome))
