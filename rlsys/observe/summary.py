"""summary.json: what a run came to, for people and for scripts that compare runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlsys.files import json_safe, write_atomically


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write `summary` atomically, keys sorted at every level so that two runs can be compared by diff.

    NaN and infinity are written as null: a figure that was not measured is not a number.
    """
    text = json.dumps(json_safe(summary), indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False)
    write_atomically(path, text + "\n")
