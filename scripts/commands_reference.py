"""The reference of all commands, made from the command line itself: docs/commands.md.

A test holds that the file is up to date.
"""

from __future__ import annotations

from pathlib import Path

import typer
from typer.cli import get_docs_for_click
from typer.main import get_command

from rlsys.apps.cli.main import app

FILE = Path(__file__).resolve().parents[1] / "docs" / "commands.md"
COMMAND = "python -m scripts.commands_reference"
_INTRODUCTION = f"""\
# Commands

Every command with its arguments and options, as `--help` says them. Made from the code by `{COMMAND}`.

"""


def render() -> str:
    """The whole page as Markdown."""
    command = get_command(app)
    page = get_docs_for_click(obj=command, ctx=typer.Context(command, info_name="rlsys"), name="rlsys")
    body = page.partition("\n")[2].strip()  # The first line is a title of its own.
    return f"{_INTRODUCTION}{body}\n"


def main() -> None:
    """Write docs/commands.md."""
    FILE.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
