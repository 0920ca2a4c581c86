"""docs/commands.md says what the command line says, docs/api.md what the Python API says."""

from __future__ import annotations

import re
import sys
import types

import pytest

import rlsys
from scripts import api_reference as of_python
from scripts import commands_reference as of_commands

MADE = {"commands": of_commands, "api": of_python}


@pytest.mark.parametrize("page", MADE)
def test_the_page_is_up_to_date(page: str) -> None:
    made = MADE[page]
    assert made.FILE.name == f"{page}.md"
    assert made.FILE.read_text(encoding="utf-8") == made.render(), f"run `{made.COMMAND}`"


def test_every_command_is_on_it() -> None:
    page = of_commands.render()
    for heading in ("## `rlsys train`", "### `rlsys convert mg2hf`", "#### `rlsys data prepare own`"):
        assert f"\n{heading}\n" in page
    assert "`--dry-run / --no-dry-run`: Print the resolved plan and stop." in page


def test_every_class_is_on_it_with_its_parameters_methods_and_properties() -> None:
    sections = dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^## )", of_python.render(), re.MULTILINE | re.DOTALL))
    assert list(sections) == rlsys.__all__
    trainer, dense, result = (sections[name] for name in ("SearchR1Trainer", "DenseRetriever", "TrainingResult"))
    assert "* `output_dir` (`str | Path`, default `'outputs'`, *by name*): folder of runs.\n" in trainer
    assert "* `index_path` (`str | Path`): folder of an index; `from_documents` and " in dense  # Inherited.
    assert "(`task.tools`, see [tools](tools.md))" in trainer
    assert "**Returns**: `DenseRetriever`\n" in dense
    assert "**Returns**: `AbstractContextManager[Mapping[str, Any]]`\n" in dense
    assert "* `command` (`str`): The command line that trains so.\n" in result
    assert "### `TrainingResult.evaluate`\n" in result
    assert "* `summary` (`Mapping[str, Any]`): What `summary.json` holds: " in result


def test_own_names_of_types_are_explained() -> None:
    modules = [sys.modules[getattr(rlsys, name).__module__] for name in rlsys.__all__]
    named = {name for one in modules for name, value in vars(one).items() if isinstance(value, types.UnionType)}
    parameters, _, explained = of_python.render().partition("\n## Types\n")
    used = {
        word for kind in re.findall(r"^\* `\w+` \(`([^`]+)`", parameters, re.M) for word in re.findall(r"\w+", kind)
    }
    assert set(re.findall(r"^\* `(\w+)`", explained, re.M)) == named & used
