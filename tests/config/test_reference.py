"""docs/configuration.md says what the schema says."""

from __future__ import annotations

import re

from rlsys.config.schema import ModelConfig, schema_keys
from scripts.config_reference import COMMAND, FILE, PACKAGE, explanations, render


def test_the_page_is_up_to_date() -> None:
    assert FILE.read_text(encoding="utf-8") == render(), f"run `{COMMAND}`"


def test_every_key_is_on_the_page_once() -> None:
    page = render()
    for key in schema_keys():
        assert page.count(f"| `{key}` |") == 1, key


def test_a_row_by_hand() -> None:
    assert (
        "| `model.path` | text | required |  | Folder of a Hugging Face checkpoint (config.json, safetensors, "
        "tokenizer). | `"
    ) in render()
    assert "| `search.timeout_s` | number | `30.0` | s |" in render()
    assert "| `trainer.seed` | integer | `1234` |  |" in render()
    assert "| `actor.parallel.pp_layers` | list of integer or null | `null` | layers | Layers of each" in render()
    assert '| `cluster.device` | `cpu`, `gpu` | `"gpu"` |' in render()


def test_a_part_may_have_defaults_of_its_own() -> None:
    """A critic learns faster than an actor, though both settings are of one class."""
    page = render()
    assert "| `actor.optimizer.lr` | number | `1e-06` |" in page
    assert "| `critic.optimizer.lr` | number | `1e-05` |" in page


def test_an_explanation_belongs_to_the_field_above_it() -> None:
    about = explanations(ModelConfig)
    assert about["recompute"].startswith("Recompute activations")
    assert set(about) == {"path", "layers", "dtype", "recompute", "attention", "fusions", "fp8"}


def test_who_reads_a_key_is_a_file_that_does() -> None:
    """By hand: the optimiser of the trained groups reads its betas, and nothing else does."""
    (row,) = [line for line in render().splitlines() if line.startswith("| `actor.optimizer.beta1` |")]
    assert row.endswith("| `trainer/optimizer.py` |")
    assert "config.beta1" in (PACKAGE / "trainer" / "optimizer.py").read_text()


def test_every_key_has_a_meaning() -> None:
    """Besides what it may be, which a bound says."""
    rows = [line.split(" | ") for line in render().splitlines() if line.startswith("| `")]
    assert len(rows) == len(schema_keys())
    bare = re.compile(r"(With `\S+` alone\. )?(Must [^.]*(\.\d+)?[^.]*\.)?")
    assert [row[0] for row in rows if bare.fullmatch(row[4])] == []


def test_each_kind_has_its_keys() -> None:
    """By hand: of the schedules the asynchronous one alone has keys, and its kind is not the default."""
    page = render()
    assert (
        '| `trainer.schedule.kind` | `sequential`, `pipelined`, `async` | `"pipelined"` |  | `sequential`: Noth' in page
    )
    alone = "With `trainer.schedule.kind=async` alone. Most versions"
    assert f"| `trainer.schedule.max_staleness` | integer | `1` | versions | {alone}" in page
    assert '| `actor.optimizer.kind` | `adamw` | `"adamw"` |' in page
