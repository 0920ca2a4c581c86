"""Compares the gpu and the cpu profile: one optimiser step of a tiny model on each, in float32.

Each profile has its own process, because a process that sees a GPU refuses to train on the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.gpu.figures import PROJECT, SMALL, Figure, NotHereError, Scale
from rlsys.config.schema import Device, Dtype

AIM = "value of at most 1e-3"
TINY = PROJECT / "examples/searchr1/tiny/policy"


def measure(_scale: Scale, device: Device, _folder: Path) -> list[Figure]:
    """Return the relative differences of the gradient norm and the loss between the gpu and the cpu profile.

    Raises NotHereError without a GPU.
    """
    if device is Device.cpu:
        raise NotHereError("needs a GPU")
    here, there = (_one_step_on(profile) for profile in (device, Device.cpu))
    return [
        Figure("parity", key, abs(here[key] - there[key]) / abs(there[key]), "of the cpu profile's", aim=AIM)
        for key in ("grad_norm", "loss")
    ]


def _one_step_on(device: Device) -> dict[str, float]:
    environment = dict(os.environ) | ({"CUDA_VISIBLE_DEVICES": ""} if device is Device.cpu else {})
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu.parity", device],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"One step on the {device} failed: {done.stderr.strip().splitlines()[-1:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def one_step(device: Device) -> dict[str, Any]:
    """Return loss and gradient norm of the tiny policy on fixed random micro-batches."""
    from bench.gpu.trainer import make_actor, random_micro_batch

    actor = make_actor(str(TINY), device, Dtype.float32, recompute=False)
    vocab = json.loads((TINY / "config.json").read_text())["vocab_size"]
    stats = actor.accumulate([random_micro_batch(SMALL, vocab, seed) for seed in range(2)])
    return {"grad_norm": actor.apply().grad_norm, "loss": stats["policy_loss"]}


if __name__ == "__main__":
    print(json.dumps(one_step(Device(sys.argv[1]))))
