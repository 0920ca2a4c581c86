"""Tests of the tables of extension points, in docs/extending.md and CONTRIBUTING.md, against the schema and the files."""

import re
from typing import get_args, get_type_hints

from rlsys.config.custom import Custom
from rlsys.config.schema import RunConfig, own_class, schema_groups
from tests.support.paths import PROJECT

ROWS = re.findall(
    r"^\| [\w -]+ \| `([\w.`, ]+)` \| .* \| `(.*?)`, `(.*?)` \|$",
    (PROJECT / "docs/extending.md").read_text(),
    re.MULTILINE,
)
NOT_IN_THE_SCHEMA = {"model.family", "search.index_kind"}
"""Keys that name a component without a group of its own."""


def own_keys() -> set[str]:
    """Return the keys of the schema that accept a component from outside of the package."""
    found: set[type[Custom]] = set()
    for _, group in schema_groups(RunConfig()):
        for hint in get_type_hints(type(group)).values():
            found |= {own for part in (hint, *get_args(hint)) if (own := own_class(part)) is not None}
    return {own.key.removesuffix(".kind") for own in found}


def test_the_table_has_every_extension_point_of_the_schema() -> None:
    assert {key for keys, *_ in ROWS for key in keys.split("`, `")} == own_keys() | NOT_IN_THE_SCHEMA


def test_every_row_has_an_example_that_its_test_uses() -> None:
    examples = {file.stem for file in (PROJECT / "examples/extend").glob("*.py")} - {"__init__"}
    assert {PROJECT.joinpath(example).stem for _, example, _ in ROWS} == examples
    for _, example, test in ROWS:
        package, _, name = example.removesuffix(".py").replace("/", r"\.").rpartition(r"\.")
        used = rf"{package}(\.| import .*\b){name}\b"
        assert re.search(used, (PROJECT / test).read_text()), (example, test)


def test_every_file_and_name_of_the_contributors_table_exists() -> None:
    section = (PROJECT / "CONTRIBUTING.md").read_text().partition("## Extension points")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w/]+\.py)`, `(\w+)`", section)
    named += [(file, name) for name, file in re.findall(r"`(\w+)` in `([\w/]+\.py)`", section)]
    assert len(named) > 10
    for file, name in named:
        assert re.search(rf"^(?:def |class )?{name}\b", (PROJECT / file).read_text(), re.MULTILINE), (file, name)
    assert all((PROJECT / path).exists() for path in re.findall(r"`((?:tests|rlsys|configs)/[\w/.]+)`", section))
