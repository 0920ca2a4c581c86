"""Loads the tools of a task. A tool has a tag that the policy writes, and an async method that answers the text inside.

A class is a tool if it has the attributes of `Tool`; no base class is required. Keyword-only constructor arguments are
its settings (`rlsys.components`). Each process that runs episodes makes one instance of the class and calls it
concurrently. All of a tool's code runs on an event loop of its own. Blocking work delays the tool's other calls, so it
belongs in a thread (`asyncio.to_thread`). A `ToolSet` is a class that has several tools, such as those of a server.

Invariant: the tools of `open_tools` have distinct names and tags, none of which is a tag of the protocol. No tool is
instantiated before all have passed the checks.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol, cast

from rlsys.components import check_callable
from rlsys.config.custom import OwnComponent, custom_variant
from rlsys.config.schema import CustomTool, TaskConfig
from rlsys.data.question import Question
from rlsys.errors import Code, UserError
from rlsys.search.web.loop import LoopThread

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class EpisodeFacts:
    """The episode for which a tool keeps state."""

    question: Question
    sample: int
    """Index of the episode among the episodes of its prompt group."""


class Tool(Protocol):
    """A tool that the policy can call. All attributes but the methods are read from the class, before it is instantiated.

    A tool with state of an episode has, instead of `call`, a method

        async def open(self, episode: EpisodeFacts) -> state

    which returns an object with `async def call(self, text: str) -> str` and, optionally, `async def close(self) -> None`.
    It is opened at the first call in an episode and closed once, when the episode has ended in any way.

    A tool with arguments also has `parameters`: the JSON schema of an object. An agent with function calls then passes
    the JSON text of such an object. With tags, the policy writes any text; `arguments_of` reads both.
    """

    @property
    def name(self) -> str:
        """Name in metrics, trajectories and samples: letters, digits and underscores, beginning with a letter."""

    @property
    def tag(self) -> str:
        """Tag name: the policy writes <tag> text </tag>."""

    @property
    def timeout_s(self) -> float:
        """Time limit of a call, and each of opening and closing. A call that takes longer is cancelled, and the policy
        reads an error."""

    @property
    def description(self) -> str:
        """Description for the prompt, such as "look a word up"; completes "You can ... by <tag> text </tag>"."""

    async def call(self, text: str) -> str:
        """Answer `text`: the text between the tags, stripped, never empty. The policy reads the result.

        Do not trust `text`, which the policy wrote. The caller cuts the result and neutralises tags in it. Raise
        `ToolError` for a text that cannot be answered; the policy also reads the message of any other exception.
        """


class Shared(NamedTuple):
    """The parts of an engine's episodes that a `ToolSet` may use."""

    search: Any = None
    """Search interface of the episodes; None if the policy cannot search."""
    spans: Callable[[str], Sequence[tuple[int, int]]] | None = None
    """Text -> character range of each of its tokens."""
    observation_tokens: int = 0
    """Number of tokens in an observation, without the text around it."""


ALONE = Shared()


class ToolSet(ABC):
    """Base of classes that have several tools. The constructor checks its settings, and does nothing else."""

    tools: Sequence[Tool] = ()
    """The tools; their description and parameters may be missing before `open`."""
    variables: Sequence[str] = ()
    """Names of the environment variables that are needed in the processes that run episodes."""

    @abstractmethod
    def open(self, shared: Shared) -> LoopThread | None:
        """Start, and return the thread that runs the tools; its `abandon` ends all that was started.

        None stands for trusted tools that run on the event loop of the episodes and never block it. These may raise
        `SearchFailed`. Raises UserError.
        """


class OpenTool(NamedTuple):
    """A tool, and the thread whose event loop runs all of its code; None for the event loop of the episodes."""

    tool: Tool
    thread: LoopThread | None


class ToolError(Exception):
    """Raised for a call that cannot be answered. The policy reads the message after the tool's name."""


def named_tools(paths: Sequence[str]) -> list[CustomTool]:
    """Return the settings of the tools `paths`, each package.module.Class. Raises UserError for a path that names none."""
    return [cast("CustomTool", custom_variant(CustomTool, path)(path)) for path in paths]


def has_state(tool: Any) -> bool:
    """True if a tool, or its class, keeps state for an episode."""
    return inspect.iscoroutinefunction(getattr(tool, "open", None))


def parameters_of(tool: Any) -> Mapping[str, Any] | None:
    """Return the JSON schema of a tool's arguments; None for a tool that takes a text."""
    return getattr(tool, "parameters", None)


def arguments_of(text: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments in `text`: a JSON object, or plain text for the only required, or only, parameter.

    Raises ToolError for a text that is neither. Types and values are not checked.
    """
    known = parameters.get("properties") or {}
    try:
        given = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        given = None
    if isinstance(given, dict) and (not known or given.keys() <= known.keys()):
        return given
    wanted = [*(parameters.get("required") or known)]
    if len(wanted) == 1 and known.get(wanted[0], {}).get("type") == "string":
        return {wanted[0]: text}
    raise ToolError(f"its arguments must be {shape_of(parameters)}")


def shape_of(parameters: Mapping[str, Any]) -> str:
    """Return the form of a tool's arguments in words."""
    known, needed = parameters.get("properties") or {}, parameters.get("required") or ()
    required = ", ".join(f'"{name}": ...' for name in needed)
    optional = " and ".join(f'"{name}"' for name in known if name not in needed)
    return f"a JSON object {{{required}}}" + (f" that may also have {optional}" if optional else "")


def tool_tags(tools: Sequence[CustomTool]) -> dict[str, str]:
    """Return tool name -> tag. Raises UserError for a class that is not a tool."""
    return {tool.name: tool.tag for settings in tools for tool in _declared(settings)}


def tool_variables(tools: Sequence[CustomTool]) -> list[str]:
    """Return the names of the environment variables that tools need in the processes that run episodes."""
    sets = [OwnComponent(settings)() for settings in tools if _is_set(settings.component)]
    return [name for each in sets for name in each.variables]


def open_tools(task: TaskConfig, shared: Shared = ALONE) -> tuple[OpenTool, ...]:
    """Instantiate each tool of `task`. Raises UserError with one line per problem and the code of the first problem."""
    if problems := list(check_tools(task)):
        raise UserError("\n".join(map(str, problems)), code=problems[0].code, key=problems[0].key)
    opened: list[OpenTool] = []
    try:
        for settings in task.tools:
            opened += _opened_set(settings, shared) if _is_set(settings.component) else [_made(settings)]
    except BaseException:
        abandon(each.thread for each in opened)
        raise
    return tuple(opened)


def abandon(threads: Iterable[LoopThread | None]) -> None:
    """Stop the threads of tools, without waiting for code that still runs. Tools may share one."""
    for thread in dict.fromkeys(threads):
        if thread is not None:
            thread.abandon()


def described(tools: Sequence[CustomTool]) -> str:
    """Return the prompt's sentences about the tools, one per tool; empty without tools.

    A `ToolSet` is opened for it, and closed.
    """
    sentences: list[str] = []
    for settings in tools:
        if not _is_set(settings.component):
            sentences += map(_sentence, _declared(settings))
            continue
        opened = _opened_set(settings, ALONE)
        sentences += [_sentence(each.tool) for each in opened]
        abandon(each.thread for each in opened)
    return " ".join(sentences)


def _sentence(tool: Any) -> str:
    returned = "and the result will be returned between <information> and </information>."
    if (parameters := parameters_of(tool)) is None:
        return f"You can {tool.description} by <{tool.tag}> text </{tool.tag}> {returned}"
    about = " ".join(tool.description.split()).rstrip(".")
    return f"You can {about} by <{tool.tag}> {shape_of(parameters)} </{tool.tag}> {returned}"


def check_tools(task: TaskConfig) -> Iterator[UserError]:
    """Yield each problem of `task.tools`."""
    tags = task.tags
    taken = {"think": "reasoning", tags.search.lower(): "task.tags.search", tags.answer.lower(): "task.tags.answer"}
    taken[tags.information.lower()] = "task.tags.information"
    names: dict[str, str] = {}
    for settings in task.tools:
        path = settings.kind
        try:
            declared = _declared(settings)
            lacking = [name for name in tool_variables([settings]) if not os.environ.get(name)]
        except UserError as problem:
            yield problem
            continue
        if lacking:
            yield _problem(
                f"{path} needs the environment variable {lacking[0]}, which is not set: export it.", "missing"
            )
        for tool in declared:
            if tool.name in names:
                sentence = f"{path} and {names[tool.name]} both have the name {tool.name}: rename or remove one."
                yield _problem(sentence, "conflict")
            elif owner := taken.get(tool.tag.lower()):
                yield _problem(f"{path} and {owner} both use the tag {tool.tag}: rename one.", "conflict")
            names.setdefault(tool.name, path)
            taken.setdefault(tool.tag.lower(), path)


def _is_set(component: Any) -> bool:
    return inspect.isclass(component) and issubclass(component, ToolSet)


def _declared(settings: CustomTool) -> Sequence[Any]:
    """Return what has the names and tags of the tools: the class of a tool, or the tools of a set that is not open."""
    if not _is_set(settings.component):
        return (_class_of(settings),)
    tools: Sequence[Tool] = OwnComponent(settings)().tools
    return tools


def _class_of(settings: CustomTool) -> Any:
    """Return the class of a tool. Raises UserError with one sentence if it is not a tool."""
    found = settings.component
    if wrong := next(_faults(found), None):
        raise _problem(f"{settings.kind} {wrong}: see docs/tutorials/own-tool.md.", "user_code")
    name, argument = ("open", "episode") if has_state(found) else ("call", "text")
    check_callable(getattr(found, name), f"{settings.kind}.{name}", settings.key, ("self", argument))
    return found


def _made(settings: CustomTool) -> OpenTool:
    async def make() -> Any:
        return OwnComponent(settings)()

    thread = LoopThread(f"tool-{_class_of(settings).name}")
    return OpenTool(thread.run(make()), thread)


def _opened_set(settings: CustomTool, shared: Shared) -> list[OpenTool]:
    found: ToolSet = OwnComponent(settings)()
    thread = found.open(shared)
    return [OpenTool(tool, thread) for tool in found.tools]


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _problem(sentence: str, code: Code) -> UserError:
    return UserError(f"task.tools: {sentence}", code=code, key="task.tools")


def _faults(found: Any) -> Iterator[str]:
    """Yield the reasons that a component is not a tool."""
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
    if not (has_state(found) or inspect.iscoroutinefunction(getattr(found, "call", None))):
        yield "has no async method call: define it as `async def call(self, text: str) -> str`"
