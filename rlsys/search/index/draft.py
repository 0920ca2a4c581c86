"""Where an index grows before it has its name.

Beside `out` lies `.<name>.building`:

    lock        held by the process that builds there
    index/      what becomes `out`; it has a manifest only when it is complete
    replaced/   the index that was at `out`, for the moment between two renames

Invariants: one process builds in one place; whatever is at `out` is complete; a kill at any moment leaves what
was at `out`, or its successor, there or in the draft, and the next build puts it in its place.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rlsys.claim import LOCK, working_folder
from rlsys.errors import UserError
from rlsys.search.index.manifest import MANIFEST_FILE


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
        for path in self.folder.rglob("*"):
            _sync(path)
        _sync(self.folder)
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

    Raises UserError if another process builds there.
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
        draft.recover()
        draft.folder.mkdir(exist_ok=True)
        yield draft


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
