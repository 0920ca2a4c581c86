"""docs/configuration.md says what the schema says."""

from __future__ import annotations

from rlsys.config.compose import schema_keys
from rlsys.config.reference import COMMAND, FILE, explanations, render
from rlsys.config.schema import ModelConfig


def test_the_page_is_up_to_date() -> None:
    assert FILE.read_text(encoding="utf-8") == render(), f"run `{COMMAND}`"


def test_every_key_is_on_the_page_once() -> None:
    page = render()
    for key in schema_keys():
        assert page.count(f"| `{key}` |") == 1, key


def test_a_row_by_hand() -> None:
    assert (
        "| `model.path` | text | required | Folder of a Hugging Face checkpoint (config.json, safetensors, "
        "tokenizer). |"
    ) in render()
    assert "| `actor.parallel.pp_layers` | list of integer or null | `null` | Layers of each" in render()
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
