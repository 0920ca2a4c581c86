"""Names in the documents are of things that exist: configuration keys, experiments, files that they link to."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from rlsys.config.schema import RunConfig, free_maps, schema_keys
from tests.support.paths import PROJECT

PAGES = [PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", *sorted((PROJECT / "docs").glob("*.md"))]
SOURCE = "".join(file.read_text() for file in (PROJECT / "rlsys").rglob("*.py"))
GROUPS = {field.name for field in fields(RunConfig)}
FILES = {"py", "yaml", "json", "safetensors", "png"}
"""Endings of what is a file and not a key."""
_KEY = re.compile(r"([a-z_]+(?:\.[a-z_0-9]+)+)(?:=\S*)?")
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_EXPERIMENT = re.compile(r"`(searchr1_[\w.]+|ema_pg_published)`")


def is_known(key: str) -> bool:
    """A key, a group of keys, a name in a free map, a module of the package, or a name that code gives something."""
    keys = schema_keys()
    module = PROJECT / "rlsys" / Path(*key.split("."))
    return (
        key in keys
        or any(known.startswith(f"{key}.") for known in keys)
        or any(key.startswith(f"{free}.") for free in free_maps())
        or f'"{key}"' in SOURCE
        or module.with_suffix(".py").is_file()
        or module.parent.with_suffix(".py").is_file()
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_experiments_and_links_exist(page: Path) -> None:
    text = page.read_text()
    quoted = [match[1] for piece in re.findall(r"`([^`\n]+)`", text) if (match := _KEY.fullmatch(piece))]
    keys = [key for key in quoted if key.split(".")[0] in GROUPS and key.rpartition(".")[2] not in FILES]
    assert [key for key in keys if not is_known(key)] == []
    experiments = _EXPERIMENT.findall(text)
    assert [name for name in experiments if not (PROJECT / "configs" / f"{name}.yaml").is_file()] == []
    links = [link for link in _LINK.findall(text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
