"""`rlsys convert`: a Megatron checkpoint of the actor becomes a Hugging Face folder."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer


def command(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of the checkpoint: .../global_step_N/actor.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; it must not exist.")],
    hf: Annotated[Path, typer.Option(help="The original Hugging Face folder: its config and tokenizer.")],
) -> None:
    """Convert."""
    convert(checkpoint, out, hf)
    typer.echo(f"The Hugging Face model is in {out}.")


def convert(checkpoint: Path, out: Path, hf: Path) -> None:
    """Convert without the warnings of libraries: of what they can do without, and of torch's future."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from rlsys.weights.convert import megatron_to_hf

        megatron_to_hf(checkpoint, out, hf)
