"""An index folder of any kind: its description, `manifest.json`, and how the folder comes into being.

Invariant: the manifest is written last and under another name first, so a folder that has it is complete. Every kind of
index has `format`, `kind`, `corpus_sha256` and `rows`; what else it holds is the kind's own matter.

An index grows in a draft before it has its name. Beside `out` lies `.<name>.building`:

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import numpy as np

from rlsys.errors import RunError, UserError
from rlsys.files import LOCK, working_folder, write_atomically
from rlsys.search.corpus import Corpus

MANIFEST_FILE = "manifest.json"
CORPUS_FILE = "corpus.jsonl"
FORMAT = 2
"""Of the folder. Folders without the key are format 1, of before there were kinds."""
DENSE, BM25, HYBRID = "dense", "bm25", "hybrid"
REMOTE = ("elasticsearch", "opensearch")
OnProgress = Callable[[str, int, int], None]
"""Called with the stage, what of it is done and how much it is; first with what was done before."""
_INPUTS_FILE = "inputs.json"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
T = TypeVar("T")


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """All keys of the folder's manifest. Raises UserError when there is none of this format."""
    path = Path(folder) / MANIFEST_FILE
    if not path.is_file():
        raise UserError(
            f"{folder} is not an index (no {MANIFEST_FILE}): make one with `rlsys search index`.",
            code="not_found",
            key=str(folder),
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is not JSON ({error}): build the index again.", code="malformed", key=str(path)
        ) from None
    written = values.get("format", 1) if isinstance(values, dict) else None
    if written != FORMAT:
        problem = f"{path} has format {written}, this version of rlsys reads {FORMAT}"
        raise UserError(
            f"{problem}: build the index again, or serve it with the version that built it.",
            code="unsupported",
            key=str(path),
        )
    if not isinstance(values.get("kind"), str):
        raise UserError(f"{path} names no kind of index: build the index again.", code="malformed", key=str(path))
    return values


def read_values(folder: str | Path, kinds: Iterable[str], wanted: str) -> dict[str, Any]:
    """The manifest's keys but format and kind. Raises UserError, which names what is `wanted`, for other kinds."""
    values = read_manifest(folder)
    if (kind := values.pop("kind")) not in kinds:
        raise UserError(f"{folder} is an index of kind {kind!r}, not {wanted}.", code="mismatch", key=str(folder))
    del values["format"]
    return values


def typed(made: type[T], values: Any, folder: str | Path) -> T:
    """The dataclass `made` with `values` of the manifest. Raises UserError for other keys or types than its fields."""
    types = get_type_hints(made)
    needed = {item.name for item in fields(made) if item.default is MISSING}  # type: ignore[arg-type]
    given = values if isinstance(values, dict) else {}
    bad = {key for key in given if key not in types or not _is_a(given[key], types[key])}
    if wrong := sorted(bad | (needed - given.keys())):
        problem = f"{Path(folder) / MANIFEST_FILE} does not hold its keys (missing, unknown or of the wrong type"
        raise UserError(
            f"{problem}: {', '.join(wrong)}): build the index again.",
            code="malformed",
            key=str(Path(folder) / MANIFEST_FILE),
        )
    return made(**given)


def _is_a(value: Any, kind: Any) -> bool:
    """True for a JSON value of type `kind`, where a whole number is a float as well and a truth value no number."""
    return kind is bool if isinstance(value, bool) else isinstance(value, int | float if kind is float else kind)


def write_manifest(folder: str | Path, kind: str, values: Mapping[str, Any]) -> None:
    """Write the manifest of a folder whose other files are there; `format` and `kind` are added to `values`."""
    text = json.dumps({"format": FORMAT, "kind": kind} | dict(values), indent=2) + "\n"
    write_atomically(Path(folder) / MANIFEST_FILE, text)


def silent(stage: str, done: int, total: int) -> None:
    """An `OnProgress` that shows nothing."""


class IndexDraft:
    """The place where `out` is built; made by `claim_draft`."""

    def __init__(self, out: Path, home: Path) -> None:
        self.home = home
        """For what is needed only while building."""
        self.folder, self._replaced, self._out = home / "index", home / "replaced", out

    def clear(self) -> None:
        """Throw away what was built so far, down to an empty `folder`."""
        self._empty()
        self.folder.mkdir()

    def complete(self, kind: str, values: Mapping[str, Any]) -> None:
        """Give the folder its manifest and make it the index at `out`."""
        write_manifest(self.folder, kind, values)
        self.publish()

    def recover(self) -> None:
        """Finish what a killed build had nearly done: put a complete index in its place."""
        if (self.folder / MANIFEST_FILE).is_file():
            self.publish()
        elif self._replaced.exists() and self._out.exists():
            shutil.rmtree(self._replaced)
        elif self._replaced.exists():
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


def refuse_foreign(out: Path) -> None:
    """Raise UserError for what is no index at `out`."""
    if out.exists() and not (out / MANIFEST_FILE).is_file() and (out.is_file() or any(out.iterdir())):
        raise UserError(f"{out} is there and is no index: give an empty or a new folder.", code="exists", key=str(out))


@contextmanager
def claim_draft(out: Path) -> Iterator[IndexDraft]:
    """The draft of `out` for this process alone; what a killed build left is kept, or recovered.

    Raises UserError for what is no index at `out` and while another process builds there, RunError for a full disk.
    """
    refuse_foreign(out)
    with ExitStack() as stack:
        home = out.with_name(f".{out.name}.building")
        try:
            stack.enter_context(working_folder(home))
        except BlockingIOError:
            raise UserError(
                f"another process builds an index in {home}: wait for it, or end it.", code="in_use", key=str(home)
            ) from None
        except OSError as error:
            raise UserError(
                f"an index cannot be built at {home} ({error}): choose another place.", code="denied", key=str(home)
            ) from None
        draft = IndexDraft(out, home)
        try:
            draft.recover()
            draft.folder.mkdir(exist_ok=True)
            yield draft
        except OSError as error:
            if not (error.errno in _FULL or (error.errno is None and str(error).endswith("written"))):
                raise  # NumPy's short writes have no number.
            name = f" of {Path(error.filename).name}" if error.filename else ""
            problem = f"{out} was not built, because the disk of {home} took no more{name} ({error.strerror or error})"
            raise RunError(f"{problem}: make room there, and build again") from None
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
        draft.complete(kind, values)
    return True


def link(source: Path, target: Path) -> None:
    """Give one file two names, or copy it: files of an index are never written again, and a changed corpus is refused."""
    target.unlink(missing_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


def add_corpus(corpus: Corpus, folder: Path) -> None:
    """Put the corpus into an index, and read it there: it may have changed since it was opened."""
    link(corpus.path, folder / CORPUS_FILE)
    if Corpus.open(folder / CORPUS_FILE).checksum != corpus.checksum:
        raise UserError(
            f"{corpus.path} has changed while its index was built: build it again.", code="in_use", key=str(corpus.path)
        )


def open_corpus(folder: Path, checksum: str) -> Corpus:
    """The corpus of the index in `folder`. Raises UserError if it has another checksum than the manifest's."""
    corpus = Corpus.open(folder / CORPUS_FILE)
    if corpus.checksum != checksum:
        problem = f"{corpus.path} has changed since {folder} was built"
        raise UserError(f"{problem}: build the index again or restore the file.", code="mismatch", key=str(corpus.path))
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
