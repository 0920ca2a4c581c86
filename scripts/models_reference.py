"""Writes the tables of docs/models.md from families and the tests of each: `python -m scripts.models_reference`.

The page's text is written by hand. The first table below each of the headings of `tables` is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from rlsys.config.compose import PROJECT_CONFIGS
from rlsys.weights.family_file import FAMILIES, family_names, unsupported_types
from rlsys.weights.weight_map import load_family, read_architecture
from tests.support.hf_models import configs
from tests.support.tiny_models import BUILT_IN, ON_SGLANG
from tests.trainer.harness import Layout
from tests.trainer.test_against_transformers import LAYOUTS, MORE_LAYOUTS
from tests.weights.convert.test_grid import KINDS

SHAPES = PROJECT_CONFIGS / "model" / "shapes"
PAGE = PROJECT_CONFIGS.parent / "docs" / "models.md"
COMMAND = "python -m scripts.models_reference"
_TABLE = re.compile(r"^(?:\|.*\n)+", re.MULTILINE)
_SIZES = ("tp", "pp", "cp", "dp", "ep")


def tables() -> dict[str, str]:
    """Return heading -> table."""
    cases: list[tuple[Layout, str]] = [*((one.values[0], one.values[1]) for one in LAYOUTS), *MORE_LAYOUTS.values()]  # type: ignore[misc]
    families = []
    for family in family_names():
        models, differs = _about(family)
        layouts = "; ".join(dict.fromkeys(_named(layout) for layout, of in cases if of == family))
        families.append((f"`{family}`", models, differs, layouts, _engines(family), _conversion(family)))
    refused = [
        (f"`{key}`", " ".join(f"`{family}`" for family in given), meaning)
        for (key, meaning), given in sorted(_refusals().items())
    ]
    by_reason: dict[str, list[str]] = {}
    for kind, reason in unsupported_types().items():
        by_reason.setdefault(reason, []).append(f"`{kind}`")
    return {
        "Which models are supported?": _table(
            ("family", "models", "differs in", "training equals transformers on", "engines", "conversion"), families
        ),
        "Which settings are refused?": _table(("key of config.json", "families", "other values mean"), refused),
        "Which models are refused?": _table(
            ("model_type", "because"), [(" ".join(kinds), reason) for reason, kinds in by_reason.items()]
        ),
    }


def with_tables(page: str) -> str:
    """Return `page` with the current tables. Raises LookupError for a heading without a table."""
    for heading, table in tables().items():
        before, found, after = page.partition(f"\n## {heading}\n")
        section, following, rest = after.partition("\n## ")
        section, replaced = _TABLE.subn(lambda _, table=table: table, section, count=1)
        if not found or not replaced:
            raise LookupError(f"{PAGE} has no table below {heading!r}.")
        page = before + found + section + following + rest
    return page


def _about(family: str) -> tuple[str, str]:
    """Return the models of a family and what is special about them, from the comment at the start of its file."""
    lines = (FAMILIES / f"{family}.yaml").read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.removeprefix("# ") for line in lines if line.startswith("# "))
    models, _, differs = comment.rstrip(".").partition(": ")
    return models, differs


def _named(layout: Layout) -> str:
    sizes = [f"{size.upper()} {getattr(layout, size)}" for size in _SIZES if getattr(layout, size) > 1]
    uneven = [f"stages of {' and '.join(map(str, layout.pp_layers))} layers"] if layout.pp_layers else []
    return ", ".join([*sizes, *uneven, *(["SP"] if layout.sequence_parallel else [])])


def _engines(family: str) -> str:
    """Return the engines that were given the weights of a model of the family in a test; qwen2 is in most tests."""
    # tests/live/test_miniatures.py trains a model of each other family of an experiment with SGLang.
    sglang = {*ON_SGLANG, *(read_architecture(folder).family for folder in SHAPES.iterdir())}
    held = {"transformers": {*BUILT_IN, "qwen2"}, "SGLang": sglang}
    return ", ".join(engine for engine, families in held.items() if family in families)


def _conversion(family: str) -> str:
    """Return the conversions that a test repeats both ways, bit for bit, on all layouts of its grid."""
    every = configs()
    kinds = [kind for kind in KINDS.values() if every[kind.family].model_type == family]
    found = dict.fromkeys(f"{kind.dtype}{', critic' if kind.critic else ''}" for kind in kinds)
    return "; ".join(found) or "by its map alone"


def _refusals() -> dict[tuple[str, str], list[str]]:
    """Return (key of config.json, meaning of other values) -> families."""
    found: dict[tuple[str, str], list[str]] = {}
    for family in family_names():
        rule: dict[str, Any]
        for key, rule in load_family(family).only.items():
            marked = " *" if rule.get("computes") else ""
            found.setdefault((key, rule["else"] + marked), []).append(family)
    return found


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(names)} |\n", f"|{'---|' * len(names)}\n", *(f"| {' | '.join(row)} |\n" for row in rows)]
    return "".join(lines).replace("|  |", "| |")


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
