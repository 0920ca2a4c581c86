"""Where a converted folder grows before it has its name.

Beside `out` lies `.<name>.partial`:

    lock            held by the process that converts there
    journal.json    what is converted, and the files that are complete
    folder/         what becomes `out`

Invariants: one process converts to one place; `out` is complete or not there; a file that the journal names is
complete; nothing is deleted that no conversion made.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from rlsys.errors import UserError
from rlsys.files import LOCK, working_folder

_JOURNAL, _FOLDER = "journal.json", "folder"


class Draft:
    """The place where `out` is made; made by `claim`."""

    def __init__(self, out: Path, home: Path) -> None:
        self._out, self._home = out, home
        self.folder = home / _FOLDER
        self._journal: dict[str, Any] = {}

    def begin(self, recipe: Mapping[str, Any]) -> bool:
        """Go on with what was begun from the same `recipe` (JSON); False if another's had to go."""
        # As it reads in JSON, where a tuple is a list.
        fresh = {"recipe": json.loads(json.dumps(recipe)), "files": {}}
        self._journal = self._read() or fresh
        same: bool = self._journal["recipe"] == fresh["recipe"]
        if not same:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._journal = fresh
        # Before the folder, so that a folder always has one.
        self._write()
        self.folder.mkdir(exist_ok=True)
        self._drop_what_was_not_finished()
        return same

    def finished(self) -> dict[str, Any]:
        """Receipts of the files that are complete, by name."""
        return {name: file["receipt"] for name, file in self._journal["files"].items()}

    def finish(self, name: str, receipt: Any) -> None:
        """Note that the file `name` is complete; `receipt` is plain JSON."""
        size = (self.folder / name).stat().st_size
        self._journal["files"][name] = {"bytes": size, "receipt": receipt}
        self._write()

    def publish(self) -> None:
        """Make the folder the one at `out`. Raises UserError if there is one by now."""
        _refuse(self._out)
        self.folder.rename(self._out)
        (self._home / _JOURNAL).unlink()

    def abandon(self) -> None:
        """Leave nothing behind, unless a file is complete, with which another conversion can go on."""
        if self._journal and not self._journal["files"]:
            shutil.rmtree(self.folder, ignore_errors=True)
            (self._home / _JOURNAL).unlink(missing_ok=True)

    def _drop_what_was_not_finished(self) -> None:
        files = self._journal["files"]
        for name, file in list(files.items()):
            path = self.folder / name
            if not path.is_file() or path.stat().st_size != file["bytes"]:
                del files[name]
        for path in sorted(self.folder.rglob("*"), reverse=True):
            if path.is_dir() and not path.is_symlink():
                with suppress(OSError):
                    path.rmdir()
            elif str(path.relative_to(self.folder)) not in files:
                path.unlink()

    def _read(self) -> dict[str, Any] | None:
        path = self._home / _JOURNAL
        if not path.is_file():
            return None
        try:
            journal = json.loads(path.read_text())
            return {"recipe": journal["recipe"], "files": dict(journal["files"])}
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(f"{path} is damaged; remove {self._home} to begin anew.") from None

    def _write(self) -> None:
        partial = self._home / f".{_JOURNAL}"
        try:
            partial.write_text(json.dumps(self._journal))
            os.replace(partial, self._home / _JOURNAL)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def claim(out: Path) -> Iterator[Draft]:
    """The draft of `out`, for this process alone; what an ended conversion left there is kept.

    Raises UserError if `out` is there already, nothing can be there, or another process converts to it.
    """
    with ExitStack() as stack:
        home = out.with_name(f".{out.name}.partial")
        try:
            _refuse(out)
            _refuse_strange(home)
            stack.enter_context(working_folder(home))
        except BlockingIOError:
            raise UserError(f"Another process converts in {home}; wait for it, or end it.") from None
        except OSError as error:
            raise UserError(f"Nothing can be written to {out} ({error.strerror}); give another folder.") from None
        draft = Draft(out, home)
        stack.callback(draft.abandon)
        yield draft


def _refuse(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} exists already; give a folder that does not, or remove it first.")


def _refuse_strange(home: Path) -> None:
    found = {path.name for path in home.iterdir()} if home.is_dir() else set()
    # A conversion writes the journal before it makes the folder, and renames the folder before the journal goes.
    if found - {LOCK, _JOURNAL, _FOLDER, f".{_JOURNAL}"} or (_FOLDER in found and _JOURNAL not in found):
        raise UserError(f"{home} was not made by a conversion; move it away, or give another folder.")
