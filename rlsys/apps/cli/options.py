"""Options that several commands take, and the table of two columns that several print."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

_CONFIG_NAME = "A config of the project, or the path of a YAML file: rlsys' keys, or RLinf's."
ConfigName = Annotated[str, Option("--config-name", "-c", help=_CONFIG_NAME)]
ConfigDir = Annotated[Path | None, Option(help="Folder of configs; the project's own by default.")]
Overrides = Annotated[list[str] | None, Argument(help="Settings such as trainer.steps=5.")]
_ORIGINAL = "Of a Megatron checkpoint: the Hugging Face folder that training began with."
OriginalFolder = Annotated[Path | None, Option("--hf", help=_ORIGINAL)]


def print_pairs(rows: Mapping[str, str], justify: Literal["left", "right"] = "left") -> None:
    """Print names and what they are as a table, whatever is in the texts."""
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify=justify, overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(value))
    Console().print(table)
