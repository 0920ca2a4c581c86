"""Runs `rlsys` commands in new processes, and reads the folder of a run on the tiny world."""

import fcntl
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from examples.searchr1.tiny.demo import WORLD, prepare_world
from rlsys.search.index.make import make_index
from tests.support.jsonl import read_rows
from tests.support.paths import PROJECT

RLSYS = [sys.executable, "-m", "rlsys.apps.cli.main"]
LIMIT_S = 3000
"""Time limit of a command; it only ends a hang, also on a busy machine."""
PATIENT = [f"{part}.start_timeout_s={LIMIT_S}" for part in ("cluster", "rollout.engine", "search")]
"""Settings of a run whose parts may start slowly, because the machine is busy."""
PLAIN_ENGINE = "rollout.engine=transformers"
"""Engine of runs that test something else: SGLang takes a third of a run's start."""
NO_SEARCH = ["search.enabled=false", "task.agent.invalid_message=Answer."]
"""Settings of runs without a search server, which test something else."""
NO_INFERENCE = ["algorithm.old_logprobs=actor", "algorithm.kl_coef=0", "trainer.mini_batches=1"]
"""Settings of runs without an inference group, which test something else."""
PROMPTS_PER_STEP = 8
"""Questions that a step of such a run trains on."""
SETTINGS = [*PATIENT, "eval.interval=0", "eval.limit=8", f"trainer.prompts_per_step={PROMPTS_PER_STEP}"]
SETTINGS += ["trainer.mini_batches=2", "tracking.wandb=false", "tracking.tensorboard=false"]


def rlsys(*words: object) -> subprocess.CompletedProcess[str]:
    command = [*RLSYS, *map(str, words)]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def succeed(*words: object) -> None:
    """Run an `rlsys` command, which must succeed."""
    done = rlsys(*words)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


def word_index() -> str:
    """Build the tiny world's BM25 index unless it exists, and return the setting that selects it.

    Its server starts no encoder.
    """
    prepare_world(Console(quiet=True))
    folder = WORLD / "words"
    with (WORLD / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make_index("bm25", WORLD / "corpus.jsonl", folder)
    return f"search.index={folder}"


def small(outputs: Path, *settings: str) -> list[str]:
    return ["train", "-c", "searchr1_tiny_cpu", f"output_dir={outputs}", word_index(), *SETTINGS, *settings]


class Finished:
    """Contents of the folder of a run that ended with status 0."""

    def __init__(self, outputs: Path, *settings: str) -> None:
        succeed(*small(outputs, *settings))
        (folder,) = outputs.glob("searchr1_tiny_cpu-*")
        self.rows = read_rows(folder / "metrics.jsonl")
        self.summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        self.spans: list[dict[str, Any]] = json.loads((folder / "trace.json").read_text())["traceEvents"]
        self.folder = folder
