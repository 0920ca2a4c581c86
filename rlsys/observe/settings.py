"""Settings of a run's config.yaml, which may be cut short or of another rlsys: reading them never raises. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def section(config: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """What stands under `names`, each within the one before; nothing unless all are mappings."""
    found: Any = config
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def number(settings: Mapping[str, Any], name: str, default: float) -> float:
    """A figure of `settings`; `default` where it is not set, null or no finite number."""
    found = settings.get(name)
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        return default
    return float(found)
