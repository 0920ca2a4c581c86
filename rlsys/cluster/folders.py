"""The folder in which Ray keeps its files on this machine: below a short path, since the sockets among them have short names."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlsys.errors import UserError
from rlsys.files import LOCK, working_folder

MOST_BYTES = 107  # Of a socket's path: sun_path of unix(7) without its end.
_COMMON = Path("/tmp")
_PREFIX = "rlsys-ray-"
_RAYS = "ray"
_LONGEST = f"{_PREFIX}12345678/{_RAYS}/session_2026-01-31_00-00-00_000000_4194304/sockets/plasma_store"
"""That Ray makes in a folder of `ray_folder`, whose process has at most the number 2^22."""


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


@contextmanager
def ray_folder() -> Iterator[Path]:
    """A new folder that only this user can enter, with `rays_own` in it; removed afterwards.

    Also removes the folders of this user's processes that were killed before they could.
    """
    parent = ray_parent()
    for other in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if other.lstat().st_uid == os.getuid() and (other / LOCK).is_file():
                with working_folder(other):
                    _empty(other)
    folder = parent / f"{_PREFIX}{secrets.token_hex(4)}"
    folder.mkdir(mode=0o700)
    with working_folder(folder):
        try:
            yield folder
        finally:
            _empty(folder)


def rays_own(folder: Path) -> Path:
    """The folder within a `ray_folder` that Ray is given. Ray lets every user into it."""
    return folder / _RAYS


def _empty(folder: Path) -> None:
    """Remove all but the lock by which `folder` is held."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != LOCK:
            path.unlink(missing_ok=True)
