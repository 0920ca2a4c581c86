"""Tests that every mutant can be planted, and of verdicts on tests that hang or cannot run."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from bench.mutants.__main__ import HANGS, first_failure, mutants
from bench.suite import groups
from tests.support.paths import PROJECT


def test_every_mutant_can_be_planted_and_names_tests_that_exist(tmp_path: Path) -> None:
    found = mutants()
    assert len(found) >= 60
    assert len({one.name for one in found}) == len(found)
    for mutant in found:
        target = tmp_path / mutant.file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(PROJECT / mutant.file, target)
        mutant.plant(tmp_path)
        assert target.read_text() != (PROJECT / mutant.file).read_text()
        for file, _, test in (one.partition("::") for one in mutant.tests):
            assert f"def {test.partition('[')[0]}" in (PROJECT / file).read_text(), mutant.name


def test_tests_that_hang_catch_a_mutant_and_those_that_cannot_run_are_an_error(tmp_path: Path) -> None:
    def judged(code: str, timeout_s: float = 300.0) -> str:
        return first_failure([sys.executable, "-c", code], tmp_path, timeout_s)

    assert judged("import time; time.sleep(600)", timeout_s=0.1) == HANGS
    assert judged("pass") == ""
    assert judged("print('FAILED tests/x.py::test_y - no'); exit(1)") == "tests/x.py::test_y"
    with pytest.raises(RuntimeError, match="exited with 4: no such file"):
        judged("print('no such file'); exit(4)")


def test_a_long_file_is_a_group_of_its_own_and_the_others_of_a_folder_are_one() -> None:
    cases = [("tests.live.test_a", 50.0), ("tests.live.test_a", 25.0), ("tests.live.test_b", 50.0)]
    cases += [("tests.live.deep.test_c", 9.0), ("tests.test_d", 1.0)]
    assert groups(cases) == [("tests/live/test_a.py", 2, 75.0), ("tests/live", 2, 59.0), ("tests", 1, 1.0)]
