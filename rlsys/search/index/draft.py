"""Where an index grows before it has its name.

Beside `out` lies `.<name>.building`:

    lock        held by the process that builds there
    index/      what becomes `out`; it has a manifest only when it is complete
    replaced/   the index that was at `out`, for the moment between two renames

Invariants: one process builds in one place; whatever is at `out` is complete; a kill at any moment leaves what
was at `out`, or its successor, there or in the draft, and the next build puts it in its place.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np

from rlsys.errors import RunError, UserError
from rlsys.files import LOCK, working_folder
from rlsys.search.index.manifest import MANIFEST_FILE

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}


class Draft:
    """The place where `out` is built; made by `claim_draft`."""

    def __init__(self, out: Path, home: Path) -> None:
        self._out = out
        self.home = home
        """For what is needed only while building."""
        self.folder = home / "index"
        self._replaced = home / "replaced"

    def clear(self) -> None:
        """Throw away what was built so far, down to an empty `folder`."""
        self._empty()
        self.folder.mkdir()

    def recover(self) -> None:
        """Finish what a killed build had nearly done: put a complete index in its place."""
        if (self.folder / MANIFEST_FILE).is_file():
            self.publish()
        elif self._replaced.exists():
            if self._out.exists():
                shutil.rmtree(self._replaced)
            else:
                self._replaced.rename(self._out)

    def publish(self) -> None:
        """Make the complete index the one at `out`; the old one is gone only after."""
        try:
            for path in self.folder.rglob("*"):
                _sync(path)
            _sync(self.folder)
        except OSError:
            # What has not reached the disk is not whole, and a second attempt may not be told so.
            (self.folder / MANIFEST_FILE).unlink()
            raise
        if self._out.exists():
            if self._replaced.exists():
                shutil.rmtree(self._replaced)
            self._out.rename(self._replaced)
        self.folder.rename(self._out)
        _sync(self._out.parent)
        self._empty()

    def close(self) -> None:
        """Leave no folder behind in which nothing was built."""
        with suppress(OSError):
            self.folder.rmdir()

    def _empty(self) -> None:
        for path in self.home.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()


@contextmanager
def claim_draft(out: Path) -> Iterator[Draft]:
    """The draft of `out`, for this process alone; what a killed build left there is kept, or recovered.

    Raises UserError if another process builds there, RunError when the disk takes no more.
    """
    with ExitStack() as stack:
        home = out.with_name(f".{out.name}.building")
        try:
            stack.enter_context(working_folder(home))
        except BlockingIOError:
            raise UserError(f"another process builds an index in {home}: wait for it, or end it") from None
        except OSError as error:
            raise UserError(f"an index cannot be built at {home} ({error}): choose another place") from None
        draft = Draft(out, home)
        stack.callback(draft.close)
        try:
            draft.recover()
            draft.folder.mkdir(exist_ok=True)
            yield draft
        except OSError as error:
            if not _takes_no_more(error):
                raise
            name = f" of {Path(error.filename).name}" if error.filename else ""
            raise RunError(
                f"{out} was not built, because the disk of {home} took no more{name} ({error.strerror or error}): make "
                "room there, and build again"
            ) from None


def new_array(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> np.memmap:
    """A mapped .npy file of zeros whose room on the disk is taken. Raises OSError with its name where there is less.

    Without that room, writing to the map would end the process.
    """
    try:
        array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    return array


def _takes_no_more(error: OSError) -> bool:
    """True for an error of a disk that is full, over a quota or broken. NumPy's short writes have no number."""
    return error.errno in _FULL or (error.errno is None and str(error).endswith("written"))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
