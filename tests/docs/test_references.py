"""docs/commands.md says what the command line says, docs/api.md what the Python API says, and every code is explained."""

from __future__ import annotations

import re
from typing import get_args

import pytest

import rlsys
from rlsys.errors import Code
from scripts import api_reference as of_python
from scripts import commands_reference as of_commands
from tests.support.paths import PROJECT

MADE = {"commands": of_commands, "api": of_python}


@pytest.mark.parametrize("page", MADE)
def test_the_page_is_up_to_date(page: str) -> None:
    made = MADE[page]
    assert made.FILE.name == f"{page}.md"
    assert made.FILE.read_text(encoding="utf-8") == made.render(), f"run `{made.COMMAND}`"


def test_every_class_is_on_its_page() -> None:
    assert re.findall(r"^## `(\w+)`$", of_python.render(), re.MULTILINE) == rlsys.__all__


def test_every_code_of_a_mistake_has_its_row() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| \S.* \| \S.* \|$", (PROJECT / "docs/troubleshooting.md").read_text(), re.MULTILINE
    )
    assert rows == list(get_args(Code))
