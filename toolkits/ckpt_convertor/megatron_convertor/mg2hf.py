"""Converts a Megatron checkpoint to a Hugging Face folder: `rlsys convert mg2hf` with positional arguments.

sh mg2hf_3b.sh CHECKPOINT OUT ORIGINAL [--dtype D] [--shard-size 5GB] [--processes N] [--family F]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from rlsys.apps.cli import convert
from rlsys.apps.cli.main import run_command


def main(
    checkpoint: convert.Megatron,
    out: convert.Out,
    original: Annotated[Path, typer.Argument(help="Original Hugging Face folder, for config and tokenizer.")],
    dtype: convert.Dtype = None,
    shard_size: convert.ShardSize = None,
    processes: convert.Processes = None,
    family: convert.OfFamily = None,
) -> None:
    """Convert a Megatron checkpoint to a Hugging Face folder.

    Run the same command again to continue after an interruption.
    """
    convert.mg2hf(checkpoint, out, original, dtype, shard_size, processes, family)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    run_command(app)
