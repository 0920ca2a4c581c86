"""Options shared by several commands, and a two-column table printer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

_CONFIG_NAME = "Name of a config of the project, or path of a YAML file with keys of rlsys or RLinf."
ConfigName = Annotated[str, Option("--config-name", "-c", help=_CONFIG_NAME)]
ConfigDir = Annotated[Path | None, Option(help="Folder of configs; by default the project's own.")]
Overrides = Annotated[list[str] | None, Argument(help="Settings such as trainer.steps=5.")]
_ORIGINAL = "For a Megatron checkpoint: Hugging Face folder of the model that training started from."
OriginalFolder = Annotated[Path | None, Option("--hf", help=_ORIGINAL)]


def print_pairs(rows: Mapping[str, str], justify: Literal["left", "right"] = "left") -> None:
    """Print names and values as a table; values are printed literally, without markup."""
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify=justify, overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(value))
    Console().print(table)
