"""Builds an index with the flags of Search-R1's index_builder.py.

    python examples/searchr1/index_builder.py --retrieval_method e5 --model_path intfloat/e5-base-v2 \\
        --corpus_path wiki-18.jsonl --save_dir wiki18-e5 --faiss_type HNSW64

The folder holds the corpus, the vectors and their settings, like a folder made by `rlsys search index`. An interrupted
build continues when it is started again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rlsys.apps.cli.main import run_command
from rlsys.errors import UserError

BM25 = "bm25"


def build(given: argparse.Namespace) -> bool:
    """Build the index that the flags describe. Returns False if it already exists."""
    if not given.corpus_path.is_file():
        raise UserError(
            f"--corpus_path {given.corpus_path} is not a file: give the jsonl file of passages.",
            code="not_found",
            key="--corpus_path",
        )
    from rlsys.search.index.make import make_index, recipe

    if given.retrieval_method == BM25:
        return make_index(BM25, given.corpus_path, given.save_dir, replace=given.replace)
    settings = {
        "encoder": given.model_path,
        "family": given.retrieval_method,
        "max_tokens": given.max_length,
        "device": given.device,
        "dtype": "float16" if given.use_fp16 else None,
        "pooling": given.pooling_method,
        "faiss_type": given.faiss_type,
        "keep_embeddings": given.save_embedding,
        "workers": given.workers,
    }
    return make_index("dense", given.corpus_path, given.save_dir, recipe("dense", settings), replace=given.replace)


def parser() -> argparse.ArgumentParser:
    """Return a parser of Search-R1's flags, except those without a meaning here."""
    flags = argparse.ArgumentParser(description="Build a search index, as Search-R1's index_builder.py does.")
    add = flags.add_argument
    add("--retrieval_method", default="e5", help="family of the encoder (e5, bge, ...), or bm25 (default: e5)")
    add(
        "--model_path",
        default="intfloat/e5-base-v2",
        help="minilm, a folder, or a model in the Hugging Face cache (default: intfloat/e5-base-v2)",
    )
    add("--corpus_path", type=Path, required=True, help="jsonl of passages {id, contents}")
    add("--save_dir", type=Path, required=True, help="folder for the index")
    add("--max_length", type=int, default=256, help="maximum tokens of a passage; the rest is cut (default: 256)")
    add("--use_fp16", action="store_true", help="compute in float16 (the default on a GPU)")
    add("--pooling_method", help="mean, cls, pooler or last (default: the family's)")
    add("--faiss_type", default="Flat", help="Flat, HNSW64, IVF4096,Flat or another (default: Flat)")
    add(
        "--save_embedding",
        action="store_true",
        help="keep the vectors, to build another FAISS type without encoding again",
    )
    add("--replace", action="store_true", help="replace another index in --save_dir")
    add("--device", default="cpu", help="cpu, cuda:N, or cuda, which spreads the workers over all GPUs (default: cpu)")
    add("--workers", type=int, default=1, help="processes that encode (default: 1)")
    return flags


def main() -> None:
    """Parse the command line and build."""
    given = parser().parse_args()
    made = build(given)
    print(f"{given.save_dir} {'is complete' if made else 'already exists'}")


if __name__ == "__main__":
    run_command(main)
