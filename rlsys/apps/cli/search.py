"""`rlsys search`: make passages, build an index, serve it, look at a cassette."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from rlsys.apps.cli.options import print_pairs
from rlsys.errors import Interrupted

_HELP = "Make passages, build and serve the search index; look at recorded searches."
app = typer.Typer(help=_HELP, no_args_is_help=True)
_PLAIN = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
"""A command whose flags are read by the process that it becomes."""
_ENCODER: dict[str, Any] = {"rich_help_panel": "Encoder"}
_FAISS: dict[str, Any] = {"rich_help_panel": "FAISS"}
_BM25: dict[str, Any] = {"rich_help_panel": "BM25"}
_SERVER: dict[str, Any] = {"rich_help_panel": "Elasticsearch, OpenSearch"}
_NORMALIZE = Option("--normalize/--no-normalize", help="In place of the family's.", **_ENCODER)
_KEEP = Option("--keep-embeddings/--drop-embeddings", help="Kept, another FAISS type needs no encoding.", **_FAISS)
_DTYPE = "float32, float16 or bfloat16, which is faster on a CPU with AMX."
_DUPLICATES = "Leave out what an earlier passage says."
_Text = str | None
_Count = int | None
_Number = float | None


@app.command()
def index(
    corpus: Annotated[Path, Argument(help="Passages: jsonl of {id, contents}.")],
    out: Annotated[Path, Argument(help="Folder to write the index to.")],
    kind: Annotated[str, Option(help="dense, bm25, hybrid, elasticsearch or opensearch.")] = "dense",
    replace: Annotated[bool, Option("--replace", help="Lose an index of other inputs that is there.")] = False,
    encoder: Annotated[_Text, Option(help="minilm (the default), or a Hugging Face encoder.", **_ENCODER)] = None,
    family: Annotated[_Text, Option(help="Where the name does not tell it: e5, bge, dpr, ...", **_ENCODER)] = None,
    pooling: Annotated[_Text, Option(help="In place of the family's: mean, cls, pooler or last.", **_ENCODER)] = None,
    query_prefix: Annotated[_Text, Option(help="In place of the family's.", **_ENCODER)] = None,
    passage_prefix: Annotated[_Text, Option(help="In place of the family's.", **_ENCODER)] = None,
    normalize: Annotated[bool | None, _NORMALIZE] = None,
    max_tokens: Annotated[_Count, Option(help="Cut passages and queries there (256).", **_ENCODER)] = None,
    device: Annotated[_Text, Option(help="cpu (the default), cuda, cuda:1.", **_ENCODER)] = None,
    dtype: Annotated[_Text, Option(help=_DTYPE, **_ENCODER)] = None,
    workers: Annotated[_Count, Option(help="Processes that encode (1).", **_ENCODER)] = None,
    faiss_type: Annotated[_Text, Option(help="Flat (exact, the default), HNSW64, IVF4096,PQ64, ...", **_FAISS)] = None,
    nprobe: Annotated[_Count, Option(help="Lists of an IVF index that a query visits.", **_FAISS)] = None,
    ef_search: Annotated[_Count, Option(help="Breadth of a search in HNSW (128).", **_FAISS)] = None,
    max_train_rows: Annotated[_Count, Option(help="Most vectors that FAISS learns from.", **_FAISS)] = None,
    embeddings_dtype: Annotated[_Text, Option(help="float32, or float16 for half the disk.", **_FAISS)] = None,
    keep_embeddings: Annotated[bool | None, _KEEP] = None,
    k1: Annotated[_Number, Option(help="How slowly a repeated word stops to count more (0.9).", **_BM25)] = None,
    b: Annotated[_Number, Option(help="How much a long passage loses, 0 to 1 (0.4).", **_BM25)] = None,
    stopwords: Annotated[_Text, Option(help="Words left out: en or none.", **_BM25)] = None,
    url: Annotated[_Text, Option(help="Address, without credentials.", **_SERVER)] = None,
    index_name: Annotated[_Text, Option(help="Name of the index there.", **_SERVER)] = None,
) -> None:
    """Build an index of a corpus. A build that was ended continues; a complete one is left as it is."""
    given = {name: value for name, value in locals().items() if value is not None}
    settings = {name: value for name, value in given.items() if name not in ("corpus", "out", "kind", "replace")}
    from rlsys.search.index.make import make_index, recipe

    try:
        built = make_index(kind, corpus, out, recipe(kind, settings), replace=replace)
    except KeyboardInterrupt:
        raise Interrupted("Interrupted; the same command continues.") from None
    typer.echo(f"{out}: {'built' if built else 'is there already'}")


@app.command()
def ingest(
    sources: Annotated[list[Path], Argument(help="Files or folders: text, markdown, jsonl, parquet.")],
    out: Annotated[Path, Option(help="Corpus to write: jsonl of {id, contents}.")],
    size: Annotated[int, Option(help="Most words of a passage (tokens with --tokenizer).")] = 100,
    overlap: Annotated[int, Option(help="Words repeated of the passage before.")] = 0,
    tokenizer: Annotated[str, Option(help="Encoder whose tokens are counted in place of words.")] = "",
    text_field: Annotated[str, Option(help="Of rows; by default the first usual name.")] = "",
    title_field: Annotated[str, Option(help="Of rows; by default the first usual name.")] = "",
    id_field: Annotated[str, Option(help="Of rows; by default the first usual name.")] = "",
    drop_duplicates: Annotated[bool, Option("--drop-duplicates", help=_DUPLICATES)] = False,
) -> None:
    """Cut own documents into passages."""
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
    """The same server over a provider of web search. `rlsys search web --help` lists the flags."""
    from rlsys.search.server.command import serve_web

    raise typer.Exit(serve_web(context.args, program="rlsys search web"))


@app.command()
def cassette(path: Annotated[Path, Argument(help="Made by search.cassette.mode=record.")]) -> None:
    """Say what a cassette of recorded searches holds."""
    from rlsys.search.cassette import Cassette

    recorded = Cassette.read(path)
    rows: dict[str, object] = {"topk": recorded.header.topk, **recorded.header.server}
    rows |= {"queries": len(recorded.answers), "calls": len(recorded.latencies_s), "errors": recorded.errors}
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0} if recorded.latencies_s else {}
    rows |= {f"latency {name}": f"{1000 * recorded.quantile_s(share):.1f} ms" for name, share in shares.items()}
    print_pairs({name: str(value) for name, value in rows.items()}, justify="right")
