"""`rlsys search`: build an index, serve it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Build and serve the search index.", no_args_is_help=True)


@app.command()
def index(
    corpus: Annotated[Path, typer.Argument(help="Passages: jsonl of {id, contents}.")],
    out: Annotated[Path, typer.Argument(help="Folder to write the index to.")],
    encoder: Annotated[str, typer.Option(help="minilm, or a folder of a Hugging Face encoder.")] = "minilm",
) -> None:
    """Encode a corpus into a dense index."""
    from rlsys.search.index import build_index

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
    from rlsys.search.server import serve as run

    run(folder, host=host, port=port, topk=topk)
