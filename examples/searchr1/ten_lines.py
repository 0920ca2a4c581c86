"""Trains a policy to search with the Python API, on the tiny world and two CPU cores.

Run `python -m examples.searchr1.ten_lines [ITERATIONS]` from the project's root. The default of 12 iterations takes
minutes. The world and its index are made once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from examples.searchr1.tiny.demo import WORLD, prepare_world
from rlsys import DenseRetriever, SearchR1Trainer, TrainingResult

POLICY = Path("examples/searchr1/tiny/policy")


def main(
    iterations: int = 12, batch_size: int = 32, overrides: Sequence[str] = (), outputs: str = "outputs"
) -> TrainingResult:
    """Train, print the result and evaluate again with transformers. Returns the result."""
    prepare_world(Console())
    trainer = SearchR1Trainer(
        model_name=POLICY,
        search_backend=DenseRetriever(WORLD / "index", embedding_model="minilm", top_k=3),
        rl_algorithm="grpo",
        reward_config={"exact_match": 1.0},
        max_search_turns=3,
        devices="cpu",
        config="searchr1_tiny_cpu",
        overrides=overrides,
        output_dir=outputs,
    )
    result = trainer.train(WORLD / "train.jsonl", iterations, batch_size, eval_data=WORLD / "heldout.jsonl")
    print(result)
    print("held-out questions again:", result.evaluate(engine="transformers"))
    return result


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
