"""`rlsys search`: make passages, build an index, serve it, look at a cassette."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rlsys.errors import Interrupted

app = typer.Typer(
    help="Make passages, build and serve the search index; look at recorded searches.", no_args_is_help=True
)
_PLAIN = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
"""A command whose flags are read by the process that it becomes."""
_ENCODER: dict[str, Any] = {"rich_help_panel": "Encoder"}
_FAISS: dict[str, Any] = {"rich_help_panel": "FAISS"}
_BM25: dict[str, Any] = {"rich_help_panel": "BM25"}
_SERVER: dict[str, Any] = {"rich_help_panel": "Elasticsearch, OpenSearch"}
_NORMALIZE = typer.Option("--normalize/--no-normalize", help="In place of the family's.", **_ENCODER)
_KEEP = typer.Option(
    "--keep-embeddings/--drop-embeddings", help="Kept, another FAISS type needs no encoding.", **_FAISS
)
_ALWAYS = ("corpus", "out", "kind", "replace")
"""Parameters of an index of any kind."""
_Text = str | None
_Count = int | None
_Number = float | None


@app.command()
def index(
    corpus: Annotated[Path, typer.Argument(help="Passages: jsonl of {id, contents}.")],
    out: Annotated[Path, typer.Argument(help="Folder to write the index to.")],
    kind: Annotated[str, typer.Option(help="dense, bm25, hybrid, elasticsearch or opensearch.")] = "dense",
    replace: Annotated[bool, typer.Option("--replace", help="Lose an index of other inputs that is there.")] = False,
    encoder: Annotated[_Text, typer.Option(help="minilm (the default), or a Hugging Face encoder.", **_ENCODER)] = None,
    family: Annotated[
        _Text, typer.Option(help="Where the name does not tell it: e5, bge, dpr, ...", **_ENCODER)
    ] = None,
    pooling: Annotated[
        _Text, typer.Option(help="In place of the family's: mean, cls, pooler or last.", **_ENCODER)
    ] = None,
    query_prefix: Annotated[_Text, typer.Option(help="In place of the family's.", **_ENCODER)] = None,
    passage_prefix: Annotated[_Text, typer.Option(help="In place of the family's.", **_ENCODER)] = None,
    normalize: Annotated[bool | None, _NORMALIZE] = None,
    max_tokens: Annotated[_Count, typer.Option(help="Cut passages and queries there (256).", **_ENCODER)] = None,
    device: Annotated[_Text, typer.Option(help="cpu (the default), cuda, cuda:1.", **_ENCODER)] = None,
    dtype: Annotated[
        _Text, typer.Option(help="float32, float16 or bfloat16, which is faster on a CPU with AMX.", **_ENCODER)
    ] = None,
    workers: Annotated[_Count, typer.Option(help="Processes that encode (1).", **_ENCODER)] = None,
    faiss_type: Annotated[
        _Text, typer.Option(help="Flat (exact, the default), HNSW64, IVF4096,PQ64, ...", **_FAISS)
    ] = None,
    nprobe: Annotated[_Count, typer.Option(help="Lists of an IVF index that a query visits.", **_FAISS)] = None,
    ef_search: Annotated[_Count, typer.Option(help="Breadth of a search in HNSW (128).", **_FAISS)] = None,
    max_train_rows: Annotated[_Count, typer.Option(help="Most vectors that FAISS learns from.", **_FAISS)] = None,
    embeddings_dtype: Annotated[_Text, typer.Option(help="float32, or float16 for half the disk.", **_FAISS)] = None,
    keep_embeddings: Annotated[bool | None, _KEEP] = None,
    k1: Annotated[_Number, typer.Option(help="How slowly a repeated word stops to count more (0.9).", **_BM25)] = None,
    b: Annotated[_Number, typer.Option(help="How much a long passage loses, 0 to 1 (0.4).", **_BM25)] = None,
    stopwords: Annotated[_Text, typer.Option(help="Words left out: en or none.", **_BM25)] = None,
    url: Annotated[_Text, typer.Option(help="Address, without credentials.", **_SERVER)] = None,
    index_name: Annotated[_Text, typer.Option(help="Name of the index there.", **_SERVER)] = None,
) -> None:
    """Build an index of a corpus. A build that was ended continues; a complete one is left as it is."""
    settings = {name: value for name, value in locals().items() if value is not None and name not in _ALWAYS}
    from rlsys.search.index.make import make_index, recipe

    try:
        built = make_index(kind, corpus, out, recipe(kind, settings), replace=replace)
    except KeyboardInterrupt:
        raise Interrupted("Interrupted; the same command continues.") from None
    typer.echo(f"{out}: {'built' if built else 'is there already'}")


@app.command()
def ingest(
    sources: Annotated[list[Path], typer.Argument(help="Files or folders: text, markdown, jsonl, parquet.")],
    out: Annotated[Path, typer.Option(help="Corpus to write: jsonl of {id, contents}.")],
    size: Annotated[int, typer.Option(help="Most words of a passage (tokens with --tokenizer).")] = 100,
    overlap: Annotated[int, typer.Option(help="Words repeated of the passage before.")] = 0,
    tokenizer: Annotated[str, typer.Option(help="Encoder whose tokens are counted in place of words.")] = "",
    text_field: Annotated[str, typer.Option(help="Of rows; by default the first usual name.")] = "",
    title_field: Annotated[str, typer.Option(help="Of rows; by default the first usual name.")] = "",
    id_field: Annotated[str, typer.Option(help="Of rows; by default the first usual name.")] = "",
    drop_duplicates: Annotated[
        bool, typer.Option("--drop-duplicates", help="Leave out what an earlier passage says.")
    ] = False,
) -> None:
    """Cut own documents into passages."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from rlsys.search.ingest import Chunking, Fields, ingest

    fields = Fields(text_field, title_field, id_field)
    summary = ingest(sources, out, Chunking(size, overlap, tokenizer), fields, drop_duplicates=drop_duplicates)
    table = Table(show_header=False)
    for name, value in summary.rows():
        table.add_row(name, Text(value))
    Console().print(table)


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
def cassette(path: Annotated[Path, typer.Argument(help="Made by search.cassette.mode=record.")]) -> None:
    """Say what a cassette of recorded searches holds."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from rlsys.search.cassette import Cassette

    recorded = Cassette.read(path)
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right", overflow="fold")
    for key, value in {"topk": recorded.header.topk, **recorded.header.server}.items():
        table.add_row(key, Text(str(value)))
    table.add_row("queries", str(len(recorded.answers)))
    table.add_row("calls", str(len(recorded.latencies_s)))
    table.add_row("errors", str(recorded.errors))
    if recorded.latencies_s:
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)):
            table.add_row(f"latency {name}", f"{1000 * recorded.quantile_s(share):.1f} ms")
    Console().print(table)
