"""Tests that the documents match the code: keys, links, calls of the API, generated references, and the site."""

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

import rlsys
from rlsys.config.schema import RunConfig, free_maps, schema_keys
from rlsys.errors import Code
from rlsys.rollout.agent.chat_recorder import Refused
from scripts import api_reference, commands_reference
from tests.docs.pages import PAGES
from tests.support.paths import PROJECT

DOCS = PROJECT / "docs"
SOURCE = "".join(file.read_text() for file in (PROJECT / "rlsys").rglob("*.py"))
GROUPS = {field.name for field in fields(RunConfig)}
FILES = {"py", "yaml", "json", "safetensors", "png"}
"""File name extensions, which look like the last part of a key."""


def is_known(key: str) -> bool:
    """True for a key, a group of keys, a name in a free map, a module, or a string in the code."""
    keys, module = schema_keys(), PROJECT / "rlsys" / Path(*key.split("."))
    return (
        key in keys
        or any(known.startswith(f"{key}.") for known in keys)
        or any(key.startswith(f"{free}.") for free in free_maps())
        or f'"{key}"' in SOURCE
        or module.with_suffix(".py").is_file()
        or module.parent.with_suffix(".py").is_file()
    )


@pytest.mark.parametrize(
    "page",
    [PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))],
    ids=lambda page: page.name,
)
def test_keys_experiments_and_links_exist(page: Path) -> None:
    text = page.read_text()
    keys = re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)(?:=[^\s`]*)?`", text)
    keys = [key for key in keys if key.split(".")[0] in GROUPS and key.rpartition(".")[2] not in FILES]
    assert [key for key in keys if not is_known(key)] == []
    experiments = re.findall(r"`(searchr1_[\w.]+|ema_pg_published)`", text)
    assert [name for name in experiments if not (PROJECT / "configs" / f"{name}.yaml").is_file()] == []
    links = [link for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_index_links_every_page() -> None:
    links = re.findall(r"\]\(([^)#\s]+)", (DOCS / "index.md").read_text())
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert pages - {"index.md", *links} == set()


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_title_is_a_question_and_lines_are_at_most_110_characters(page: Path) -> None:
    text = page.read_text()
    assert text.startswith("# ")
    assert text.partition("\n")[0].endswith("?")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE).splitlines()
    assert [line for line in prose if len(line) > 110 and not line.startswith(("|", "!", "    "))] == []


def check(code: str) -> int:
    """Return the number of calls of names imported from rlsys; raises if the arguments of a call do not fit."""
    tree, names, checked = ast.parse(code), dict[str, Any](), 0
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rlsys":
            module = importlib.import_module(node.module or "")
            names |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in names:
                target = names[name]
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if name in names:
                target = getattr(names[name], method)
            case _:
                continue
        if not (isinstance(target, type) and issubclass(target, BaseException)):  # Exceptions have no signature.
            keywords = {keyword.arg: None for keyword in node.keywords if keyword.arg}
            inspect.signature(target).bind(*[None] * len(node.args), **keywords)
            checked += 1
    return checked


def test_python_blocks_call_the_api_with_valid_arguments() -> None:
    blocks = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
    checked = [check(code) for page in PAGES for code in blocks.findall(page.read_text(encoding="utf-8"))]
    assert sum(checked) > 0


@pytest.mark.parametrize("made", [commands_reference, api_reference])
def test_a_reference_is_up_to_date(made: Any) -> None:
    assert made.FILE.read_text(encoding="utf-8") == made.render(), f"run `{made.COMMAND}`"


def test_every_public_class_and_error_code_is_documented() -> None:
    assert re.findall(r"^## `(\w+)`$", (DOCS / "api.md").read_text(), re.MULTILINE) == rlsys.__all__
    rows = re.findall(r"^\| `(\w+)` \| \S.* \| \S.* \|$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert rows == list(get_args(Code))


def test_every_refusal_of_the_gateway_is_documented_with_its_status() -> None:
    usual = {name: given.default for name, given in inspect.signature(Refused).parameters.items()}
    sent = set()
    for file in (PROJECT / "rlsys" / "rollout" / "agent").glob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "Refused":
                given = {one.arg: one.value.value for one in call.keywords if isinstance(one.value, ast.Constant)}
                sent.add(tuple((usual | given)[name] for name in ("status", "code")))
    rows = re.findall(r"^\| ([45]\d\d[\d, ]*) \| (`.*?`) \|", (DOCS / "gateway.md").read_text(), re.MULTILINE)
    listed = {
        (int(status), code)
        for statuses, codes in rows
        for status in statuses.split(", ")
        for code in re.findall(r"\w+", codes)
    }
    assert sent - listed == set()
    assert {code for _, code in listed} == {code for _, code in sent}


def test_the_site_builds_without_a_warning_and_loads_nothing_from_the_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # Suppresses a banner of the theme.
    built = subprocess.run(command, cwd=PROJECT, env=quiet, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    pages = [page.relative_to(DOCS).with_suffix("") for page in DOCS.rglob("*.md")]
    written = [tmp_path / ("" if page.name == "index" else page) / "index.html" for page in pages]
    assert [page for page in written if not page.is_file()] == []
    first = (tmp_path / "index.html").read_text()
    assert 'src="http' not in first
    assert 'rel="stylesheet" href="http' not in first
