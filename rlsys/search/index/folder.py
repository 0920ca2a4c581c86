"""Creates index folders of any kind atomically, and reads and writes their `manifest.json`.

Invariant: the manifest is written last and atomically, so a folder with a manifest is complete. Every manifest has
`format`, `kind`, `corpus_sha256` and `rows`; other keys depend on the kind.

An index is built in a draft folder `.<name>.building` beside `out`:

    lock:       held by the building process
    index/:     becomes `out`; has a manifest only when complete
    replaced/:  the previous index of `out`, between two renames

Invariants: one process builds per folder; an index at `out` is always complete; after a kill at any moment, `out` or
the draft holds the old or the new index. The next build moves that index to `out`.
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
from rlsys.files import LOCK, named, sync, working_folder, write_atomically
from rlsys.search.corpus import Corpus

MANIFEST_FILE = "manifest.json"
CORPUS_FILE = "corpus.jsonl"
FORMAT = 2
"""Format of an index folder. A manifest without the key `format` has format 1, which had no kinds."""
DENSE, BM25, HYBRID = "dense", "bm25", "hybrid"
REMOTE = ("elasticsearch", "opensearch")
OnProgress = Callable[[str, int, int], None]
"""Called with (stage, done, total). The first call of a stage reports rows done by an earlier build."""
_INPUTS_FILE = "inputs.json"
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
"""Errors of a disk that takes no more data."""
T = TypeVar("T")


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """Return all keys of the folder's manifest. Raises UserError if it is missing, invalid or of another format."""
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
        problem = f"{path} has format {written}, but this version of rlsys reads {FORMAT}"
        raise UserError(
            f"{problem}: build the index again, or serve it with the version that built it.",
            code="unsupported",
            key=str(path),
        )
    if not isinstance(values.get("kind"), str):
        raise UserError(f"{path} names no kind of index: build the index again.", code="malformed", key=str(path))
    return values


def read_values(folder: str | Path, kinds: Iterable[str], wanted: str) -> dict[str, Any]:
    """Return the manifest without format and kind. Raises UserError for a kind not in `kinds`.

    `wanted` names the accepted kinds in the message.
    """
    values = read_manifest(folder)
    if (kind := values.pop("kind")) not in kinds:
        raise UserError(f"{folder} is an index of kind {kind!r}, not {wanted}.", code="mismatch", key=str(folder))
    del values["format"]
    return values


def typed(made: type[T], values: Any, folder: str | Path) -> T:
    """Return the manifest's `values` as an instance of the dataclass `made`. Raises UserError if they do not match."""
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
    """True if a JSON value has type `kind`; an int also counts as a float, a bool never counts as a number."""
    return kind is bool if isinstance(value, bool) else isinstance(value, int | float if kind is float else kind)


def write_manifest(folder: str | Path, kind: str, values: Mapping[str, Any]) -> None:
    """Write the manifest, as the last file of a folder; `format` and `kind` are added to `values`."""
    text = json.dumps({"format": FORMAT, "kind": kind} | dict(values), indent=2) + "\n"
    write_atomically(Path(folder) / MANIFEST_FILE, text)


def silent(stage: str, done: int, total: int) -> None:
    """An `OnProgress` that shows nothing."""


class IndexDraft:
    """Draft folder of the index at `out`; created by `claim_draft`."""

    def __init__(self, out: Path, home: Path) -> None:
        self.home = home
        """Folder for temporary files of the build."""
        self.folder, self._replaced, self._out = home / "index", home / "replaced", out

    def clear(self) -> None:
        """Delete everything built so far; `folder` is empty afterwards."""
        self._empty()
        self.folder.mkdir()

    def complete(self, kind: str, values: Mapping[str, Any]) -> None:
        """Write the manifest and publish the folder to `out`."""
        write_manifest(self.folder, kind, values)
        self.publish()

    def recover(self) -> None:
        """Finish the renames of a killed build: publish a complete draft, or restore the replaced index."""
        if (self.folder / MANIFEST_FILE).is_file():
            self.publish()
        elif self._replaced.exists() and self._out.exists():
            shutil.rmtree(self._replaced)
        elif self._replaced.exists():
            self._replaced.rename(self._out)

    def publish(self) -> None:
        """Move the complete index to `out`; the old index is deleted afterwards."""
        try:
            for path in (*self.folder.rglob("*"), self.folder):
                sync(path)
        except OSError:
            # The data may be incomplete on disk, and a second fsync may report no error.
            (self.folder / MANIFEST_FILE).unlink()
            raise
        if self._out.exists():
            if self._replaced.exists():
                shutil.rmtree(self._replaced)
            self._out.rename(self._replaced)
        self.folder.rename(self._out)
        sync(self._out.parent)
        self._empty()

    def _empty(self) -> None:
        for path in self.home.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()


def refuse_foreign(out: Path) -> None:
    """Raise UserError if `out` exists and is neither an index nor an empty folder."""
    if out.exists() and not (out / MANIFEST_FILE).is_file() and (out.is_file() or any(out.iterdir())):
        raise UserError(
            f"{out} exists and is not an index: give a new or an empty folder.", code="exists", key=str(out)
        )


@contextmanager
def claim_draft(out: Path) -> Iterator[IndexDraft]:
    """Lock the draft of `out`, call its `recover`, and yield it. It may hold files that a killed build left.

    Raises UserError if `out` is not an index or another process builds there, RunError for a full disk.
    """
    refuse_foreign(out)
    with ExitStack() as stack:
        home = out.with_name(f".{out.name}.building")
        try:
            stack.enter_context(working_folder(home))
        except BlockingIOError:
            raise UserError(
                f"another process is building an index in {home}: wait for it, or end it.", code="in_use", key=str(home)
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
            if not (error.errno in FULL or (error.errno is None and str(error).endswith("written"))):
                raise  # NumPy raises short writes as OSError without errno ("... written").
            name = f" of {Path(error.filename).name}" if error.filename else ""
            problem = f"{out} was not built, because a write{name} to {home} failed ({error.strerror or error})"
            raise RunError(f"{problem}: make room there, and build again") from None
        finally:
            with suppress(OSError):  # removes the folder only if it is empty
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
    """Build the folder `out` with the manifest `values`; False if `out` has this manifest already.

    `fill` writes files into the draft's `folder`, and temporary files into `home`. With `resume`, `fill` continues from
    the files of an interrupted call with the same manifest; otherwise the draft starts empty. With `again`, `fill` is
    called even if `out` has the manifest. Raises UserError if `out` is not an index or another process builds there.
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
    """Hard-link `source` to `target`, or copy it.

    Sharing is safe, because index files never change and the corpus is verified by checksum.
    """
    target.unlink(missing_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


def add_corpus(corpus: Corpus, folder: Path) -> None:
    """Link the corpus into an index folder. Raises UserError if the file has changed since it was opened."""
    link(corpus.path, folder / CORPUS_FILE)
    if Corpus.open(folder / CORPUS_FILE).checksum != corpus.checksum:
        raise UserError(
            f"{corpus.path} has changed while its index was built: build it again.", code="in_use", key=str(corpus.path)
        )


def open_corpus(folder: Path, checksum: str) -> Corpus:
    """Open the corpus of the index in `folder`. Raises UserError if its checksum differs from the manifest's."""
    corpus = Corpus.open(folder / CORPUS_FILE)
    if corpus.checksum != checksum:
        problem = f"{corpus.path} has changed since {folder} was built"
        raise UserError(f"{problem}: build the index again or restore the file.", code="mismatch", key=str(corpus.path))
    return corpus


def new_array(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> np.memmap:
    """Create a mapped .npy file of zeros, with its disk space allocated.

    Raises OSError with the file name if the disk is full; without allocation, a later write would end in SIGBUS.
    """
    with named(path):
        array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
