"""Tests of loading tools by their dotted names, and of classes that are no tools."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlsys.config.schema import TaskConfig
from rlsys.errors import Code
from rlsys.rollout.tools.calculator import Calculator
from rlsys.rollout.tools.interface import check_tools, described, named_tools, open_tools, tool_tags
from tests.rollout.tools import own_tools
from tests.support.refusals import refused

HERE = own_tools.__name__
ECHO, CALCULATOR = f"{HERE}.Echo", "rlsys.rollout.tools.calculator.Calculator"


def task(*tools: str) -> TaskConfig:
    return TaskConfig(train_path="", eval_path="", tools=named_tools(tools))


def test_tools_are_made_in_order_and_described() -> None:
    opened = open_tools(task(ECHO, CALCULATOR))
    assert [type(one.tool) for one in opened] == [own_tools.Echo, Calculator]

    async def running() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    loops = [one.thread.run(running()) for one in opened]
    assert opened[0].tool.loop is loops[0] is not loops[1], "its connections belong to the loop of its calls"  # type: ignore[attr-defined]
    assert tool_tags(named_tools([ECHO, CALCULATOR])) == {"echo": "say", "calculator": "calculator"}
    assert list(check_tools(task(ECHO, f"{HERE}.Scripted", CALCULATOR))) == []
    first, second = described(named_tools([ECHO, CALCULATOR])).split(". ")
    assert "<say>" in first
    assert "<calculator>" in second


@pytest.mark.parametrize(
    ("code", "path", "why"),
    [
        ("malformed", "Calculator", "Calculator"),
        ("user_code", "no_such_package.Tool", "ModuleNotFoundError"),
        ("user_code", f"{HERE}.asyncio", "asyncio"),
        ("unknown", f"{HERE}.Missing", "Missing"),
    ],
)
def test_path_without_a_class_is_refused(code: Code, path: str, why: str) -> None:
    with refused(code, "task.tools") as caught:
        open_tools(task(path, CALCULATOR))
    assert why in str(caught.value)


async def without_text(_self: object) -> str:
    return ""


async def with_a_key(_self: object, text: str, *, key: str) -> str:
    return text + key


def needs_a_key(_self: object, key: str) -> None:
    del key


def breaks(_self: object) -> None:
    raise OSError("no such\nindex")


@pytest.mark.parametrize(
    ("code", "changes", "why"),
    [
        ("user_code", {"tag": "a b"}, "tag='a b'"),
        ("user_code", {"timeout_s": float("inf")}, "timeout_s=inf"),
        ("user_code", {"description": " "}, "description=' '"),
        ("user_code", {"call": lambda _self, text: text}, "async"),
        ("user_code", {"call": without_text}, "call(self, text)"),
        ("user_code", {"call": with_a_key}, "call(self, text)"),
        ("user_code", {"__init__": needs_a_key}, "arguments"),
        ("user_code", {"__init__": breaks}, "OSError: no such index"),
        ("conflict", {"tag": "Answer"}, "task.tags.answer"),
        ("conflict", {"tag": "think"}, "reasoning"),
        ("conflict", {"tag": "calculator"}, CALCULATOR),
        ("conflict", {"name": "calculator"}, CALCULATOR),
    ],
)
def test_class_that_is_no_tool_or_clashes_with_another_is_refused(
    monkeypatch: pytest.MonkeyPatch, code: Code, changes: dict[str, Any], why: str
) -> None:
    # The settings of a class are read once a process, so each class has a name of its own.
    name = "".join(filter(str.isalpha, f"Made{code}{why}{''.join(changes)}"))
    monkeypatch.setattr(own_tools, name, type(name, (own_tools.Echo,), changes), raising=False)
    with refused(code, "task.tools") as caught:
        open_tools(task(f"{own_tools.__name__}.{name}", CALCULATOR))
    assert why in str(caught.value)
