"""`rlsys search`: build an index, serve it, look at a cassette."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Build and serve the search index; look at recorded searches.", no_args_is_help=True)


@app.command()
def index(
    corpus: Annotated[Path, typer.Argument(help="Passages: jsonl of {id, contents}.")],
    out: Annotated[Path, typer.Argument(help="Folder to write the index to.")],
    encoder: Annotated[str, typer.Option(help="minilm, or a folder of a Hugging Face encoder.")] = "minilm",
) -> None:
    """Encode a corpus into a dense index."""
    from rlsys.search.index.folder import build_index

    build_index(corpus, out, encoder)


@app.command()
def serve(
    folder: Annotated[Path, typer.Argument(help="Folder made by `rlsys search index`.")],
    host: Annotated[
        str, typer.Option(help="Address to listen on; the machine's own only by default.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    topk: Annotated[int, typer.Option(help="Passages for a request that names no number.")] = 3,
) -> None:
    """Answer queries over HTTP until interrupted."""
    from rlsys.search.server.serve import serve as run

    run(folder, host=host, port=port, topk=topk)


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
