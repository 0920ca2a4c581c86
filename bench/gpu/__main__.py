"""Benchmarks rlsys on one GPU: a training step, the log-prob kernel, weight sync, an engine, and parity with the CPU.

    python -m bench.gpu             # one H100 or H200, under 8 minutes; 20 GB of disk
    python -m bench.gpu --small     # smoke test: a tiny model on this machine, with or without a GPU

Every part runs in a process of its own with a time limit; when that process ends, all that it started are ended too. If
a part fails or needs something that the machine lacks, the table shows the reason and the other parts still run. The
result is written to `outputs/bench/gpu.json` with the machine's name. The model has random weights: nothing is
downloaded. The exit status is 1 if a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.gpu.figures import FULL, PROJECT, SMALL, Outcome, from_json
from bench.gpu.part import PARTS
from bench.gpu.random_model import write_random_model
from rlsys.cluster.local_ray import adopt_orphans, descendants, end
from rlsys.config.schema import Device
from rlsys.observe.environment import environment

RESULT = Path("outputs/bench/gpu.json")
LIMITS_S: Mapping[str, float] = {"step": 120, "logprobs": 40, "sync": 60, "engine": 150, "parity": 60}
"""Part -> time limit. All limits and the time to write the model sum to less than 8 minutes."""


def main() -> None:
    """Run the chosen parts, print the table, write the result file and exit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="use a tiny model; runs on a CPU if there is no GPU")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not options.small:
        sys.exit("There is no CUDA device: run this on a machine with one, or use --small.")
    device, scale = (Device.gpu if on_gpu else Device.cpu), ("small" if options.small else "full")
    started = time.perf_counter()
    outcomes: dict[str, Outcome] = {}
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="rlsys-bench-") as scratch:
        folder = Path(scratch) / "model"
        shape = Path((SMALL if options.small else FULL).shape)
        dtype = torch.bfloat16 if on_gpu else torch.float32
        write_random_model(shape, folder, dtype, torch.device("cuda" if on_gpu else "cpu"))
        if on_gpu:
            torch.cuda.empty_cache()
        for name in options.only:
            outcomes[name] = _run(name, device, scale, folder)
    report = {
        "machine": torch.cuda.get_device_name() if on_gpu else "no GPU",
        "scale": scale,
        "seconds": round(time.perf_counter() - started, 1),
        "versions": environment(),
        "figures": [asdict(figure) for outcome in outcomes.values() for figure in outcome.figures],
        "not_here": {name: outcome.needs for name, outcome in outcomes.items() if outcome.needs},
        "failures": {name: outcome.failed for name, outcome in outcomes.items() if outcome.failed},
    }
    _show(report, outcomes)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(bool(report["failures"]))


def _run(name: str, device: Device, scale: str, folder: Path) -> Outcome:
    """Run one part in a new process, and return its outcome."""
    command = [sys.executable, "-m", "bench.gpu.part", name, str(device), scale, str(folder)]
    try:
        done = run_within(command, LIMITS_S[name])
    except subprocess.TimeoutExpired:
        return Outcome(failed=f"not finished after {LIMITS_S[name]:.0f} s")
    if done.returncode:
        return Outcome(failed=(done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return from_json(done.stdout.splitlines()[-1])


def run_within(command: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run `command`, then end all processes that it left behind, because they could keep the next part from using the
    GPU.

    Call `adopt_orphans` first. Raises subprocess.TimeoutExpired after `limit_s` seconds.
    """
    before = {process.pid for process in descendants()}
    try:
        return subprocess.run(
            command,
            cwd=PROJECT,
            env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    finally:
        end(process for process in descendants() if process.pid not in before)


def _show(report: Mapping[str, Any], outcomes: Mapping[str, Outcome]) -> None:
    table = Table(title=f"{report['machine']}, {report['scale']}, {report['seconds']} s", title_justify="left")
    for heading in ("part", "metric", "value", "baseline", "ratio", "target"):
        table.add_column(heading, justify="right" if heading in ("value", "ratio") else "left")
    for name, outcome in outcomes.items():
        for one in outcome.figures:
            ratio = "" if one.ratio is None else f"{one.ratio:.3g}"
            table.add_row(name, one.name, f"{one.value:.4g} {one.unit}", one.baseline, ratio, one.aim)
        if outcome.failed:
            table.add_row(name, "failed", outcome.failed)
        elif outcome.needs:
            table.add_row(name, "not measured", outcome.needs)
    Console().print(table)


if __name__ == "__main__":
    main()
