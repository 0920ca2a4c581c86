"""Serves the baseline of `bench.search`: a retrieval server built like Search-R1's server.

    python -m bench.naive_search INDEX_DIR --port 8001

The server has one lock around each request, no batching across requests and no cache, and reads rows one by one from an
Arrow dataset. The encoder and the FAISS index come from rlsys, so only the servers differ.
"""

from __future__ import annotations

import argparse
import threading
from pathlib import Path
from typing import Any

import datasets
import faiss
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from rlsys.search.encoders.encoder import Encoder


class Asked(BaseModel):
    """Body of POST /retrieve."""

    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


def create_app(index: Path, encoder: Encoder) -> FastAPI:
    """Return an application that searches the vectors and the corpus of an index folder."""
    vectors = faiss.read_index(str(index / "index.faiss"))
    datasets.disable_progress_bars()
    corpus = datasets.load_dataset("json", data_files=str(index / "corpus.jsonl"), split="train")
    lock = threading.Lock()
    app = FastAPI()

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/retrieve")
    def retrieve(asked: Asked) -> dict[str, Any]:
        with lock:
            scores, rows = vectors.search(encoder.encode_queries(asked.queries), asked.topk or 3)
            documents = [[corpus[int(row)] for row in line] for line in rows]
        if not asked.return_scores:
            return {"result": documents}
        return {
            "result": [
                [{"document": document, "score": float(score)} for document, score in zip(*both, strict=True)]
                for both in zip(documents, scores, strict=True)
            ]
        }

    return app


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.naive_search", description="Serve an index without batching or cache."
    )
    parser.add_argument("index", type=Path)
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--encoder", default="minilm")
    given = parser.parse_args()
    app = create_app(given.index, Encoder.load(given.encoder))
    uvicorn.run(app, port=given.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
