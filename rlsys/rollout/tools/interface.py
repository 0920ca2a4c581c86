"""Loads the tools of a task. A tool has a tag that the policy writes, and an async method that answers the text inside.

A class is a tool if it has the attributes of `Tool` and needs no constructor arguments; no base class is required. Each
process that runs episodes makes one instance of the class and calls it concurrently, on the event loop of the episodes.
Blocking work belongs in a thread (`asyncio.to_thread`).

Invariant: the tools of `open_tools` have distinct names and tags, none of which is a tag of the protocol. Checking a
tool imports its module; no tool is instantiated before all have passed the checks.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, cast

from rlsys.config.schema import TaskConfig
from rlsys.errors import Code, UserError

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


class Tool(Protocol):
    """A tool that the policy can call. All attributes but `call` are read from the class, before it is instantiated."""

    @property
    def name(self) -> str:
        """Name in metrics, trajectories and samples: letters, digits and underscores, beginning with a letter."""

    @property
    def tag(self) -> str:
        """Tag name: the policy writes <tag> text </tag>."""

    @property
    def timeout_s(self) -> float:
        """Time limit of a call. A call that takes longer is cancelled, and the policy reads an error."""

    @property
    def description(self) -> str:
        """Description for the prompt, such as "look a word up"; completes "You can ... by <tag> text </tag>"."""

    async def call(self, text: str) -> str:
        """Answer `text`: the text between the tags, stripped, never empty. The policy reads the result.

        Do not trust `text`, which the policy wrote. The caller cuts the result and neutralises tags in it. Raise
        `ToolError` for a text that cannot be answered; the policy also reads the message of any other exception.
        """


class ToolError(Exception):
    """Raised for a call that cannot be answered. The policy reads the message after the tool's name."""


def find_tool(path: str) -> type[Any]:
    """Import and return the class `path`. Raises UserError with one sentence if it is not a tool."""
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        raise _problem(f"{path!r} is not a dotted name: write it like package.module.Class.", "malformed")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise _problem(
            f"{module_name} cannot be imported ({_one_line(error)}): fix the error, or add its folder to PYTHONPATH.",
            "user_code",
        ) from error
    found = getattr(module, attribute, None)
    if not inspect.isclass(found):
        raise _problem(f"{module_name} has no class {attribute}: define it, or correct the name.", "unknown")
    if wrong := next(_faults(found), None):
        raise _problem(f"{path} {wrong}: see docs/tutorials/own-tool.md.", "user_code")
    return found


def tool_tags(paths: Sequence[str]) -> dict[str, str]:
    """Return tool name -> tag. Raises UserError for a class that is not a tool."""
    return {tool.name: tool.tag for tool in map(find_tool, paths)}


def open_tools(task: TaskConfig) -> tuple[Tool, ...]:
    """Instantiate each tool of `task`. Raises UserError with one line per problem and the code of the first problem."""
    if problems := list(_problems(task)):
        raise UserError("\n".join(map(str, problems)), code=problems[0].code, key=problems[0].key)
    return tuple(_made(path) for path in task.tools)


def check_tools(task: TaskConfig) -> Iterator[str]:
    """Yield one sentence for each problem of `task.tools`."""
    return map(str, _problems(task))


def _problems(task: TaskConfig) -> Iterator[UserError]:
    tags = task.tags
    taken = {"think": "reasoning", tags.search.lower(): "task.tags.search", tags.answer.lower(): "task.tags.answer"}
    taken[tags.information.lower()] = "task.tags.information"
    names: dict[str, str] = {}
    for path in task.tools:
        try:
            tool = find_tool(path)
        except UserError as problem:
            yield problem
            continue
        if tool.name in names:
            sentence = f"{path} and {names[tool.name]} both have the name {tool.name}: rename or remove one."
            yield _problem(sentence, "conflict")
        elif owner := taken.get(tool.tag.lower()):
            yield _problem(f"{path} and {owner} both use the tag {tool.tag}: rename one.", "conflict")
        names.setdefault(tool.name, path)
        taken.setdefault(tool.tag.lower(), path)


def described(paths: Sequence[str]) -> str:
    """Return the prompt's sentences about the tools, one per tool; empty without tools."""
    return " ".join(
        f"You can {tool.description} by <{tool.tag}> text </{tool.tag}> and the result will be returned between "
        "<information> and </information>."
        for tool in map(find_tool, paths)
    )


def _made(path: str) -> Tool:
    tool = find_tool(path)
    try:
        return tool()
    except UserError:
        raise
    except Exception as error:
        raise _problem(f"{path} cannot be instantiated ({_one_line(error)}): fix its __init__.", "user_code") from error


def _problem(sentence: str, code: Code) -> UserError:
    return UserError(f"task.tools: {sentence}", code=code, key="task.tools")


def _faults(found: type) -> Iterator[str]:
    """Yield the reasons that a class is not a tool."""
    for attribute in ("name", "tag"):
        value = getattr(found, attribute, None)
        if not isinstance(value, str) or not _WORD.fullmatch(value):
            fix = f"give the class a {attribute} of letters, digits and underscores, a letter first"
            yield f"has {attribute}={value!r}: {fix}"
    limit = getattr(found, "timeout_s", None)
    if not isinstance(limit, int | float) or isinstance(limit, bool) or not (math.isfinite(limit) and limit > 0):
        yield f"has timeout_s={limit!r}: give the class a number of seconds above 0"
    about = getattr(found, "description", None)
    if not isinstance(about, str) or not about.strip():
        yield f"has description={about!r}: give the class a text that describes the tool"
    call, fix = getattr(found, "call", None), "define it as `async def call(self, text: str) -> str`"
    if not inspect.iscoroutinefunction(call):
        yield f"has no async method call: {fix}"
    elif not _takes(call, "self", "text"):
        yield f"has a method call that does not take exactly one text: {fix}"
    if not _takes(found):
        yield "needs constructor arguments: give each a default"


def _takes(function: object, *arguments: str) -> bool:
    try:
        inspect.signature(cast("type", function)).bind(*arguments)
    except TypeError:
        return False
    except ValueError:
        pass  # A method written in C has no signature.
    return True


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
