"""Writes docs/commands.md, the reference of all commands, from the command line itself.

A test checks that the file is up to date.
"""

from __future__ import annotations

import os
from contextlib import redirect_stdout, suppress
from functools import partial
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import typer
from typer.cli import get_docs_for_click
from typer.main import get_command

from rlsys.apps.cli.main import app
from rlsys.search.server.command import serve_index, serve_web
from scripts.markdown import filled

FILE = Path(__file__).resolve().parents[1] / "docs" / "commands.md"
COMMAND = "python -m scripts.commands_reference"
_INTRODUCTION = f"""\
# Which commands does rlsys have?

This page lists every command of `rlsys` with its arguments and options, as `--help` prints them.
`{COMMAND}` writes this page from the code.

"""
_PARSED = {"rlsys search serve": partial(serve_index, program="rlsys search serve"), "rlsys search web": serve_web}
"""Command -> the function that parses its flags, of which typer knows none."""


def render() -> str:
    """Return the whole page as Markdown."""
    command = get_command(app)
    page = get_docs_for_click(obj=command, ctx=typer.Context(command, info_name="rlsys"), name="rlsys")
    body = page.partition("\n")[2].strip()  # Without the generated title.
    for name, serve in _PARSED.items():
        printed = StringIO()
        with redirect_stdout(printed), patch.dict(os.environ, COLUMNS="110"), suppress(SystemExit):
            serve(["--help"])
        before, _, rest = body.partition(f" `{name} --help` lists the flags.")
        next_section = rest[rest.index("\n#") :]
        body = f"{before}\n\n```console\n{printed.getvalue()}```\n{next_section}"
    return filled(f"{_INTRODUCTION}{body}") + "\n"


def main() -> None:
    """Write docs/commands.md."""
    FILE.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
