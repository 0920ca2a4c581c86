"""Converts a Hugging Face folder to a Megatron checkpoint: `rlsys convert hf2mg` with positional arguments.

sh hf2mg_3b.sh MODEL OUT [--tp N] [--pp N] [--ep N] [--dtype D] [--values] [--processes N]
"""

from __future__ import annotations

import sys
from pathlib import Path

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from rlsys.apps.cli import convert
from rlsys.apps.cli.main import run_command

if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(convert.hf2mg)
    run_command(app)
