"""Tools by their dotted names, and the sentence for what is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.config.schema import TagsConfig, TaskConfig
from rlsys.errors import UserError
from rlsys.rollout.tools.calculator import Calculator
from rlsys.rollout.tools.interface import Tool, check_tools, described, find_tool, open_tools, tool_tags
from tests.rollout.tools.own_tools import Echo

HERE = "tests.rollout.tools.own_tools"
CALCULATOR = "rlsys.rollout.tools.calculator.Calculator"


def task(*tools: str, tags: TagsConfig | None = None) -> TaskConfig:
    return TaskConfig(train_path="", eval_path="", tools=list(tools), tags=tags or TagsConfig())


def test_tools_are_found_and_made_in_order() -> None:
    made = open_tools(task(f"{HERE}.Echo", CALCULATOR))
    assert [type(one) for one in made] == [Echo, Calculator]
    assert tool_tags([f"{HERE}.Echo", CALCULATOR]) == {"echo": "say", "calculator": "calculator"}
    assert open_tools(task()) == ()
    assert list(check_tools(task(f"{HERE}.Echo", f"{HERE}.Scripted", CALCULATOR))) == []


def test_the_type_checker_takes_them_for_tools() -> None:
    tools: list[Tool] = [Calculator(), Echo()]
    assert [tool.timeout_s for tool in tools] == [1.0, 5.0]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("Calculator", "is no dotted name"),
        ("", "is no dotted name"),
        ("no_such_package.Tool", "no_such_package cannot be imported (ModuleNotFoundError"),
        ("tests.rollout.tools.broken.Tool", "cannot be imported"),
        (f"{HERE}.Missing", "has no class Missing"),
        (f"{HERE}.function", "has no class function"),
        (f"{HERE}.NoWord", "has tag='a b'"),
        (f"{HERE}.NoName", "has name=None"),
        (f"{HERE}.Patient", "has timeout_s=inf"),
        (f"{HERE}.Silent", "has description=' '"),
        (f"{HERE}.Plain", "has no async method call"),
        (f"{HERE}.NoText", "does not take one text"),
        (f"{HERE}.Demanding", "needs arguments to be made"),
        (f"{HERE}.TagOfTheAnswer", "tag Answer, which is that of task.tags.answer"),
        (f"{HERE}.Thinks", "tag think, which is that of reasoning"),
    ],
)
def test_what_is_no_tool_is_one_sentence(path: str, why: str) -> None:
    (sentence,) = check_tools(task(path))
    assert sentence.startswith("task.tools: ")
    assert why in sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence
    with pytest.raises(UserError):
        open_tools(task(path))


def test_tools_that_clash_are_named() -> None:
    (twice,) = check_tools(task(f"{HERE}.Echo", f"{HERE}.Echo"))
    assert f"has the name echo, as {HERE}.Echo has" in twice
    (tag,) = check_tools(task(f"{HERE}.Echo", f"{HERE}.SameTag"))
    assert f"has the tag say, which is that of {HERE}.Echo" in tag
    (renamed,) = check_tools(task(f"{HERE}.Echo", tags=TagsConfig(information="SAY")))
    assert "task.tags.information" in renamed


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(UserError) as caught:
        open_tools(task(f"{HERE}.Plain", f"{HERE}.Missing", CALCULATOR))
    assert len(str(caught.value).splitlines()) == 2


def test_a_module_that_breaks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_tool_module.py").write_text("raise RuntimeError('line one\\nline two')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"broken_tool_module cannot be imported \(RuntimeError: line one line two\)"):
        find_tool("broken_tool_module.Tool")


def test_a_tool_that_cannot_be_made_is_named() -> None:
    with pytest.raises(UserError, match=r"Failing cannot be made \(OSError: no such index\)"):
        open_tools(task(f"{HERE}.Failing"))


def test_a_prompt_tells_of_each_tool() -> None:
    assert described([]) == ""
    first, second = described([f"{HERE}.Echo", CALCULATOR]).split(". ")
    assert first.startswith("You can hear an echo by <say> text </say> and")
    assert "<calculator> text </calculator>" in second
