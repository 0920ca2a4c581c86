"""What docs/tools.md shows works as it says."""

from __future__ import annotations

import re
import sys
from types import ModuleType

import pytest
import yaml

from rlsys.config.schema import TaskConfig, schema_keys
from rlsys.rollout.agent.episode import call_tool, render_call
from rlsys.rollout.tools.interface import check_tools, open_tools
from tests.support.paths import PROJECT

PAGE = (PROJECT / "docs/tools.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def my_tools(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("my_tools")
    exec(blocks("python")[0], module.__dict__)
    monkeypatch.setitem(sys.modules, "my_tools", module)
    return module


def test_the_settings_are_keys_and_name_tools(my_tools: ModuleType) -> None:
    for block in map(yaml.safe_load, blocks("yaml")):
        assert {f"{group}.{key}" for group, keys in block.items() for key in keys} <= set(schema_keys())
        assert list(check_tools(TaskConfig(**block["task"]))) == []
    assert hasattr(my_tools, "Dictionary")


@pytest.mark.usefixtures("my_tools")
async def test_the_example_answers_and_fails_as_the_page_says() -> None:
    task = TaskConfig(tools=["my_tools.Dictionary"])
    (tool,) = open_tools(task)
    assert (await call_tool(tool, "etude")).text.startswith("a short piece")
    failed = await call_tool(tool, "xyz")
    assert render_call(tool.name, failed.text, failed.error) == "dictionary failed: xyz is in no dictionary"
