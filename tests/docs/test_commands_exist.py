"""Tests that the documents' commands exist: programs, subcommands, flags, files, experiments and settings."""

import importlib.util
import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from rlsys.apps.cli.main import app
from rlsys.errors import UserError
from tests.docs.pages import PAGES, commands
from tests.support.composed import composed
from tests.support.paths import PROJECT

_PLACEHOLDER = re.compile(r"[A-Z][A-Z_.]*$|.*(\.\.\.|\[|\]|\|)")
"""Matches a placeholder, or a part of a synopsis such as `a|b` or `[--flag]`."""
_TARGET = re.compile(r"^([a-z-]+):", re.MULTILINE)


def parts(text: str) -> Iterator[list[str]]:
    """Yield the simple commands of a line, without leading assignments."""
    for part in re.split(r"&&|&$|\| (?=rlsys)", text):
        words = shlex.split(part)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        if words:
            yield words


@cache
def composes(config: str, *settings: str) -> None:
    """Raise if `config` is no experiment or a setting does not exist."""
    composed(*settings, name=config)


@cache
def root() -> Any:
    return get_command(app)


def check_rlsys(command: Any, words: Sequence[str]) -> None:
    """Raise if a subcommand, flag, experiment or setting does not exist; `a|b` names two subcommands."""
    if hasattr(command, "commands") and words:
        for name in words[0].split("|"):
            if not _PLACEHOLDER.match(name):
                check_rlsys(command.commands[name], words[1:])
        return
    if command.context_settings.get("ignore_unknown_options"):
        return  # Its flags belong to another program.
    flags = {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)} | {"--help"}
    given = [re.sub(r"[\[\]]", "", word) for word in words]
    unknown = {word.split("=")[0] for word in given if word.startswith("-")} - flags
    assert not unknown, f"rlsys {command.name} has no {unknown}"
    config = after(given, "--config-name", "-c", "--for")
    if config and not _PLACEHOLDER.match(config):
        settings = [one for one in given if re.match(r"[a-z_.]+=", one) and not one.endswith("...")]
        composes(config, *settings)


def after(words: Sequence[str], *flags: str) -> str | None:
    """Return the word that follows one of `flags`; None if there is none."""
    return next((word for flag, word in pairwise(words) if flag in flags), None)


def check(words: Sequence[str]) -> None:
    """Raise if a command names a program, file, flag or setting that does not exist."""
    match list(words):
        case ["rlsys", *rest]:
            check_rlsys(root(), rest)
        case ["make", *targets]:
            known = _TARGET.findall((PROJECT / "Makefile").read_text())
            assert set(targets) <= set(known), targets
        case ["python", "-m", module, *rest]:
            assert importlib.util.find_spec(module) is not None, module
            if module == "pytest":
                assert all((PROJECT / path).exists() for path in rest), rest
        case ["python" | "bash" | "sh", file, *rest]:
            assert (PROJECT / file).is_file(), file
            if rest and rest[0].startswith("searchr1_"):
                composes(rest[0], *(one for one in rest[1:] if "=" in one and not one.endswith("...")))
        case ["sbatch", *rest] | ["kubectl", "apply", *rest]:
            settings = [word for word in rest if re.match(r"[a-z_.]+=", word)]
            files = [word for word in rest if "/" in word and word not in settings]
            assert files, rest
            assert all((PROJECT / file).is_file() for file in files), files
            for config in (word for word in rest if word.startswith("searchr1_")):
                composes(config, *settings)
        case [file, *_] if file.startswith("./"):
            assert (PROJECT / file).is_file(), file
        case _:
            others = ("echo", "kubectl", "nft", "hf", "docker", "curl", "pip", "mkdocs", ".", "cd")
            assert words[0] in others, words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_exists(page: Path) -> None:
    wrong = []
    for text in dict.fromkeys(text for text, _ in commands(page)):
        try:
            for words in parts(text):
                check(words)
        except (LookupError, AssertionError, UserError) as problem:
            wrong.append(f"{text}: {problem}")
    assert wrong == []


@pytest.mark.parametrize("file", sorted((PROJECT / "examples").glob("[ae]*/*.*")), ids=lambda file: file.name)
def test_command_of_an_example_finds_the_example(file: Path) -> None:
    """Python looks for a module of the user's on PYTHONPATH; an installed `rlsys` does not add the current folder."""
    text = re.sub(r"\\+\n[# ]*", " ", file.read_text(encoding="utf-8"))
    asked = [
        line for line in text.splitlines() if re.search(r"\brlsys \w", line) and re.search(r"[ =]examples[./]", line)
    ]
    assert [line for line in asked if "PYTHONPATH=$PWD " not in line] == []
