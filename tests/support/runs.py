"""Runs `rlsys train` on the tiny world in new processes, and reads the run folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from examples.searchr1.tiny.demo import prepare_world
from tests.support.paths import PROJECT

SETTINGS = ["eval.interval=0", "eval.limit=16", "trainer.prompts_per_step=16"]
SETTINGS += ["trainer.mini_batches=2", "tracking.wandb=false", "tracking.tensorboard=false"]


def train(outputs: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    """Run a small training to its end."""
    prepare_world(Console(quiet=True))
    command = [sys.executable, "-m", "rlsys.apps.cli.main", "train", "--config-name", "searchr1_tiny_cpu"]
    return subprocess.run(
        [*command, f"output_dir={outputs}", *SETTINGS, *settings],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )


class Finished:
    """Contents of the folder of a run that ended with status 0."""

    def __init__(self, outputs: Path, *settings: str) -> None:
        done = train(outputs, *settings)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        (folder,) = outputs.glob("searchr1_tiny_cpu-*")
        self.rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        self.summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        self.spans: list[dict[str, Any]] = json.loads((folder / "trace.json").read_text())["traceEvents"]
        self.folder = folder
