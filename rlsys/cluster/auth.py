"""Ray's authentication token, kept where only this user can read it.

Whoever reaches Ray's ports runs code as this user, unless Ray asks for a token.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rlsys.errors import UserError

MODE = "RAY_AUTH_MODE"
_TOKEN, _TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO

_log = logging.getLogger(__name__)


def require_token(environment: Mapping[str, str], *, make: bool) -> dict[str, str]:
    """Return the variables with which Ray asks for this user's token.

    There are none where `environment` says RAY_AUTH_MODE=disabled, which is logged as a warning. `make` writes a new
    token to ~/.ray/auth_token where the user has none. Raises UserError where there is none, or it cannot be kept.
    """
    mode = environment.get(MODE, "token").lower()
    if mode == "disabled":
        _log.warning(
            "%s=disabled: whoever reaches Ray's ports on this machine can run code as you. Unset it to have Ray ask for "
            "a token.",
            MODE,
        )
        return {}
    if mode != "token":
        raise UserError(f"{MODE}={mode} in the environment: set it to token or disabled, or unset it.")
    if not environment.get(_TOKEN):
        given = environment.get(_TOKEN_PATH)
        _require_file(Path(given) if given else token_file(), make=make and not given)
    return {MODE: "token"}


def token_file() -> Path:
    """The file in which Ray looks for the user's token."""
    return Path.home() / ".ray" / "auth_token"


def _require_file(file: Path, *, make: bool) -> None:
    try:
        if make and not file.exists():
            _write(file)
        with file.open() as opened:
            status = os.fstat(opened.fileno())
            if status.st_mode & _OTHERS and status.st_uid == os.getuid():
                os.fchmod(opened.fileno(), stat.S_IMODE(status.st_mode) & ~_OTHERS)
            if opened.read(1):
                return
    except OSError as problem:
        raise UserError(
            f"Ray's token {file} cannot be {'made' if make else 'read'} ({problem.strerror}): "
            + ("make the folder writable" if make else "copy the one of the head there, readable by you alone")
            + f", or set {_TOKEN}."
        ) from None
    raise UserError(f"Ray's token {file} is empty: remove the file, or set {_TOKEN}.")


def _write(file: Path) -> None:
    """Write a new token. Of two processes that do so at once, both end with the token of one."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=file.parent)
    try:
        with open(descriptor, "w") as new:
            new.write(secrets.token_hex(32))
        with suppress(FileExistsError):
            os.link(name, file)
    finally:
        os.unlink(name)
