"""docs/commands.md says what the command line says."""

from __future__ import annotations

from rlsys.cli.reference import COMMAND, FILE, render


def test_the_page_is_up_to_date() -> None:
    assert FILE.read_text(encoding="utf-8") == render(), f"run `{COMMAND}`"


def test_every_command_is_on_it() -> None:
    page = render()
    for heading in ("## `rlsys train`", "### `rlsys convert mg2hf`", "#### `rlsys data prepare own`"):
        assert f"\n{heading}\n" in page
    assert "`--dry-run / --no-dry-run`: Print the resolved plan and stop." in page
