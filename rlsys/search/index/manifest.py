"""What an index folder says of itself: `manifest.json`.

Invariant: the file is written last and under another name first, so a folder that has it is complete. Every
kind of index has `format`, `kind`, `corpus_sha256` and `rows`; what else it holds is the kind's own matter.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from rlsys.errors import UserError
from rlsys.search.corpus import Corpus
from rlsys.search.encoders.spec import EncoderFacts, EncoderSpec

MANIFEST_FILE = "manifest.json"
FORMAT = 2
"""Of the folder. Folders without the key are format 1, of before there were kinds."""
DENSE = "dense"

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
    found = values.get("format", 1) if isinstance(values, dict) else None
    if found != FORMAT:
        raise UserError(
            f"{path} has format {found}, this version of rlsys reads {FORMAT}: build the index again, or serve "
            "it with the version that built it"
        )
    if not isinstance(values.get("kind"), str):
        raise UserError(f"{path} names no kind of index: build the index again")
    return values


def read_kind(folder: str | Path) -> str:
    """What kind of index the folder holds, as `open.open_retriever` tells them apart."""
    return str(read_manifest(folder)["kind"])


def typed(made: type[T], values: Any, folder: str | Path) -> T:
    """The dataclass `made` with `values` from the folder's manifest.

    Raises UserError for a key too many or too few, and for a value of another type than its field.
    """
    types = get_type_hints(made)
    needed = {item.name for item in fields(made) if item.default is MISSING}  # type: ignore[arg-type]
    found = values if isinstance(values, dict) else {}
    bad = {key for key in found if key not in types or not _is_a(found[key], types[key])}
    if wrong := sorted(bad | (needed - found.keys())):
        raise UserError(
            f"{Path(folder) / MANIFEST_FILE} does not hold its keys (missing, unknown or of the wrong type: "
            f"{', '.join(wrong)}): build the index again"
        )
    return made(**found)


def _is_a(value: Any, kind: Any) -> bool:
    """True for a JSON value of type `kind`, where a whole number is a float as well and a truth value no number."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)


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
    """What a dense index was made from. Two builds with equal manifests give the same index."""

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
    """The string that faiss.index_factory took; the type alone for an index from elsewhere."""
    nprobe: int | None
    """Lists that a query visits unless it is opened otherwise; null where there are no lists."""
    ef_search: int | None
    """Breadth of a search in a graph unless it is opened otherwise; null where there is no graph."""

    @classmethod
    def of(
        cls,
        corpus: Corpus,
        facts: EncoderFacts,
        *,
        embeddings_dtype: str = "float32",
        faiss_type: str = "Flat",
        nprobe: int | None = None,
        ef_search: int | None = None,
    ) -> Manifest:
        """The manifest of an index of `corpus` made with the encoder of `facts`."""
        return cls(
            corpus_sha256=corpus.checksum,
            rows=len(corpus),
            encoder=facts.name,
            encoder_sha256=facts.checksum,
            family=facts.family_name,
            query_prefix=facts.family.query_prefix,
            passage_prefix=facts.family.passage_prefix,
            pooling=facts.family.pooling.value,
            normalize=facts.family.normalize,
            max_tokens=facts.max_tokens,
            dimension=facts.dimension,
            embeddings_dtype=embeddings_dtype,
            faiss_type=faiss_type,
            nprobe=nprobe,
            ef_search=ef_search,
        )

    @classmethod
    def read(cls, folder: str | Path) -> Manifest:
        """The folder's manifest. Raises UserError when there is none, or none of a dense index."""
        values = read_manifest(folder)
        kind = values.pop("kind")
        if kind != DENSE:
            raise UserError(f"{folder} is an index of kind {kind!r}, not {DENSE!r}: give a dense one")
        del values["format"]
        return typed(cls, values, folder)

    def write(self, folder: str | Path) -> None:
        """Write it to a folder that is complete but for this."""
        write_manifest(folder, DENSE, asdict(self))

    def embeddings(self) -> dict[str, Any]:
        """The part that the embeddings depend on: two manifests that share it can share them."""
        values = asdict(self)
        for key in ("faiss_type", "nprobe", "ef_search"):
            del values[key]
        return values

    def with_settings_of(self, other: Manifest) -> Manifest:
        """This one, searched as `other` is: equal to `other` if the vectors in FAISS are the same."""
        return replace(self, nprobe=other.nprobe, ef_search=other.ef_search)

    def query_spec(
        self, encoder: str | EncoderSpec | None = None, *, device: str = "cpu", dtype: str | None = None
    ) -> EncoderSpec:
        """How queries are encoded: as the passages were.

        `encoder` may name where the weights lie now, or be a spec whose fields agree with the manifest; what a
        spec leaves to its family is taken from here. Raises UserError for a field that contradicts it.
        """
        made = EncoderSpec(
            name=self.encoder,
            family=self.family,
            max_tokens=self.max_tokens,
            device=device,
            dtype=dtype,
            pooling=self.pooling,
            query_prefix=self.query_prefix,
            passage_prefix=self.passage_prefix,
            normalize=self.normalize,
        )
        if encoder is None:
            return made
        if isinstance(encoder, str):
            return replace(made, name=encoder)
        for name in ("family", "max_tokens", "pooling", "query_prefix", "passage_prefix", "normalize"):
            asked, built = getattr(encoder, name), getattr(made, name)
            if asked not in (built, None) and (name, asked) != ("family", "auto"):
                raise UserError(
                    f"the encoder's {name} is given as {asked!r}, the index was built with {built!r}: leave it "
                    "out, or build the index again, because vectors of two kinds cannot be compared"
                )
        return replace(made, name=encoder.name, device=encoder.device, dtype=encoder.dtype)
