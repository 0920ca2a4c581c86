"""Megatron checkpoint -> Hugging Face folder, with positional arguments; `rlsys convert mg2hf` does the work.

sh mg2hf_3b.sh CHECKPOINT OUT ORIGINAL [--dtype D] [--shard-size 5GB] [--processes N]
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
    original: Annotated[Path, typer.Argument(help="The original Hugging Face folder: config, tokenizer.")],
    dtype: convert.Dtype = None,
    shard_size: convert.ShardSize = "5GB",
    processes: convert.Processes = None,
) -> None:
    """Turn a Megatron checkpoint into a Hugging Face folder. One that was ended continues."""
    convert.mg2hf(checkpoint, out, original, dtype, shard_size, processes)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    run_command(app)
