"""What is worth knowing, as a warning at the user's own line."""

from __future__ import annotations

import sys
import warnings
from traceback import walk_stack


def note(text: str) -> None:
    """Warn of `text` at the nearest caller outside of rlsys, which Python's own `skip_file_prefixes` does from 3.12 on."""
    names = (str(frame.f_globals.get("__name__", "")) for frame, _ in walk_stack(sys._getframe()))
    outside = (level for level, name in enumerate(names, start=1) if name.partition(".")[0] != "rlsys")
    warnings.warn(text, stacklevel=next(outside, 1))
