"""Public names are explained and cheap to import; those of before the packages moved lead to the very same modules."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import rlsys
import rlsys.apps.api

CODE = """
import sys, warnings
import rlsys
assert not {"torch", "ray", "transformers"} & sys.modules.keys(), "an import of the package is cheap"
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
assert interface.find_tool("rlsys.tools.calculator.Calculator") is Calculator, "as a config may name it"
for never in ("rlsys.tools.nothing", "rlsys.nothing"):
    try:
        __import__(never)
    except ModuleNotFoundError as error:
        assert error.name == never, error.name
    else:
        raise AssertionError(never)
import rlsys.api.trainer
from rlsys.api import SearchR1Trainer as old
from rlsys import SearchR1Trainer as new
assert old is new
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)


def test_every_public_name_is_exported_and_explained() -> None:
    assert rlsys.__all__ == rlsys.apps.api.__all__
    for name in rlsys.__all__:
        public = getattr(rlsys, name)
        methods = [member for member, value in vars(public).items() if inspect.isfunction(value) and member[0] != "_"]
        assert all(map(inspect.getdoc, [public, *(getattr(public, member) for member in methods)])), name
    with pytest.raises(AttributeError, match="SearchR2Trainer"):
        _ = rlsys.SearchR2Trainer


def test_an_old_name_is_the_same_module_and_warns_once() -> None:
    done = run("-c", CODE)
    assert done.returncode == 0, done.stderr


def test_the_command_line_runs_by_its_old_name() -> None:
    done = run("-m", "rlsys.cli.main", "doctor", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--json" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr
