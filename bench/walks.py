"""Traces one prompt group from prompt to gradient, and one weight version from optimiser to engine, through the code.

    python -m bench.walks

The benchmark trains two steps of the demo. Every process records the functions of rlsys that run for one prompt group
and for one weight version (see `walks_hook`). The files are printed in the order in which they are first reached, and
counts are written to outputs/bench/walks.json:

- `frames_scheduler_to_sglang`, `files_scheduler_to_sglang`: functions, and their files, between the pipeline's request
  for a prompt group and SGLang, including those in the engine's process;
- `files_episode`, `files_weight_version`: files of all processes together.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console

import rlsys
from examples.searchr1.tiny.demo import prepare_world

OUT = Path("outputs/bench")
HOOK = Path(__file__).with_name("walks_hook")
CONFIG = "searchr1_tiny_cpu"
SETTINGS = [
    *("trainer.steps=2", "trainer.prompts_per_step=8", "trainer.mini_batches=2", "eval.interval=0", "eval.limit=8"),
    *("tracking.wandb=false", "tracking.tensorboard=false"),
]


def record(folder: Path) -> None:
    """Train two steps; every process writes to `folder` which functions it runs."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    path = os.pathsep.join(filter(None, [str(HOOK), os.environ.get("PYTHONPATH")]))
    followed = {"RLSYS_WALKS": str(folder.resolve()), "RLSYS_PACKAGE": f"{Path(rlsys.__file__).parent}/"}
    done = subprocess.run(
        [sys.executable, "-m", "rlsys.apps.cli.main", "train", "-c", CONFIG, f"output_dir={OUT / 'walks'}", *SETTINGS],
        env=os.environ | followed | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"The run failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def read(folder: Path) -> dict[str, list[str]]:
    """Return walk -> its functions in all processes, without repetition, the driver's functions first."""
    lines = [line.split() for file in sorted(folder.iterdir(), key=_begun) for line in file.read_text().splitlines()]
    found: dict[str, list[str]] = {"episode": [], "version": [], "to_engine": [], "to_sglang": []}
    for walk, *functions in lines:
        if walk in ("episode", "version"):
            found[walk] += [function for function in functions if function not in found[walk]]
        else:
            found[walk] = found[walk] or functions
    return found


def files(functions: list[str]) -> list[str]:
    """Return the files of `functions`, in order of first occurrence."""
    return list(dict.fromkeys(function.partition(":")[0] for function in functions))


def main() -> None:
    """Train, print functions and files, and write the result file."""
    console = Console()
    prepare_world(console)
    folder = OUT / "walks" / "functions"
    record(folder)
    found = read(folder)
    chain = found["to_engine"] + found["to_sglang"]
    begin = next(index for index, function in enumerate(chain) if function.endswith(":_roll"))
    chain = chain[begin:]
    figures = {
        "frames_scheduler_to_sglang": len(chain),
        "files_scheduler_to_sglang": len(files(chain)),
        "files_episode": len(files(found["episode"])),
        "files_weight_version": len(files(found["version"])),
    }
    for title, names in (
        ("Scheduler to SGLang, function by function", chain),
        ("One episode, prompt to gradient", files(found["episode"])),
        ("One weight version, optimiser to engine", files(found["version"])),
    ):
        console.print(f"\n[bold]{title}[/]")
        for number, name in enumerate(names, start=1):
            console.print(f"{number:3} {name}", highlight=False)
    console.print()
    for key, value in figures.items():
        console.print(f"{key} {value}", highlight=False)
    (OUT / "walks.json").write_text(json.dumps(figures | {"walks": found}, indent=2) + "\n")


def _begun(file: Path) -> float:
    """Return the process id that names `file`; ids are in the order in which processes start."""
    return int(file.name)


if __name__ == "__main__":
    main()
