"""Tests of the reference of configuration keys: every key is read, and docs/configuration.md is up to date."""

from __future__ import annotations

import re

import pytest

from rlsys.config.schema import schema_keys
from scripts.config_reference import COMMAND, FILE, render


@pytest.fixture(scope="module")
def page() -> str:
    """The rendered page; rendering takes seconds, as it searches all code for the readers of each key."""
    return render()


def rows_of(page: str) -> list[list[str]]:
    return [line.strip("|").split(" | ") for line in page.splitlines() if line.startswith("| `")]


def test_every_key_is_read_outside_of_the_config_package(page: str) -> None:
    assert [row[0] for row in rows_of(page) if not row[-1].strip()] == []


def test_page_is_up_to_date_and_explains_every_key_once(page: str) -> None:
    assert FILE.read_text(encoding="utf-8") == page, f"run `{COMMAND}`"
    rows = rows_of(page)
    assert sorted(row[0].strip() for row in rows) == sorted(f"`{key}`" for key in schema_keys())
    bare = re.compile(r"(Only with `\S+`\. )?(Must [^.]*(\.\d+)?[^.]*\.)?")
    assert [row[0] for row in rows if bare.fullmatch(row[4])] == []
    meaning = "Only with `trainer.schedule.kind=async` or `bounded_wait`. Largest staleness"
    assert (
        f"| `trainer.schedule.max_staleness` | integer | `1` (`async`), `2` (`bounded_wait`) | versions | {meaning}"
        in page
    )
