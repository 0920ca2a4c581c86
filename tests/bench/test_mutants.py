"""The mutants of bench/mutants fit the code as it is; `python -m bench.mutants` proves that each is caught."""

from __future__ import annotations

import shutil
from pathlib import Path

from bench.mutants.__main__ import mutants
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
        assert all((PROJECT / test.partition("::")[0]).exists() for test in mutant.tests), mutant.name
