"""Places where an index grows before it has its name.

Beside `out` lies `.<name>.building`:

    lock        held by the process that builds there
    index/      what becomes `out`; it has a manifest only when it is complete
    replaced/   the index that was at `out`, for the moment between two renames

Invariants: one process builds in one place; whatever is at `out` is complete; a kill at any moment leaves what was at
`out`, or its successor, there or in the draft, and the next build puts it in its place.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from rlsys.errors import RunError, UserError
from rlsys.files import LOCK, working_folder
from rlsys.search.corpus import Corpus
from rlsys.search.index.manifest import CORPUS_FILE, FORMAT, MANIFEST_FILE, write_manifest

OnProgress = Callable[[str, int, int], None]
"""Called with the stage, what of it is done and how much it is; first with what was done before."""
_INPUTS_FILE = "inputs.json"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}


def silent(stage: str, done: int, total: int) -> None:
    """An `OnProgress` that shows nothing."""


class IndexDraft:
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
            for path in (*self.folder.rglob("*"), self.folder):
                _sync(path)
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

    def _empty(self) -> None:
        for path in self.home.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()


@contextmanager
def claim_draft(out: Path) -> Iterator[IndexDraft]:
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
        draft = IndexDraft(out, home)
        try:
            draft.recover()
            draft.folder.mkdir(exist_ok=True)
            yield draft
        except OSError as error:
            # NumPy's short writes have no number.
            if not (error.errno in _FULL or (error.errno is None and str(error).endswith("written"))):
                raise
            name = f" of {Path(error.filename).name}" if error.filename else ""
            raise RunError(
                f"{out} was not built, because the disk of {home} took no more{name} ({error.strerror or error}): make "
                "room there, and build again"
            ) from None
        finally:
            with suppress(OSError):  # A folder in which nothing was built is not left behind.
                draft.folder.rmdir()


def assemble(
    out: Path,
    kind: str,
    values: Mapping[str, Any],
    fill: Callable[[IndexDraft], None],
    *,
    resume: bool = False,
    again: bool = False,
) -> bool:
    """Fill the folder `out` and give it this manifest; False if it has the manifest already.

    `fill` puts files into the draft's `folder`, and into `home` what is not to stay. With `resume` it finds there what
    an earlier call with the same manifest left, otherwise nothing; with `again` it is called even if the manifest is
    there. Raises UserError for a folder that is no index, and while another process builds there.
    """
    refuse_foreign(out)
    inputs = json.loads(json.dumps({"format": FORMAT, "kind": kind} | dict(values)))
    with claim_draft(out) as draft:
        if not again and _read(out / MANIFEST_FILE) == inputs:
            return False
        if not (resume and _read(draft.home / _INPUTS_FILE) == inputs):
            draft.clear()
            (draft.home / _INPUTS_FILE).write_text(json.dumps(inputs), encoding="utf-8")
        try:
            fill(draft)
        except BaseException:
            if not resume:
                draft.clear()
            raise
        write_manifest(draft.folder, kind, values)
        draft.publish()
    return True


def refuse_foreign(out: Path) -> None:
    """Raise UserError if there is something at `out` that is no index."""
    if out.exists() and not (out / MANIFEST_FILE).is_file() and (out.is_file() or any(out.iterdir())):
        raise UserError(f"{out} is there and is no index: give an empty or a new folder")


def link(source: Path, target: Path) -> None:
    """Give one file two names, or copy it where that cannot be.

    That is safe: complete FAISS files and embeddings are never written again, and a changed corpus is refused.
    """
    target.unlink(missing_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


def add_corpus(corpus: Corpus, folder: Path) -> None:
    """Put the corpus into an index, and read it there: it may have changed since it was opened."""
    link(corpus.path, folder / CORPUS_FILE)
    if Corpus.open(folder / CORPUS_FILE).checksum != corpus.checksum:
        raise UserError(f"{corpus.path} has changed while its index was built: build it again")


def open_corpus(folder: Path, checksum: str) -> Corpus:
    """The corpus of the index in `folder`. Raises UserError if it has another checksum than the manifest's."""
    corpus = Corpus.open(folder / CORPUS_FILE)
    if corpus.checksum != checksum:
        raise UserError(
            f"{corpus.path} has changed since {folder} was built: build the index again or restore the file"
        )
    return corpus


def new_array(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> np.memmap:
    """A mapped .npy file of zeros. Raises OSError with its name where the disk is full: writing would end the process."""
    try:
        array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    return array


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
