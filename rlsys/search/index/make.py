"""Builds an index of any kind with a progress bar, for `rlsys search index`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from rlsys.errors import UserError
from rlsys.search.corpus import Corpus
from rlsys.search.encoders.spec import EncoderSpec
from rlsys.search.index.backend import build_backend, is_backend, settings_of
from rlsys.search.index.dense import BuildOptions, build
from rlsys.search.index.folder import BM25, DENSE, HYBRID, MANIFEST_FILE, REMOTE, OnProgress, read_manifest
from rlsys.search.index.fusion import build_hybrid
from rlsys.search.index.lexical import LexicalOptions, build_lexical
from rlsys.search.index.remote import build_remote

_LINE_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class IndexRecipe:
    """Settings of an index; `PARTS` lists the settings that each kind accepts."""

    encoder: EncoderSpec = field(default_factory=lambda: EncoderSpec("minilm"))
    dense: BuildOptions = field(default_factory=BuildOptions)
    lexical: LexicalOptions = field(default_factory=LexicalOptions)
    url: str | None = None
    """URL of the Elasticsearch or OpenSearch server."""
    index_name: str | None = None
    """Name of the index on that server."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a backend from outside of the package."""


_SPEC = tuple(item.name for item in fields(EncoderSpec) if item.name != "name")
_DENSE = tuple(item.name for item in fields(BuildOptions))
_LEXICAL = tuple(item.name for item in fields(LexicalOptions))
PARTS: Mapping[str, tuple[str, ...]] = {
    DENSE: ("encoder", *_SPEC, *_DENSE),
    BM25: _LEXICAL,
    HYBRID: ("encoder", *_SPEC, *_DENSE, *_LEXICAL),
    **dict.fromkeys(REMOTE, ("url", "index_name", "k1", "b")),
}
"""Kind of index -> names of its settings."""
KINDS = f"{', '.join(PARTS)}, or package.module.attribute"


def recipe(kind: str, settings: Mapping[str, Any]) -> IndexRecipe:
    """Return the recipe with `settings`; those of a backend may be text.

    Raises UserError for an unknown kind, or a setting that the kind lacks.
    """
    if is_backend(kind):
        return IndexRecipe(settings=settings_of(kind, settings))
    if kind not in PARTS:
        raise UserError(f"index kind {kind!r} is unknown: choose one of {KINDS}.", code="unknown", key="kind")
    for name in settings:
        if name not in PARTS[kind]:
            raise UserError(
                f"an index of kind {kind} has no {name}: leave it out, or choose another kind.",
                code="conflict",
                key=name,
            )

    def given(names: tuple[str, ...]) -> dict[str, Any]:
        return {name: settings[name] for name in names if name in settings}

    return IndexRecipe(
        EncoderSpec(settings.get("encoder", "minilm"), **given(_SPEC)),
        BuildOptions(**given(_DENSE)),
        LexicalOptions(**given(_LEXICAL)),
        **given(("url", "index_name")),
    )


def make_index(
    kind: str, corpus: str | Path, out: str | Path, made: IndexRecipe | None = None, *, replace: bool = True
) -> bool:
    """Build the index folder `out` with a progress display; False if the same index exists already.

    Unless `replace` is set, raises UserError if `out` holds a different index.
    """
    passages, made = Corpus.open(corpus), made or IndexRecipe()
    if not replace:
        _refuse_other(Path(out), kind, passages, made)
    with shown(Console(stderr=True)) as progress:
        if kind == DENSE:
            return build(passages, made.encoder, out, made.dense, progress)
        if is_backend(kind):
            return build_backend(kind, settings_of(kind, made.settings), passages, out, progress)
        if kind == BM25:
            return build_lexical(passages, out, made.lexical, progress)
        if kind == HYBRID:
            return build_hybrid(passages, made.encoder, out, made.dense, made.lexical, progress)
        if made.url is None or made.index_name is None:
            raise UserError(
                f"an index of kind {kind} is stored on a server: give the server's url and an index_name.",
                code="missing",
                key="url" if made.url is None else "index_name",
            )
        k1, b = made.lexical.k1, made.lexical.b
        return build_remote(passages, out, made.url, made.index_name, kind, progress, k1=k1, b=b)


def _refuse_other(out: Path, kind: str, corpus: Corpus, made: IndexRecipe) -> None:
    if not (out / MANIFEST_FILE).is_file():
        return
    there = read_manifest(out)
    asked: dict[str, Any] = {"kind": kind, "corpus_sha256": corpus.checksum}
    if kind == DENSE:
        asked |= {"encoder": made.encoder.name, "max_tokens": made.encoder.max_tokens}
    for key, value in asked.items():
        if there.get(key) != value:
            problem = f"{out} holds an index whose {key} is {there.get(key)}, not {value}"
            raise UserError(f"{problem}: give another folder, or add --replace.", code="exists", key=str(out))


@contextmanager
def shown(console: Console) -> Iterator[OnProgress]:
    """Yield a callback that shows progress with rate and remaining time: a bar on a terminal, else lines of text."""
    if not console.is_terminal:
        yield progress_lines(lambda line: console.print(line, highlight=False, soft_wrap=True))
        return
    text = TextColumn("{task.description}")
    with Progress(text, BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn(), console=console) as bar:
        tasks: dict[str, int] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                # The rate excludes passages done by an earlier run.
                tasks[stage] = bar.add_task(f"{stage} passages", total=total, completed=done)
            bar.update(tasks[stage], completed=done)  # type: ignore[arg-type]

        yield show


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        """Return the rate in passages per second."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f}/s")


def progress_lines(write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> OnProgress:
    """Return a progress callback that writes a line at most every 10 s, and one at the end of each stage."""
    current, began, before, written = "", 0.0, 0, 0.0

    def show(stage: str, done: int, total: int) -> None:
        nonlocal current, began, before, written
        now = clock()
        if stage != current:
            current, began, before, written = stage, now, done, now
            if done < total:
                where = f", continuing after {done:,}" if done else ""
                write(f"{stage}: {total:,} passages{where}")
        elif done == total or now - written >= _LINE_EVERY_S:
            written = now
            rate = (done - before) / max(now - began, 1e-9)
            left = f", {(total - done) / rate:,.0f} s left" if rate and done < total else ""
            write(f"{stage}: {done:,} of {total:,} passages, {rate:,.0f}/s{left}")

    return show
