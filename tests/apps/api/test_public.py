"""All that is public is exported and explained, and importing it is cheap."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import rlsys
import rlsys.apps.api
from tests.support.paths import PROJECT


def test_every_public_name_is_exported_and_explained() -> None:
    assert rlsys.__all__ == rlsys.apps.api.__all__
    for name in rlsys.__all__:
        public = getattr(rlsys, name)
        assert inspect.getdoc(public), name
        methods = {member: value for member, value in vars(public).items() if inspect.isfunction(value)}
        assert all(inspect.getdoc(getattr(public, one)) for one in methods if not one.startswith("_")), name
    with pytest.raises(AttributeError, match="SearchR2Trainer"):
        _ = rlsys.SearchR2Trainer


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, rlsys; sys.exit(any(name in sys.modules for name in ('torch', 'ray', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT, check=False).returncode == 0
