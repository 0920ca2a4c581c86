"""Edits that make one part of an index folder inconsistent with the rest."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Edit = Callable[[Path], object]
"""A function that changes the index in a folder."""


def edit_json(name: str, **changes: Any) -> Edit:
    """Return an edit that sets keys of the JSON file `name`."""

    def edit(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def edit_manifest(**changes: Any) -> Edit:
    return edit_json("manifest.json", **changes)


def edit_corpus(folder: Path) -> None:
    path = folder / "corpus.jsonl"
    text = path.read_text()
    path.unlink()  # the file may be a link to the corpus of other tests
    path.write_text(text.replace("capital", "Capital", 1))
