"""Serves an index with the flags of Search-R1's and ASearcher's retrieval servers.

    python examples/searchr1/local_retrieval_server.py --index_path e5_Flat.index --corpus_path wiki-18.jsonl

`--index_path` is either a FAISS file, which needs `--corpus_path` and the encoder with which it was made, or a folder
made by `rlsys search index`, which contains both. The server is the same as with `rlsys search serve`.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rlsys.apps.cli.main import run_command
from rlsys.errors import UserError
from rlsys.search.address import DEFAULT_HOST, DEFAULT_PORT, DEFAULT_TOPK, TOKEN_VARIABLE
from rlsys.search.corpus import PageStore
from rlsys.search.retrieval import Retriever
from rlsys.search.server.command import Parts, load_reranker, read_token, serve_parts

BM25 = "bm25"
UPSTREAM_NAME, UPSTREAM_MODEL = "e5", "intfloat/e5-base-v2"
QUERY_TOKENS = 256
"""Maximum number of tokens in a query; Search-R1's servers cut at the same length."""


def load(given: argparse.Namespace) -> Parts:
    """Load the parts that the flags name. Raises UserError for missing files and contradicting flags."""
    index: Path = given.index_path
    if not index.exists():
        raise UserError(
            f"--index_path {index} does not exist: give a FAISS file or an index folder.",
            code="not_found",
            key="--index_path",
        )
    if given.pages_path is not None and not given.pages_path.is_file():
        raise UserError(
            f"--pages_path {given.pages_path} is not a file: give a jsonl file of pages.",
            code="not_found",
            key="--pages_path",
        )
    retriever = open_folder(given) if index.is_dir() else open_file(given)

    pages = given.pages_path and PageStore(given.pages_path)
    return Parts(retriever, given.reranker_model and load_reranker(given.reranker_model, given.device), pages)


def open_folder(given: argparse.Namespace) -> Retriever:
    """Open an index folder made by rlsys. Raises UserError for flags that contradict the folder."""
    from rlsys.search.corpus import Corpus
    from rlsys.search.index.folder import read_manifest
    from rlsys.search.server.command import open_retriever

    folder: Path = given.index_path
    if any(folder.glob("segments_*")):
        raise UserError(
            f"--index_path {folder} is a Lucene index, which rlsys cannot read: build an index from the corpus with "
            "`rlsys search index --kind bm25`.",
            code="unsupported",
            key="--index_path",
        )
    manifest = read_manifest(folder)
    made_for = manifest.get("family", manifest["kind"])
    if given.retriever_name not in (None, made_for):
        raise UserError(
            f"--retriever_name {given.retriever_name}: {folder} was built for {made_for}; omit the flag.",
            code="mismatch",
            key="--retriever_name",
        )
    if given.corpus_path is not None and Corpus.open(given.corpus_path).checksum != manifest["corpus_sha256"]:
        raise UserError(
            f"--corpus_path {given.corpus_path} differs from the corpus of {folder}: omit the flag, the folder "
            "contains its corpus.",
            code="mismatch",
            key="--corpus_path",
        )
    has_vectors = manifest["kind"] in ("dense", "hybrid")
    return open_retriever(
        folder,
        encoder=given.retriever_model,
        device=given.device if has_vectors else None,
        faiss_gpu=given.faiss_gpu or None,
        own_process=True,
    )


def open_file(given: argparse.Namespace) -> Retriever:
    """Open a FAISS file and its corpus. Raises UserError for flags that do not fit a file."""
    if given.retriever_name == BM25:
        raise UserError(
            f"--retriever_name {BM25}: {given.index_path} is a file; build an index folder from the corpus with "
            "`rlsys search index --kind bm25`.",
            code="unsupported",
            key="--retriever_name",
        )
    if given.corpus_path is None:
        raise UserError(
            f"--corpus_path is missing: {given.index_path} holds vectors without passages; give their jsonl file.",
            code="missing",
            key="--corpus_path",
        )
    if not given.corpus_path.is_file():
        raise UserError(
            f"--corpus_path {given.corpus_path} is not a file: give the jsonl file of passages.",
            code="not_found",
            key="--corpus_path",
        )

    from rlsys.search.encoders.spec import EncoderSpec
    from rlsys.search.index.dense import SearchOptions, open_prebuilt

    encoder = EncoderSpec(
        given.retriever_model or UPSTREAM_MODEL,
        given.retriever_name or UPSTREAM_NAME,
        max_tokens=QUERY_TOKENS,
        device=given.device,
    )
    options = SearchOptions(faiss_gpu=given.faiss_gpu)
    return open_prebuilt(given.index_path, given.corpus_path, encoder, options, own_process=True)


def parser() -> argparse.ArgumentParser:
    """Return a parser of the flags of Search-R1's and ASearcher's servers, and of a few more flags."""
    flags = argparse.ArgumentParser(
        description="Serve an index over HTTP, as Search-R1's retrieval_server.py and ASearcher's do.",
        epilog=f"Clients must send the bearer token in {TOKEN_VARIABLE}; if it is unset, every client may search.",
    )
    add = flags.add_argument
    add("--index_path", type=Path, required=True, help="FAISS file, or folder made by `rlsys search index`")
    add("--corpus_path", type=Path, help="jsonl of passages; required for a FAISS file")
    add("--pages_path", type=Path, help="jsonl of pages {url, contents}, for /access")
    add("--topk", type=int, default=DEFAULT_TOPK, help=f"passages per query (default: {DEFAULT_TOPK})")
    add("--retriever_name", help=f"family of the encoder: e5, bge, ... (for a file: {UPSTREAM_NAME})")
    add(
        "--retriever_model",
        help=f"minilm, a folder, or a model in the Hugging Face cache (for a file: {UPSTREAM_MODEL})",
    )
    add("--faiss_gpu", action="store_true", help="hold the vectors on all GPUs, as float16")
    add("--device", default="cpu", help="device of the models: cpu, cuda or cuda:N (default: cpu)")
    add("--reranker_model", help="cross-encoder for /rerank: a folder, or a model in the Hugging Face cache")
    add(
        "--host",
        default=DEFAULT_HOST,
        help=f"address to listen on (default: {DEFAULT_HOST}; 0.0.0.0 for all addresses)",
    )
    add("--port", type=int, default=DEFAULT_PORT, help=f"port to listen on (default: {DEFAULT_PORT})")
    return flags


def main() -> None:
    """Parse the command line and serve until a signal arrives."""
    given = parser().parse_args()
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.INFO)
    serve_parts(
        lambda: load(given),
        name=str(given.index_path),
        host=given.host,
        port=given.port,
        topk=given.topk,
        token=read_token(None),
    )


if __name__ == "__main__":
    run_command(main)
