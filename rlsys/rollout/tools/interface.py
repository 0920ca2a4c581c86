"""Tools of a task: a tag that the policy writes, and an async call that answers the text inside it.

A class is a tool if it has the attributes of `Tool` and needs no arguments; it inherits from nothing. Every process that
runs episodes makes one of it, and calls it for many episodes at once on the event loop that they run on: whatever takes
long without waiting belongs in a thread (`asyncio.to_thread`).

Invariant: what `open_tools` gives has names and tags that differ from each other and from the tags of the protocol.
Finding a tool imports its module; nothing is made of it before all are found to be sound.
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
    """Something that the policy can call. All but `call` are attributes of the class, read before there is one of it."""

    @property
    def name(self) -> str:
        """Its name in figures, trajectories and samples: letters, digits and underscores, a letter first."""

    @property
    def tag(self) -> str:
        """The word of its tags: the policy writes <tag> text </tag>."""

    @property
    def timeout_s(self) -> float:
        """A call that takes longer is cancelled, and the policy is told."""

    @property
    def description(self) -> str:
        """For the prompt: what one can do with it, such as "look a word up"; completes "You can ... by <tag> text </tag>"."""

    async def call(self, text: str) -> str:
        """Answer `text`, which stood between the tags, stripped and never empty; the policy reads the answer.

        Untrusted on both sides: the policy wrote `text`, and whatever comes back is cut and cleared of tags by the
        caller. Raise `ToolError` for what cannot be answered; any other exception is told to the policy as well.
        """


class ToolError(Exception):
    """A call that cannot be answered. The policy reads the message, after the name of the tool."""


def find_tool(path: str) -> type[Any]:
    """The class called `path`. Imports its module; raises UserError with one sentence where it is no tool."""
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        raise _problem(f"{path!r} is no dotted name: write it like package.module.Class.", "malformed")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise _problem(
            f"{module_name} cannot be imported ({_one_line(error)}): mend it, or put the folder that holds it into "
            "PYTHONPATH.",
            "user_code",
        ) from error
    found = getattr(module, attribute, None)
    if not inspect.isclass(found):
        raise _problem(f"{module_name} has no class {attribute}: define it, or mend the name.", "unknown")
    if wrong := next(_faults(found), None):
        raise _problem(f"{path} {wrong}; see docs/tools.md.", "user_code")
    return found


def tool_tags(paths: Sequence[str]) -> dict[str, str]:
    """Name -> tag of each tool. Raises UserError for what is no tool."""
    return {tool.name: tool.tag for tool in map(find_tool, paths)}


def open_tools(task: TaskConfig) -> tuple[Tool, ...]:
    """Make each tool of `task`. Raises UserError with one line for each problem, and the code of the first."""
    if problems := list(_problems(task)):
        raise UserError("\n".join(map(str, problems)), code=problems[0].code, key=problems[0].key)
    return tuple(_made(path) for path in task.tools)


def check_tools(task: TaskConfig) -> Iterator[str]:
    """One sentence for each problem of `task.tools`."""
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
            sentence = f"{path} has the name {tool.name}, as {names[tool.name]} has: rename one, or leave it out."
            yield _problem(sentence, "conflict")
        elif owner := taken.get(tool.tag.lower()):
            yield _problem(f"{path} has the tag {tool.tag}, which is that of {owner}: rename one.", "conflict")
        names.setdefault(tool.name, path)
        taken.setdefault(tool.tag.lower(), path)


def described(paths: Sequence[str]) -> str:
    """The sentences of a prompt about the tools, one for each; empty without any."""
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
        raise _problem(f"{path} cannot be made ({_one_line(error)}): mend its __init__.", "user_code") from error


def _problem(sentence: str, code: Code) -> UserError:
    return UserError(f"task.tools: {sentence}", code=code, key="task.tools")


def _faults(found: type) -> Iterator[str]:
    """Reasons why a class is no tool."""
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
        yield f"has description={about!r}: give the class a text that says what one can do with it"
    call, fix = getattr(found, "call", None), "define it as `async def call(self, text: str) -> str`"
    if not inspect.iscoroutinefunction(call):
        yield f"has no async method call: {fix}"
    elif not _takes(call, "self", "text"):
        yield f"has a method call that does not take one text: {fix}"
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


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
