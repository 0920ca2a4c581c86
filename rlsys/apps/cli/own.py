"""`rlsys own`: from a folder of documents and a file of questions to a trained, evaluated policy, by rlsys' own commands."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from rlsys.errors import Interrupted, RunError, UserError

Prompt = Annotated[
    Path | None, typer.Option(help="File of an own prompt with {question} in it; Search-R1's by default.")
]
Tool = Annotated[
    list[str] | None, typer.Option(help="A tool beside the search, as package.module.Class; again for more.")
]


def command(
    documents: Annotated[Path, typer.Argument(help="File or folder: text, markdown, jsonl, parquet.")],
    questions: Annotated[
        Path, typer.Argument(help="Questions and answers: jsonl, parquet, csv or tsv (see `data prepare own`).")
    ],
    model: Annotated[str, typer.Option(help="Hugging Face folder, or a name on the Hub.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings such as trainer.seed=5.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for everything that is made.")] = Path("outputs/own"),
    heldout: Annotated[
        Path | None, typer.Option(help="Questions to evaluate on; by default some of QUESTIONS.")
    ] = None,
    holdout: Annotated[
        int | None, typer.Option(min=1, help="How many of QUESTIONS; a tenth, at most 500, by default.")
    ] = None,
    prompt: Prompt = None,
    tool: Tool = None,
    kind: Annotated[str, typer.Option(help="Of the index: dense, bm25 or hybrid.")] = "dense",
    encoder: Annotated[str | None, typer.Option(help="minilm (the default), or a Hugging Face encoder.")] = None,
    devices: Annotated[
        str | None, typer.Option(help="cpu, or how many GPUs; by default all that are here, or what -c says.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Of training; the config's by default.")] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Questions of a step; the config's by default, no more than there are.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option("--config-name", "-c", help="What says all else; by default 3B on one node, published."),
    ] = None,
) -> None:
    """Make an index and a split, train, evaluate, report; the same command goes on where it was broken off."""
    from rlsys.apps.api.trainer import EXPERIMENT
    from rlsys.apps.own.steps import Wish, commands

    wish = Wish(
        documents=documents,
        questions=questions,
        model=model,
        out=out,
        config=config or EXPERIMENT,
        heldout=heldout,
        holdout=holdout,
        prompt=prompt,
        tools=tuple(tool or ()),
        kind=kind,
        encoder=encoder,
        devices=_devices(devices, config),
        steps=steps,
        batch=batch,
        overrides=tuple(overrides or ()),
    )
    for words in commands(wish):
        _run(words)


def _devices(given: str | None, config: str | None) -> int | str | None:
    if given is not None:
        return int(given) if given.isdecimal() else given
    if config is not None:
        return None
    from rlsys.observe.capabilities import detect

    return detect().cuda_devices or "cpu"


def _run(words: tuple[str, ...]) -> None:
    """Run an `rlsys` command as it would be typed, and show it.

    It has a process of its own: what a training leaves in one (threads, handlers of signals) is none of the evaluation's.
    """
    typer.secho(f"\n$ rlsys {shlex.join(words)}", bold=True)
    process = subprocess.Popen([sys.executable, "-m", "rlsys.apps.cli.main", *words])
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda got, _: process.send_signal(got)) for number in numbers}
    try:
        status = process.wait()
    except KeyboardInterrupt:  # The terminal has told the command too, which ends in order.
        process.wait()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if status:
        kind = {2: UserError, 130: Interrupted}.get(status, RunError)
        raise kind(f"rlsys {words[0]} has ended with status {status}: what it says is above.")
