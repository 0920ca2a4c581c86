"""Names of before the packages moved still lead to the very same modules."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import rlsys.tools.interface
    from rlsys.tools.calculator import Calculator
    from rlsys.tools.interface import ToolError
own = [one for one in caught if "rlsys" in str(one.message)]
assert [(one.category, str(one.message)) for one in own] == [(DeprecationWarning, "rlsys.tools is now rlsys.rollout.tools")]
assert own[0].filename == "<string>", own[0].filename
import rlsys.rollout.tools.interface as interface
import rlsys.rollout.tools.calculator as calculator
assert rlsys.tools.interface is interface and ToolError is interface.ToolError and Calculator is calculator.Calculator
assert interface.__spec__.name == interface.__name__ == "rlsys.rollout.tools.interface"
for never in ("rlsys.tools.nothing", "rlsys.nothing"):
    try:
        __import__(never)
    except ModuleNotFoundError as error:
        assert error.name == never, error.name
    else:
        raise AssertionError(never)
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=600, check=False)


def test_an_old_name_is_the_same_module_and_warns_once() -> None:
    done = run("-c", CODE)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("first", ["rlsys.api.trainer", pytest.param("rlsys.apps.api.trainer", marks=pytest.mark.slow)])
def test_the_order_of_imports_is_all_one(first: str) -> None:
    code = f"import {first}; from rlsys.api import SearchR1Trainer as a; from rlsys import SearchR1Trainer as b; assert a is b"
    done = run("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore:rlsys.tools is now")
def test_a_config_may_name_a_tool_by_its_old_path() -> None:
    from rlsys.rollout.tools.calculator import Calculator
    from rlsys.rollout.tools.interface import find_tool

    assert find_tool("rlsys.tools.calculator.Calculator") is Calculator


def test_the_command_line_runs_by_its_old_name() -> None:
    done = run("-m", "rlsys.cli.main", "doctor", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--json" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr
