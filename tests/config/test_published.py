"""Tests that docs/published.md says what the published experiments set."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from rlsys.config.compose import PROJECT_CONFIGS, as_dict, load_config
from rlsys.config.schema import RunConfig, free_maps
from tests.support.paths import PROJECT

PAGE = (PROJECT / "docs" / "published.md").read_text()
SECTIONS = [section for section in PAGE.split("\n## ") if "\nExperiments: " in section]
ROWS = [(section, row) for section in SECTIONS for row in re.findall(r"^\| (?!theirs).*\|$", section, re.MULTILINE)]
EXPERIMENTS = re.findall(r"`([^`]+)`", " ".join(re.findall(r"^Experiments: .*", PAGE, re.MULTILINE)))
SETTING = re.compile(r"`([a-z_0-9]+(?:\.[a-z_0-9]+)*)=([^`]*)`")


def flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value of each leaf."""
    for name, value in tree.items():
        if isinstance(value, dict) and prefix + name not in free_maps():
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def read(text: str) -> Any:
    """Return the value that `text` stands for; numbers are floats."""
    try:
        return float(text)
    except ValueError:
        return yaml.safe_load(text)


@pytest.mark.parametrize("experiment", dict.fromkeys(EXPERIMENTS))
def test_experiment_sets_what_its_tables_say_and_nothing_else(experiment: str) -> None:
    rows = [row for section, row in ROWS if f"`{experiment}`" in section.partition("\n\n")[2].partition("\n")[0]]
    ours = [setting for row in rows for setting in SETTING.findall(row.split(" | ")[1])]
    assert len(ours) > 30
    name = str(PROJECT / experiment) if "/" in experiment else experiment
    composed = dict(flat(as_dict(load_config(name))))
    assert dict(flat(as_dict(load_config(name, [f"{key}={value}" for key, value in ours])))) == composed
    defaults = dict(flat(as_dict(RunConfig())))
    changed = {key for key, value in composed.items() if value != defaults.get(key)}
    assert changed - {key for key, _ in ours} == set()


def test_every_difference_has_a_remark() -> None:
    silent = []
    for _, row in ROWS:
        theirs, ours, remark = (cell.strip() for cell in row.strip("|").split(" | "))
        value = read(theirs.partition(": ")[2].strip("`"))
        values = [read(text) for _, text in SETTING.findall(ours)]
        if not remark and (not values or any(one != value for one in values)):
            silent.append(row)
    assert silent == []


def test_quirks_are_the_keys_that_compat_turns_on() -> None:
    table = PAGE.partition("## What only a key reproduces")[2].partition("\n## ")[0]
    named = re.findall(r"^\| [\w ]+ \| `([\w.]+)", table, re.MULTILINE)
    turned_on = dict(flat(yaml.safe_load((PROJECT_CONFIGS / "compat" / "search_r1.yaml").read_text())))
    assert {*named, "rollout.sampling.accept_truncation"} == turned_on.keys()
