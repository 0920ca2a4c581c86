"""Reads files of JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, in order."""
    return [json.loads(line.decode()) for line in file.read_bytes().splitlines()]
