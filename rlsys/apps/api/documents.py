"""Own documents, files or values, to an index folder.

Beside the index lie `<index>.documents.jsonl` (documents that were given as values) and `<index>.passages.jsonl`, what the
index was built from. The same documents give the same bytes, so an index of them is found again and not built twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rlsys.apps.data.split import json_line
from rlsys.errors import UserError
from rlsys.files import write_atomically
from rlsys.search.index.manifest import DENSE, MANIFEST_FILE, read_manifest

if TYPE_CHECKING:  # Building loads libraries of seconds.
    from rlsys.search.index.make import Recipe

CHUNK_WORDS = 100
"""Of a passage, as in the Wikipedia of 2018 that Search-R1 searches."""
Documents = str | Path | Sequence[Path] | Sequence[str | Mapping[str, Any]]
"""A file or folder, several, or the documents themselves: texts, or mappings with "text"."""


def index_documents(kind: str, documents: Documents, index: Path, settings: Mapping[str, Any], chunk_size: int) -> None:
    """Build the index folder `index` of `documents`, unless it is there.

    Raises UserError for an index of others, which stays as it is with what lies beside it.
    """
    from rlsys.search.index.make import make_index, recipe
    from rlsys.search.ingest.ingest import Chunking, ingest

    made = recipe(kind, settings)
    index.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{index.name}.", dir=index.parent) as folder:
        passages = Path(folder) / f"{index.name}.passages.jsonl"
        ingest(_files(documents, passages.with_name(f"{index.name}.documents.jsonl")), passages, Chunking(chunk_size))
        _refuse_other(index, kind, passages, made)
        for file in Path(folder).iterdir():
            file.replace(index.with_name(file.name))
    make_index(kind, index.with_name(passages.name), index, made, replace=False)


def _refuse_other(index: Path, kind: str, passages: Path, made: Recipe) -> None:
    if not (index / MANIFEST_FILE).is_file():
        return
    from rlsys.search.corpus import Corpus

    there = read_manifest(index)
    asked = {"kind": kind, "corpus_sha256": Corpus.open(passages).checksum}
    asked |= {"encoder": made.encoder.name} if kind == DENSE else {}
    for key, value in asked.items():
        if there.get(key) != value:
            what = (
                "of other documents, or of passages of another size"
                if key == "corpus_sha256"
                else f"of {key} {there.get(key)}"
            )
            raise UserError(f"{index} holds an index {what}: give another index_path, or remove that folder.")


def _files(documents: Documents, file: Path) -> list[Path]:
    """Where the documents are; values are written to `file`."""
    if isinstance(documents, str | Path):
        return [Path(documents)]
    if not isinstance(documents, Sequence):
        raise UserError(
            f"documents={documents!r} are no documents: give a file or a folder, or a list of texts or of mappings."
        )
    given = list(documents)
    if given and all(isinstance(one, Path) for one in given):
        return [one for one in given if isinstance(one, Path)]
    rows = [_row(number, one) for number, one in enumerate(given, start=1)]
    write_atomically(file, "".join(json_line(row, "documents") for row in rows))
    return [file]


def _row(number: int, document: object) -> Mapping[str, Any]:
    if isinstance(document, str):
        return {"text": document}
    if isinstance(document, Mapping):
        return document
    raise UserError(
        f'document {number} is a {type(document).__name__}: give texts, mappings with "text", or paths alone (as Path).'
    )
