"""The tools of a task, from their dotted names: found, checked, and made.

Invariant: what `open_tools` gives has names and tags that differ from each other and from the tags of the protocol.
Finding a tool imports its module; nothing is made of it before all are found to be sound.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Iterator, Sequence
from typing import cast

from rlsys.config.schema import TaskConfig
from rlsys.errors import UserError
from rlsys.rollout.tools.interface import Tool

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


def find_tool(path: str) -> type[Tool]:
    """The class called `path`. Imports its module; raises UserError with one sentence where it is no tool."""
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        raise UserError(f"task.tools: {path!r} is no dotted name: write it like package.module.Class.")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UserError(
            f"task.tools: {module_name} cannot be imported ({_said(error)}): mend it, or put the folder that holds it "
            "into PYTHONPATH."
        ) from error
    found = getattr(module, attribute, None)
    if not inspect.isclass(found):
        raise UserError(f"task.tools: {module_name} has no class {attribute}: define it, or mend the name.")
    if wrong := next(_faults(found), None):
        raise UserError(f"task.tools: {path} {wrong}; see docs/tools.md.")
    return cast("type[Tool]", found)


def tool_tags(paths: Sequence[str]) -> dict[str, str]:
    """Name -> tag of each tool. Raises UserError for what is no tool."""
    return {_text(one, "name"): _text(one, "tag") for one in map(find_tool, paths)}


def open_tools(task: TaskConfig) -> tuple[Tool, ...]:
    """One of each tool of `task`. Raises UserError with one line for each problem."""
    if problems := list(check_tools(task)):
        raise UserError("\n".join(problems))
    return tuple(_made(path) for path in task.tools)


def check_tools(task: TaskConfig) -> Iterator[str]:
    """One sentence for each problem of `task.tools`."""
    tags = task.tags
    taken = {"think": "reasoning", tags.search: "task.tags.search", tags.answer: "task.tags.answer"}
    taken[tags.information] = "task.tags.information"
    taken = {tag.lower(): owner for tag, owner in taken.items()}
    names: dict[str, str] = {}
    for path in task.tools:
        try:
            found = find_tool(path)
        except UserError as problem:
            yield str(problem)
            continue
        name, tag = _text(found, "name"), _text(found, "tag")
        if name in names:
            yield f"task.tools: {path} has the name {name}, as {names[name]} has: rename one, or leave it out."
        elif tag.lower() in taken:
            yield f"task.tools: {path} has the tag {tag}, which is that of {taken[tag.lower()]}: rename one."
        names.setdefault(name, path)
        taken.setdefault(tag.lower(), path)


def described(paths: Sequence[str]) -> str:
    """What a prompt says of the tools, a sentence for each; empty without any."""
    found = map(find_tool, paths)
    return " ".join(_sentence(_text(one, "tag"), _text(one, "description")) for one in found)


def _sentence(tag: str, description: str) -> str:
    return (
        f"You can {description} by <{tag}> text </{tag}> and the result will be returned between <information> and "
        "</information>."
    )


def _made(path: str) -> Tool:
    try:
        return find_tool(path)()
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"task.tools: {path} cannot be made ({_said(error)}): mend its __init__.") from error


def _faults(found: type) -> Iterator[str]:
    """What keeps a class from being a tool."""
    for attribute in ("name", "tag"):
        value = getattr(found, attribute, None)
        if not isinstance(value, str) or not _WORD.fullmatch(value):
            yield (
                f"has {attribute}={value!r}: give the class a {attribute} of letters, digits and underscores, a letter "
                "first"
            )
    limit = getattr(found, "timeout_s", None)
    number = isinstance(limit, int | float) and not isinstance(limit, bool)
    if not number or not (math.isfinite(cast("float", limit)) and cast("float", limit) > 0):
        yield f"has timeout_s={limit!r}: give the class a number of seconds above 0"
    about = getattr(found, "description", None)
    if not isinstance(about, str) or not about.strip():
        yield f"has description={about!r}: give the class a text that says what one can do with it"
    call = getattr(found, "call", None)
    if not inspect.iscoroutinefunction(call):
        yield "has no async method call: define it as `async def call(self, text: str) -> str`"
    elif not _takes(call, "self", "text"):
        yield "has a method call that does not take one text: define it as `async def call(self, text: str) -> str`"
    if not _takes(found):
        yield "needs arguments to be made: give its __init__ a default for each"


def _takes(function: object, *arguments: str) -> bool:
    try:
        inspect.signature(cast("type", function)).bind(*arguments)
    except TypeError:
        return False
    except ValueError:
        pass  # of one written in C, which shows no signature
    return True


def _text(found: type[Tool], attribute: str) -> str:
    """An attribute that `_faults` has found to be a text of the class itself."""
    return cast("str", getattr(found, attribute))


def _said(error: Exception) -> str:
    """An error on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
