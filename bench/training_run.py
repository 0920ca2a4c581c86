"""Runs a training on the demo's world in a new process, with searches from a cassette; converts the demo's result."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from rlsys.weights.convert.conversion import megatron_to_hf

CONFIG = "searchr1_tiny_cpu"
FIRST_POLICY = Path("examples/searchr1/tiny/policy")
"""Policy with which the demo starts."""
_SETTINGS = ("tracking.wandb=false", "tracking.tensorboard=false")


def training_run(outputs: Path, settings: Iterable[str], cassette: Path) -> Path:
    """Run `rlsys train` with `settings`. Returns the run's folder, in `outputs`, which is emptied first.

    The run plays a copy of the cassette, so that the searches it adds do not change other runs. If the run fails, exits
    with the last part of its output.
    """
    shutil.rmtree(outputs, ignore_errors=True)
    outputs.mkdir(parents=True)
    own = shutil.copy(cassette, outputs / "searches.jsonl")
    played = ("search.cassette.mode=extend", f"search.cassette.path={own}")
    command = [sys.executable, "-m", "rlsys.apps.cli.main", "train", "--config-name", CONFIG]
    done = subprocess.run(
        [*command, f"output_dir={outputs}", *_SETTINGS, *played, *settings],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"The run in {outputs} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    (run,) = outputs.glob(f"{CONFIG}-*")
    return run


def demo_policy() -> Path:
    """Convert the newest checkpoint of the demo, and return the Hugging Face folder. Exits without a run of the demo."""
    found = Path("outputs").glob(f"{CONFIG}-*/checkpoints/global_step_*/actor")
    newest = max(found, key=lambda folder: folder.stat().st_mtime, default=None)
    if newest is None:
        raise SystemExit("outputs has no run of the demo: run `make demo`.")
    out = Path("outputs/bench/demo_policy") / newest.parents[2].name
    return out.resolve() if (out / "config.json").is_file() else converted(newest, out)


def converted(actor: Path, out: Path) -> Path:
    """Convert a checkpoint of a run's actor to the Hugging Face folder `out`; return its absolute path."""
    megatron_to_hf(str(actor), str(out), str(FIRST_POLICY), processes=1)
    return out.resolve()
