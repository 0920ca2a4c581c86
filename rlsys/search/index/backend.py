"""Index kinds from outside of the package: `--kind package.module.attribute` names a class that is a `Backend`.

    corpus.jsonl:   the indexed corpus, linked or copied, row r = line r + 1
    files/:         what the backend's `build` wrote
    manifest.json:  corpus, kind and settings

The class's keyword-only parameters are the settings of the index; they are checked by their annotations. The manifest
records kind and settings, so an index is opened as it was built, without being told its settings again.

A folder never chooses the code that runs: the class that a manifest names is imported only if whoever opens the folder
names the same class (`--kind`, `search.index_kind`). A folder from someone else could otherwise import any module.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Parameter
from itertools import pairwise
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Protocol

from rlsys import components
from rlsys.components import ComponentThread, check_callable, import_component, one_line
from rlsys.errors import RunError, UserError
from rlsys.search.corpus import Corpus
from rlsys.search.index.folder import (
    FULL,
    IndexDraft,
    OnProgress,
    add_corpus,
    assemble,
    open_corpus,
    read_manifest,
    read_values,
    silent,
    typed,
)
from rlsys.search.retrieval import Hit

_KEY = "kind"
_FILES_FOLDER = "files"
SEARCH_TIMEOUT_S = 60.0
"""Time limit of a search; shorter than a server's `request_timeout_s`, so that the caller reads which kind hangs."""
_METHODS = {"build": ("corpus", "folder"), "open": ("folder",), "size": (), "search": ("queries", "topk")}


class Backend(Protocol):
    """Way of finding passages. Its keyword-only constructor parameters are the settings of an index."""

    def build(self, corpus: Corpus, folder: Path) -> None:
        """Write the index of `corpus` into the empty `folder`."""

    def open(self, folder: Path) -> None:
        """Load what `build` wrote; called once, on a new object with the settings of the build."""

    def size(self) -> int:
        """Return the number of indexed passages."""

    def search(self, queries: Sequence[str], topk: int) -> Sequence[Sequence[tuple[int, float]]]:
        """Return up to `topk` (row, score) per query, best first; row r is line r + 1 of the corpus.

        The answer to a query does not change, nor depend on the other queries. Called by one thread at a time.
        """


@dataclass(frozen=True, slots=True)
class BackendManifest:
    """Inputs of an index of a backend. Equal manifests mean equal indexes."""

    corpus_sha256: str
    rows: int
    settings: dict


def is_backend(kind: str) -> bool:
    """True if `kind` has the form of a class from outside of the package."""
    return "." in kind


def settings_of(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of the backend `kind` in JSON values; `given` may be text. Raises UserError."""
    known = _parameters(kind)
    for name in given:
        if name not in known:
            listed = f"known are {', '.join(known)}" if known else "it has none"
            raise UserError(f"{kind} has no setting {name}: {listed}.", code="unknown", key=name)
    found = {}
    for name, one in known.items():
        value = given.get(name, one.default)
        if value is Parameter.empty:
            raise UserError(f"{name} has no value: give --set {name}=VALUE for {kind}.", code="missing", key=name)
        found[name] = one.plain(value, name)
    return found


def _parameters(kind: str) -> dict[str, components.Parameter]:
    return {one.name: one for one in components.parameters_of(_import(kind), kind, _KEY)}


def build_backend(
    kind: str, settings: Mapping[str, Any], corpus: Corpus, out: str | Path, progress: OnProgress = silent
) -> bool:
    """Build the index folder `out` with the backend `kind`; False if it exists already with the same inputs.

    `settings` come from `settings_of`. The index is opened once before it appears at `out`. Raises UserError for a
    component that is not a `Backend`, and for one that fails.
    """
    manifest = {"corpus_sha256": corpus.checksum, "rows": len(corpus), "settings": dict(settings)}

    def fill(draft: IndexDraft) -> None:
        files = draft.folder / _FILES_FOLDER
        files.mkdir()
        progress("index", 0, len(corpus))
        backend = _created(kind, settings)
        with _blamed(kind, "build"):
            backend.build(corpus, files)
        _opened(kind, settings, files, len(corpus))
        add_corpus(corpus, draft.folder)
        progress("index", len(corpus), len(corpus))

    return assemble(Path(out).absolute(), kind, manifest, fill)


class BackendRetriever:
    """Searches an index of a backend, and checks every answer."""

    parallel = 1

    def __init__(
        self,
        kind: str,
        backend: Backend,
        corpus: Corpus,
        settings: Mapping[str, Any],
        thread: ComponentThread,
        timeout_s: float,
    ) -> None:
        self._kind, self._backend, self._corpus, self._settings = kind, backend, corpus, settings
        self._thread, self._timeout_s = thread, timeout_s

    @classmethod
    def open(cls, folder: str | Path, *, trusted: str | None, timeout_s: float = SEARCH_TIMEOUT_S) -> BackendRetriever:
        """Open an index of `build_backend`; `trusted` is the kind that the user has named.

        All calls of the backend run in one thread; a search that has not returned within `timeout_s` has failed.

        Raises UserError if it is not the folder's kind, and if manifest, corpus and backend do not match.
        """
        folder, kind = Path(folder), str(read_manifest(folder)["kind"])
        require_trusted(folder, kind, trusted)
        manifest = typed(BackendManifest, read_values(folder, [kind], kind), folder)
        corpus = open_corpus(folder, manifest.corpus_sha256)
        settings = settings_of(kind, manifest.settings)
        thread = ComponentThread()
        backend = thread.call(_opened, kind, settings, folder / _FILES_FOLDER, manifest.rows, timeout_s=None)
        if len(corpus) != manifest.rows:
            raise UserError(
                f"{folder} holds {len(corpus)} passages, but its manifest says {manifest.rows}: build the index again.",
                code="mismatch",
                key=str(folder),
            )
        return cls(kind, backend, corpus, settings, thread, timeout_s)

    def prepare(self, queries: Sequence[str]) -> Sequence[str]:
        """Return the queries unchanged."""
        return queries

    def find(self, prepared: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return up to `topk` hits per query, best first. Raises RunError if the backend fails."""
        try:
            with _blamed(self._kind, "search"):
                answer = self._thread.call(self._backend.search, list(prepared), topk, timeout_s=self._timeout_s)
                found = [[(row, score) for row, score in hits] for hits in answer]
        except UserError as error:
            raise RunError(str(error)) from error
        if len(found) != len(prepared):
            raise self._bad(f"{len(found)} answers to {len(prepared)} queries")
        for hits in found:
            self._require_sound(hits, topk)
        passages = iter(self._corpus.fetch([int(row) for hits in found for row, _ in hits]))
        return [[Hit(float(score), next(passages)) for _, score in hits] for hits in found]

    def describe(self) -> Mapping[str, Any]:
        """Return passages, corpus, kind and settings."""
        corpus = {"passages": len(self._corpus), "corpus_sha256": self._corpus.checksum}
        return {"kind": self._kind, **corpus, "settings": dict(self._settings)}

    def close(self) -> None:
        """Call the backend's `close`, if it has one."""
        close = getattr(self._backend, "close", None)
        if callable(close):
            with _blamed(self._kind, "close"):
                self._thread.call(close, timeout_s=self._timeout_s)

    def _require_sound(self, hits: Sequence[tuple[Any, Any]], topk: int) -> None:
        rows, scores = [row for row, _ in hits], [score for _, score in hits]
        if len(hits) > topk:
            raise self._bad(f"{len(hits)} hits for topk={topk}")
        if not all(isinstance(row, Integral) and 0 <= int(row) < len(self._corpus) for row in rows):
            raise self._bad(f"the rows {rows}, of which one is no row from 0 to {len(self._corpus) - 1}")
        if len({*rows}) < len(rows):
            raise self._bad(f"a row twice: {rows}")
        if not all(isinstance(score, Real) and math.isfinite(score) for score in scores):
            raise self._bad(f"the scores {scores}, of which one is not a finite number")
        if any(one < other for one, other in pairwise(scores)):
            raise self._bad(f"the scores {scores}, which are not in descending order")

    def _bad(self, what: str) -> RunError:
        return RunError(f"{self._kind}.search returned {what}"[:400])


def check_kind(folder: str | Path, trusted: str | None) -> None:
    """Check the kind of the index in `folder`, without opening it; `trusted` is the kind that the user has named.

    Raises UserError if `trusted` is another kind, and for a kind from outside of the package that the user has not named,
    that cannot be imported, or that does not have the settings of the manifest.
    """
    kind = str(read_manifest(folder)["kind"])
    if trusted is not None or is_backend(kind):
        require_trusted(folder, kind, trusted)
    if is_backend(kind):
        settings_of(kind, typed(BackendManifest, read_values(folder, [kind], kind), folder).settings)


def require_trusted(folder: str | Path, kind: str, trusted: str | None) -> None:
    """Raise UserError unless the user has named the kind `kind` of the index in `folder`."""
    if trusted is None:
        raise UserError(
            f"{folder} is an index of kind {kind}, and opening it runs the code of that name: give --kind {kind} "
            f"(search.index_kind={kind} in a run), if you trust it.",
            code="unsafe",
            key=str(folder),
        )
    if trusted != kind:
        raise UserError(
            f"{folder} is an index of kind {kind}, not {trusted}: give its kind, or another folder.",
            code="mismatch",
            key=str(folder),
        )


def _import(kind: str) -> Any:
    component = import_component(kind, _KEY)
    check_callable(component, kind, _KEY, (), with_settings=True)
    return component


def _created(kind: str, settings: Mapping[str, Any]) -> Backend:
    values = {name: one.value(settings[name], name) for name, one in _parameters(kind).items()}
    with _blamed(kind, "the constructor"):
        backend: Backend = _import(kind)(**values)
    for name, arguments in _METHODS.items():
        check_callable(getattr(backend, name, None), f"{kind}.{name}", _KEY, arguments)
    return backend


def _opened(kind: str, settings: Mapping[str, Any], files: Path, rows: int) -> Backend:
    backend = _created(kind, settings)
    with _blamed(kind, "open"):
        backend.open(files)
    with _blamed(kind, "size"):
        size = backend.size()
    if not isinstance(size, Integral) or size != rows:
        reason = f"{kind}.size returned {size!r} for a corpus of {rows} passages: correct it, or build the index again."
        raise UserError(reason, code="mismatch", key=_KEY)
    return backend


@contextmanager
def _blamed(kind: str, what: str) -> Iterator[None]:
    """Convert any error of the body to a UserError that names the backend. A full disk is not its fault."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # SystemExit would end the server.
        if isinstance(error, OSError) and error.errno in FULL:
            raise
        reason = f"{_KEY} {kind}: {what} failed ({one_line(error)}): correct it."
        raise UserError(reason, code="user_code", key=_KEY) from error
