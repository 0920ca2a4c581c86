"""Implements `rlsys search`: makes passages, builds and serves an index, describes a cassette."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from rlsys.apps.cli.options import print_pairs
from rlsys.errors import Interrupted, UserError

_HELP = "Build and serve a search index. Other commands make passages and describe recorded searches."
app = typer.Typer(help=_HELP, no_args_is_help=True)
_PLAIN = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
"""Settings of commands whose flags the search server parses itself."""
_ENCODER: dict[str, Any] = {"rich_help_panel": "Encoder"}
_FAISS: dict[str, Any] = {"rich_help_panel": "FAISS"}
_BM25: dict[str, Any] = {"rich_help_panel": "BM25"}
_SERVER: dict[str, Any] = {"rich_help_panel": "Elasticsearch, OpenSearch"}
_NORMALIZE = Option(
    "--normalize/--no-normalize", help="Normalise vectors; by default as the encoder family does.", **_ENCODER
)
_KEEP = Option(
    "--keep-embeddings/--drop-embeddings", help="Keep the vectors to build another FAISS type later.", **_FAISS
)
_DTYPE = "float32, float16 or bfloat16 (faster on a CPU with AMX)."
_KINDS = "dense, bm25, hybrid, elasticsearch, opensearch, or your own: package.module.attribute."
_SET = "Setting of an index kind of your own; repeatable."
_DUPLICATES = "Leave out passages that repeat an earlier one."
_Text = str | None
_Count = int | None
_Number = float | None


@app.command()
def index(
    corpus: Annotated[Path, Argument(help="Passages: jsonl of {id, contents}.")],
    out: Annotated[Path, Argument(help="Folder to write the index to.")],
    kind: Annotated[str, Option(help=_KINDS)] = "dense",
    set_: Annotated[list[str], Option("--set", metavar="NAME=VALUE", help=_SET)] = [],  # noqa: B006, never changed
    replace: Annotated[
        bool, Option("--replace", help="Replace an existing index that was built from other inputs.")
    ] = False,
    encoder: Annotated[_Text, Option(help="minilm (the default), or a Hugging Face encoder.", **_ENCODER)] = None,
    family: Annotated[
        _Text, Option(help="Encoder family, if unclear from its name: e5, bge, dpr, ...", **_ENCODER)
    ] = None,
    pooling: Annotated[_Text, Option(help="mean, cls, pooler or last; by default the family's.", **_ENCODER)] = None,
    query_prefix: Annotated[_Text, Option(help="Prefix of queries; by default the family's.", **_ENCODER)] = None,
    passage_prefix: Annotated[_Text, Option(help="Prefix of passages; by default the family's.", **_ENCODER)] = None,
    normalize: Annotated[bool | None, _NORMALIZE] = None,
    max_tokens: Annotated[
        _Count, Option(help="Truncate passages and queries to this length (256).", **_ENCODER)
    ] = None,
    device: Annotated[_Text, Option(help="cpu (the default), cuda, cuda:1.", **_ENCODER)] = None,
    dtype: Annotated[_Text, Option(help=_DTYPE, **_ENCODER)] = None,
    workers: Annotated[_Count, Option(help="Number of encoding processes (1).", **_ENCODER)] = None,
    faiss_type: Annotated[_Text, Option(help="Flat (exact, the default), HNSW64, IVF4096,PQ64, ...", **_FAISS)] = None,
    nprobe: Annotated[_Count, Option(help="Number of IVF lists that a query visits.", **_FAISS)] = None,
    ef_search: Annotated[_Count, Option(help="Breadth of a search in HNSW (128).", **_FAISS)] = None,
    max_train_rows: Annotated[_Count, Option(help="Maximum number of vectors to train FAISS on.", **_FAISS)] = None,
    embeddings_dtype: Annotated[_Text, Option(help="float32, or float16 for half the disk.", **_FAISS)] = None,
    keep_embeddings: Annotated[bool | None, _KEEP] = None,
    k1: Annotated[_Number, Option(help="Term frequency saturation (0.9).", **_BM25)] = None,
    b: Annotated[_Number, Option(help="Length normalisation, 0 to 1 (0.4).", **_BM25)] = None,
    stopwords: Annotated[_Text, Option(help="Stop words to leave out: en or none.", **_BM25)] = None,
    url: Annotated[_Text, Option(help="Address of the server, without credentials.", **_SERVER)] = None,
    index_name: Annotated[_Text, Option(help="Name of the index on the server.", **_SERVER)] = None,
) -> None:
    """Build an index of a corpus. Continues an interrupted build; leaves a complete index unchanged."""
    given = {name: value for name, value in locals().items() if value is not None}
    settings = {
        name: value for name, value in given.items() if name not in ("corpus", "out", "kind", "replace", "set_")
    }
    if set_ and "." not in kind:
        reason = f"--set {set_[0]} is only for an index kind of your own: an index of kind {kind} has flags instead."
        raise UserError(reason, code="conflict", key="--set")
    settings |= dict(map(_pair, set_))
    from rlsys.search.index.make import make_index, recipe

    try:
        built = make_index(kind, corpus, out, recipe(kind, settings), replace=replace)
    except KeyboardInterrupt:
        raise Interrupted("Interrupted: run the same command again to continue.") from None
    typer.echo(f"{out}: {'built' if built else 'already complete'}")


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise UserError(f"--set {text} is not a setting: write --set NAME=VALUE.", code="malformed", key="--set")
    return name, value


@app.command()
def ingest(
    sources: Annotated[list[Path], Argument(help="Files or folders: text, markdown, jsonl, parquet.")],
    out: Annotated[Path, Option(help="Corpus to write: jsonl of {id, contents}.")],
    size: Annotated[int, Option(help="Maximum number of words per passage (tokens with --tokenizer).")] = 100,
    overlap: Annotated[int, Option(help="Words repeated from the previous passage.")] = 0,
    tokenizer: Annotated[str, Option(help="Encoder whose tokens are counted instead of words.")] = "",
    text_field: Annotated[str, Option(help="Field with the text; by default the first usual name.")] = "",
    title_field: Annotated[str, Option(help="Field with the title; by default the first usual name.")] = "",
    id_field: Annotated[str, Option(help="Field with the id; by default the first usual name.")] = "",
    drop_duplicates: Annotated[bool, Option("--drop-duplicates", help=_DUPLICATES)] = False,
) -> None:
    """Split your own documents into passages."""
    from rlsys.search.ingest import Chunking, Fields, ingest

    fields = Fields(text_field, title_field, id_field)
    summary = ingest(sources, out, Chunking(size, overlap, tokenizer), fields, drop_duplicates=drop_duplicates)
    print_pairs(dict(summary.rows()))


@app.command(context_settings=_PLAIN)
def serve(context: typer.Context) -> None:
    """Answer queries over HTTP until interrupted. `rlsys search serve --help` lists the flags."""
    from rlsys.search.server.command import serve_index

    raise typer.Exit(serve_index(context.args, program="rlsys search serve"))


@app.command(context_settings=_PLAIN)
def web(context: typer.Context) -> None:
    """Serve the same protocol over a web search provider. `rlsys search web --help` lists the flags."""
    from rlsys.search.server.command import serve_web

    raise typer.Exit(serve_web(context.args))


@app.command()
def cassette(path: Annotated[Path, Argument(help="Cassette file made with search.cassette.mode=record.")]) -> None:
    """Describe a cassette of recorded searches."""
    from rlsys.search.cassette import Cassette

    recorded = Cassette.read(path)
    rows: dict[str, object] = {"topk": recorded.header.topk, **recorded.header.server}
    rows |= {"queries": len(recorded.answers), "calls": len(recorded.latencies_s), "errors": recorded.errors}
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0} if recorded.latencies_s else {}
    rows |= {f"latency {name}": f"{1000 * recorded.quantile_s(share):.1f} ms" for name, share in shares.items()}
    print_pairs({name: str(value) for name, value in rows.items()}, justify="right")
