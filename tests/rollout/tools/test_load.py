"""Tools by their dotted names, and classes that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.config.schema import TagsConfig, TaskConfig
from rlsys.errors import Code
from rlsys.rollout.tools.calculator import Calculator
from rlsys.rollout.tools.interface import Tool, check_tools, described, find_tool, open_tools, tool_tags
from tests.rollout.tools.own_tools import Echo
from tests.support.refusals import refused

HERE = "tests.rollout.tools.own_tools"
CALCULATOR = "rlsys.rollout.tools.calculator.Calculator"


def task(*tools: str, tags: TagsConfig | None = None) -> TaskConfig:
    return TaskConfig(train_path="", eval_path="", tools=list(tools), tags=tags or TagsConfig())


def test_tools_are_found_and_made_in_order() -> None:
    made: tuple[Tool, ...] = open_tools(task(f"{HERE}.Echo", CALCULATOR))
    assert [type(one) for one in made] == [Echo, Calculator]
    assert tool_tags([f"{HERE}.Echo", CALCULATOR]) == {"echo": "say", "calculator": "calculator"}
    assert open_tools(task()) == ()
    assert list(check_tools(task(f"{HERE}.Echo", f"{HERE}.Scripted", CALCULATOR))) == []


@pytest.mark.parametrize(
    ("code", "path", "why"),
    [
        ("malformed", "Calculator", "Calculator"),
        ("malformed", "", "''"),
        ("user_code", "no_such_package.Tool", "ModuleNotFoundError"),
        ("unknown", f"{HERE}.Missing", "Missing"),
        ("unknown", f"{HERE}.function", "function"),
        ("user_code", f"{HERE}.NoWord", "tag='a b'"),
        ("user_code", f"{HERE}.NoName", "name=None"),
        ("user_code", f"{HERE}.Patient", "timeout_s=inf"),
        ("user_code", f"{HERE}.Silent", "description=' '"),
        ("user_code", f"{HERE}.Plain", "async"),
        ("user_code", f"{HERE}.NoText", "one text"),
        ("user_code", f"{HERE}.Demanding", "arguments"),
        ("conflict", f"{HERE}.TagOfTheAnswer", "task.tags.answer"),
        ("conflict", f"{HERE}.Thinks", "reasoning"),
    ],
)
def test_each_thing_that_is_no_tool_is_refused_with_its_reason(code: Code, path: str, why: str) -> None:
    (sentence,) = check_tools(task(path))
    assert why in sentence
    with refused(code, "task.tools"):
        open_tools(task(path))


@pytest.mark.parametrize(
    ("paths", "tags", "named"),
    [
        ([f"{HERE}.Echo", f"{HERE}.Echo"], TagsConfig(), f"{HERE}.Echo"),
        ([f"{HERE}.Echo", f"{HERE}.SameTag"], TagsConfig(), f"{HERE}.Echo"),
        ([f"{HERE}.Echo"], TagsConfig(information="SAY"), "task.tags.information"),
    ],
)
def test_tools_that_clash_are_named(paths: list[str], tags: TagsConfig, named: str) -> None:
    with refused("conflict", "task.tools") as caught:
        open_tools(task(*paths, tags=tags))
    assert named in str(caught.value)


def test_all_problems_are_told_at_once() -> None:
    with refused("user_code", "task.tools") as caught:
        open_tools(task(f"{HERE}.Plain", f"{HERE}.Missing", CALCULATOR))
    assert len(str(caught.value).splitlines()) == 2


def test_a_module_or_a_class_that_breaks_is_quoted_on_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_tool_module.py").write_text("raise RuntimeError('line one\\nline two')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with refused("user_code", "task.tools") as caught:
        find_tool("broken_tool_module.Tool")
    assert "RuntimeError: line one line two" in str(caught.value)
    with refused("user_code", "task.tools") as caught:
        open_tools(task(f"{HERE}.Failing"))
    assert "OSError: no such index" in str(caught.value)


def test_a_prompt_tells_of_each_tool() -> None:
    assert described([]) == ""
    first, second = described([f"{HERE}.Echo", CALCULATOR]).split(". ")
    assert "<say>" in first
    assert "<calculator>" in second
