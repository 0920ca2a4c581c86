"""Where Ray keeps its files on this machine: below a short path, since the sockets among them have short names."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rlsys.errors import UserError

MOST_BYTES = 107
"""Of a socket's path: sun_path of unix(7) without its end."""
_COMMON = Path("/tmp")
_PREFIX = "rlsys-ray-"
_LONGEST = f"{_PREFIX}12345678/session_2026-01-31_00-00-00_000000_4194304/sockets/plasma_store"
"""That Ray makes in a folder of `new_ray_folder`, whose process has at most the number 2^22."""


def ray_parent() -> Path:
    """The folder in which Ray's own is made: TMPDIR, or /tmp where Ray's sockets would not fit into that.

    Raises UserError if neither will do.
    """
    wanted = Path(tempfile.gettempdir())
    for folder in (wanted, _COMMON):
        if len(os.fsencode(folder / _LONGEST)) <= MOST_BYTES and os.access(folder, os.W_OK | os.X_OK):
            return folder
    most = MOST_BYTES - len(_LONGEST) - 1
    raise UserError(
        f"TMPDIR={wanted} is too long for Ray's sockets, and {_COMMON} cannot be written: set TMPDIR to a folder "
        f"whose path has at most {most} bytes."
    )


def new_ray_folder() -> Path:
    """An empty folder for one Ray, which whoever starts that removes."""
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=ray_parent()))
