"""The description of an index folder, `manifest.json`, and how a folder is opened by it.

Invariant: the file is written last and under another name first, so a folder that has it is complete. Every kind of
index has `format`, `kind`, `corpus_sha256` and `rows`; what else it holds is the kind's own matter.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from rlsys.errors import UserError
from rlsys.search.encoders.spec import EncoderSpec
from rlsys.search.retrieval import Retriever

MANIFEST_FILE = "manifest.json"
CORPUS_FILE = "corpus.jsonl"
FORMAT = 2
"""Of the folder. Folders without the key are format 1, of before there were kinds."""
DENSE, BM25, HYBRID = "dense", "bm25", "hybrid"
REMOTE = ("elasticsearch", "opensearch")

T = TypeVar("T")


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """All keys of the folder's manifest. Raises UserError when there is none of this format."""
    path = Path(folder) / MANIFEST_FILE
    if not path.is_file():
        raise UserError(f"{folder} is not an index (no {MANIFEST_FILE}): make one with `rlsys search index`")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}): build the index again") from None
    written = values.get("format", 1) if isinstance(values, dict) else None
    if written != FORMAT:
        raise UserError(
            f"{path} has format {written}, this version of rlsys reads {FORMAT}: build the index again, or serve "
            "it with the version that built it"
        )
    if not isinstance(values.get("kind"), str):
        raise UserError(f"{path} names no kind of index: build the index again")
    return values


def read_values(folder: str | Path, kinds: Iterable[str], wanted: str) -> dict[str, Any]:
    """The manifest's keys but format and kind. Raises UserError, which names what is `wanted`, for other kinds."""
    values = read_manifest(folder)
    if (kind := values.pop("kind")) not in kinds:
        raise UserError(f"{folder} is an index of kind {kind!r}, not {wanted}")
    del values["format"]
    return values


def typed(made: type[T], values: Any, folder: str | Path) -> T:
    """The dataclass `made` with `values` from the folder's manifest.

    Raises UserError for a key too many or too few, and for a value of another type than its field.
    """
    types = get_type_hints(made)
    needed = {item.name for item in fields(made) if item.default is MISSING}  # type: ignore[arg-type]
    given = values if isinstance(values, dict) else {}
    bad = {key for key in given if key not in types or not _is_a(given[key], types[key])}
    if wrong := sorted(bad | (needed - given.keys())):
        raise UserError(
            f"{Path(folder) / MANIFEST_FILE} does not hold its keys (missing, unknown or of the wrong type: "
            f"{', '.join(wrong)}): build the index again"
        )
    return made(**given)


def _is_a(value: Any, kind: Any) -> bool:
    """True for a JSON value of type `kind`, where a whole number is a float as well and a truth value no number."""
    return kind is bool if isinstance(value, bool) else isinstance(value, int | float if kind is float else kind)


def write_manifest(folder: str | Path, kind: str, values: Mapping[str, Any]) -> None:
    """Write the manifest of a folder whose other files are there; `format` and `kind` are added to `values`."""
    path = Path(folder) / MANIFEST_FILE
    part = path.with_name(f".{MANIFEST_FILE}.part")
    with part.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"format": FORMAT, "kind": kind} | dict(values), indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The inputs of a dense index. Two builds with equal manifests give the same index."""

    corpus_sha256: str
    rows: int
    encoder: str
    encoder_sha256: str
    family: str
    query_prefix: str
    passage_prefix: str
    pooling: str
    normalize: bool
    max_tokens: int
    dimension: int
    embeddings_dtype: str
    """As the vectors were stored before FAISS got them: float32 or float16."""
    faiss_type: str
    """The string that faiss.index_factory took."""
    nprobe: int | None
    """Lists that a query visits unless it is opened otherwise; null where there are no lists."""
    ef_search: int | None
    """Breadth of a search in a graph unless it is opened otherwise; null where there is no graph."""

    @classmethod
    def read(cls, folder: str | Path) -> Manifest:
        """The folder's manifest. Raises UserError when there is none, or none of a dense index."""
        return typed(cls, read_values(folder, [DENSE], f"{DENSE!r}: give a dense one"), folder)

    def embeddings(self) -> dict[str, Any]:
        """The part that the embeddings depend on: two manifests that share it can share them."""
        return {k: v for k, v in asdict(self).items() if k not in ("faiss_type", "nprobe", "ef_search")}

    def query_spec(
        self, encoder: str | EncoderSpec | None = None, *, device: str = "cpu", dtype: str | None = None
    ) -> EncoderSpec:
        """The encoder of queries, which encodes them as the passages were.

        `encoder` may name where the weights lie now, or be a spec whose fields agree with the manifest; what a spec
        leaves to its family is taken from here. Raises UserError for a field that contradicts it.
        """
        shared = ("family", "max_tokens", "pooling", "query_prefix", "passage_prefix", "normalize")
        made = EncoderSpec(self.encoder, device=device, dtype=dtype, **{name: getattr(self, name) for name in shared})
        if encoder is None:
            return made
        if isinstance(encoder, str):
            return replace(made, name=encoder)
        for name in shared:
            asked, built = getattr(encoder, name), getattr(made, name)
            if asked not in (built, None) and (name, asked) != ("family", "auto"):
                raise UserError(
                    f"the encoder's {name} is given as {asked!r}, the index was built with {built!r}: leave it "
                    "out, or build the index again, because vectors of two kinds cannot be compared"
                )
        return replace(made, name=encoder.name, device=encoder.device, dtype=encoder.dtype)


def open_retriever(folder: str | Path, *, own_process: bool = False, **options: Any) -> Retriever:
    """Open the index in `folder`, whatever its kind.

    `options` are encoder, device and dtype of `VectorRetriever.open`, and the fields of `SearchOptions`, for kinds that
    have vectors; None leaves each as it is there. With `own_process` an encoder, if there is one, gets a process.
    Raises UserError for an option that the kind does not have, and for an unknown kind.
    """
    # Each kind has libraries of its own, so only those that are needed are loaded.
    kind = str(read_manifest(folder)["kind"])
    given = {name: value for name, value in options.items() if value is not None}
    loading: dict[str, Any] = {name: given.pop(name) for name in ("encoder", "device", "dtype") if name in given}
    if kind in (DENSE, HYBRID):
        from rlsys.search.index.vectors import SearchOptions

        dense = {**loading, "options": SearchOptions(**given), "own_process": own_process}
        if kind == DENSE:
            from rlsys.search.index.dense import VectorRetriever

            return VectorRetriever.open(folder, **dense)
        from rlsys.search.index.fusion import HybridRetriever

        return HybridRetriever.open(folder, **dense)
    if names := [*loading, *given]:
        raise UserError(f"{folder} is an index of kind {kind!r}, which has no {', '.join(names)}: leave it out")
    if kind == BM25:
        from rlsys.search.index.lexical import LexicalRetriever

        return LexicalRetriever.open(folder)
    if kind in REMOTE:
        from rlsys.search.index.remote import RemoteRetriever

        return RemoteRetriever.open(folder)
    raise UserError(f"{folder} is an index of kind {kind!r}, which this version of rlsys does not know: upgrade it")
