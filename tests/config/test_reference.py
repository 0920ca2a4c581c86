"""Every key is read by the code that runs, and docs/configuration.md says what the schema says."""

from __future__ import annotations

import re

import pytest

from rlsys.config.schema import RunConfig, schema_keys
from scripts.config_reference import COMMAND, FILE, PACKAGE, fields_read, render, running_code, schema_classes


@pytest.fixture(scope="module")
def page() -> str:
    """Seconds of work: all code that runs is searched for who reads a key."""
    return render()


def test_every_key_is_read_outside_of_the_config_package() -> None:
    classes = schema_classes(RunConfig)
    parts = {*classes, "Literal"}  # A `kind` is asked for by the reader of the schema.
    keys = {
        (owner, name) for owner, types in classes.items() for name in types if not parts & {*types[name].split("|")}
    }
    assert keys - fields_read(running_code(), classes).keys() == set()


def test_the_page_is_up_to_date_and_has_every_key_once_with_its_meaning(page: str) -> None:
    """A meaning says more than a bound does."""
    assert FILE.read_text(encoding="utf-8") == page, f"run `{COMMAND}`"
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert sorted(row[0] for row in rows) == sorted(f"| `{key}`" for key in schema_keys())
    bare = re.compile(r"(With `\S+` alone\. )?(Must [^.]*(\.\d+)?[^.]*\.)?")
    assert [row[0] for row in rows if bare.fullmatch(row[4])] == []


def test_rows_by_hand(page: str) -> None:
    assert "| `search.timeout_s` | number | `30.0` | s |" in page
    assert "| `actor.parallel.pp_layers` | list of integer or null | `null` | layers | Layers of each" in page
    # Actor and critic have settings of one class and defaults of their own.
    assert "| `actor.optimizer.lr` | number | `1e-06` |" in page
    assert "| `critic.optimizer.lr` | number | `1e-05` |" in page
    # A kind has its keys, and says so.
    assert '| `trainer.schedule.kind` | `sequential`, `pipelined`, `async` | `"pipelined"` |' in page
    alone = "With `trainer.schedule.kind=async` alone. Most versions"
    assert f"| `trainer.schedule.max_staleness` | integer | `1` | versions | {alone}" in page


def test_the_reader_of_a_key_is_a_file_that_reads_it(page: str) -> None:
    """By hand: the optimiser of the trained groups reads its betas, and nothing else does."""
    (row,) = [line for line in page.splitlines() if line.startswith("| `actor.optimizer.beta1` |")]
    assert row.endswith("| `trainer/optimizer.py` |")
    assert "config.beta1" in (PACKAGE / "trainer" / "optimizer.py").read_text()
