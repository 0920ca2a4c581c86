"""One way to build an index of any kind, with a progress bar: what `rlsys search index` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rlsys.errors import UserError
from rlsys.search.corpus import Corpus
from rlsys.search.encoders.spec import EncoderSpec
from rlsys.search.index.build import BuildOptions, build
from rlsys.search.index.fusion import build_hybrid
from rlsys.search.index.lexical import LexicalOptions, build_lexical
from rlsys.search.index.manifest import DENSE, MANIFEST_FILE, read_manifest
from rlsys.search.index.progress import OnProgress, shown
from rlsys.search.index.remote import build_remote

DEFAULT_ENCODER = EncoderSpec("minilm")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What an index is made with. Each kind takes the parts that `PARTS` names."""

    encoder: EncoderSpec = DEFAULT_ENCODER
    dense: BuildOptions = field(default_factory=BuildOptions)
    lexical: LexicalOptions = field(default_factory=LexicalOptions)
    url: str | None = None
    """Of the Elasticsearch or OpenSearch server."""
    index_name: str | None = None
    """Of the index on that server."""


_WEIGHTS = ("k1", "b")
_ENCODER = ("encoder", *(field.name for field in fields(EncoderSpec) if field.name != "name"))
_DENSE = tuple(field.name for field in fields(BuildOptions))
_REMOTE = ("url", "index_name", *_WEIGHTS)
PARTS: Mapping[str, tuple[str, ...]] = {
    "dense": (*_ENCODER, *_DENSE),
    "bm25": (*_WEIGHTS, "stopwords"),
    "hybrid": (*_ENCODER, *_DENSE, *_WEIGHTS, "stopwords"),
    "elasticsearch": _REMOTE,
    "opensearch": _REMOTE,
}
"""Kind -> the settings that it has."""


def recipe(kind: str, settings: Mapping[str, Any]) -> Recipe:
    """A recipe from settings by name. Raises UserError for an unknown kind, and for one that the kind has not."""
    if kind not in PARTS:
        raise UserError(f"index kind {kind!r} is unknown: choose one of {', '.join(PARTS)}")
    for name in settings:
        if name not in PARTS[kind]:
            raise UserError(f"an index of kind {kind} has no {name}: leave it out, or choose another kind")

    def given(names: tuple[str, ...]) -> dict[str, Any]:
        return {name: settings[name] for name in names if name in settings}

    encoder = given(_ENCODER)
    return Recipe(
        replace(DEFAULT_ENCODER, **{"name" if key == "encoder" else key: value for key, value in encoder.items()}),
        BuildOptions(**given(_DENSE)),
        LexicalOptions(**given((*_WEIGHTS, "stopwords"))),
        **given(("url", "index_name")),
    )


def make_index(
    kind: str, corpus: str | Path, out: str | Path, made: Recipe | None = None, *, replace: bool = True
) -> bool:
    """Build the index folder `out` and show how far it is; False if it was there already, with these inputs.

    Without `replace` an index of another kind, corpus or encoder that is there is refused with UserError.
    """
    from rich.console import Console

    passages, made = Corpus.open(corpus), made or Recipe()
    if not replace:
        _refuse_other(Path(out), kind, passages, made)
    with shown(Console(stderr=True)) as progress:
        return _BUILDERS[kind](passages, out, made, progress)


def _refuse_other(out: Path, kind: str, corpus: Corpus, made: Recipe) -> None:
    if not (out / MANIFEST_FILE).is_file():
        return
    there = read_manifest(out)
    asked: dict[str, Any] = {"kind": kind, "corpus_sha256": corpus.checksum}
    if kind == DENSE:
        asked |= {"encoder": made.encoder.name, "max_tokens": made.encoder.max_tokens}
    for key, value in asked.items():
        if there.get(key) != value:
            raise UserError(
                f"{out} holds an index whose {key} is {there.get(key)}, not {value}: give another folder, or "
                "--replace to lose it"
            )


def _dense(corpus: Corpus, out: str | Path, made: Recipe, progress: OnProgress) -> bool:
    return build(corpus, made.encoder, out, made.dense, progress)


def _bm25(corpus: Corpus, out: str | Path, made: Recipe, progress: OnProgress) -> bool:
    return build_lexical(corpus, out, made.lexical, progress)


def _hybrid(corpus: Corpus, out: str | Path, made: Recipe, progress: OnProgress) -> bool:
    return build_hybrid(corpus, made.encoder, out, made.dense, made.lexical, progress)


def _remote(engine: str) -> Callable[[Corpus, str | Path, Recipe, OnProgress], bool]:
    def load(corpus: Corpus, out: str | Path, made: Recipe, progress: OnProgress) -> bool:
        if made.url is None or made.index_name is None:
            raise UserError(f"an index of kind {engine} lies on a server: give its url and an index_name there")
        k1, b = made.lexical.k1, made.lexical.b
        return build_remote(corpus, out, made.url, made.index_name, engine, progress, k1=k1, b=b)

    return load


_BUILDERS: Mapping[str, Callable[[Corpus, str | Path, Recipe, OnProgress], bool]] = {
    "dense": _dense,
    "bm25": _bm25,
    "hybrid": _hybrid,
    "elasticsearch": _remote("elasticsearch"),
    "opensearch": _remote("opensearch"),
}
