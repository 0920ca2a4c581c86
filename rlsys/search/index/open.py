"""Any index folder, opened for what its manifest says that it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlsys.errors import UserError
from rlsys.search.encoders.spec import EncoderSpec
from rlsys.search.index.folder import SearchOptions
from rlsys.search.index.manifest import DENSE, read_kind
from rlsys.search.retrieval import Retriever


def open_retriever(
    folder: str | Path,
    *,
    encoder: str | EncoderSpec | None = None,
    device: str | None = None,
    dtype: str | None = None,
    nprobe: int | None = None,
    ef_search: int | None = None,
    mmap: bool | None = None,
    faiss_gpu: bool | None = None,
    depth: int | None = None,
    own_process: bool = False,
) -> Retriever:
    """Open the index in `folder`, whatever its kind.

    The options are those of `DenseRetriever.open` and `folder.SearchOptions`, for kinds that have vectors; None
    leaves each as it is there. With `own_process` an encoder, if there is one, gets a process. Raises UserError for
    one that the kind does not have, and for an unknown kind.
    """
    kind = read_kind(folder)
    loading = _given(encoder=encoder, device=device, dtype=dtype)
    searching = _given(nprobe=nprobe, ef_search=ef_search, mmap=mmap, faiss_gpu=faiss_gpu, depth=depth)
    dense: dict[str, Any] = loading | ({"options": SearchOptions(**searching)} if searching else {})
    if kind == DENSE:
        from rlsys.search.index.dense import DenseRetriever

        return DenseRetriever.open(folder, own_process=own_process, **dense)
    if kind == "hybrid":
        from rlsys.search.index.fusion import HybridRetriever

        return HybridRetriever.open(folder, own_process=own_process, **dense)
    if dense:
        raise UserError(
            f"{folder} is an index of kind {kind!r}, which has no {', '.join(loading | searching)}: leave it out"
        )
    if kind == "bm25":
        from rlsys.search.index.lexical import LexicalRetriever

        return LexicalRetriever.open(folder)
    if kind in ("elasticsearch", "opensearch"):
        from rlsys.search.index.remote import RemoteRetriever

        return RemoteRetriever.open(folder)
    raise UserError(f"{folder} is an index of kind {kind!r}, which this version of rlsys does not know: upgrade it")


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
