"""The example of docs/tools.md works as the page says."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import yaml

from rlsys.config.schema import TaskConfig
from rlsys.rollout.agent.episode import call_tool, render_call
from rlsys.rollout.tools.interface import check_tools, open_tools
from tests.docs.pages import fenced_blocks
from tests.support.paths import PROJECT

PAGE = PROJECT / "docs" / "tools.md"


async def test_the_example_answers_and_fails_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("my_tools")
    exec(fenced_blocks(PAGE, "python")[0], module.__dict__)
    monkeypatch.setitem(sys.modules, "my_tools", module)
    for block in map(yaml.safe_load, fenced_blocks(PAGE, "yaml")):
        assert list(check_tools(TaskConfig(**block["task"]))) == []
    (tool,) = open_tools(TaskConfig(tools=["my_tools.Dictionary"]))
    assert (await call_tool(tool, "etude")).text.startswith("a short piece")
    failed = await call_tool(tool, "xyz")
    assert render_call(tool.name, failed.text, failed.error) == "dictionary failed: xyz is in no dictionary"
