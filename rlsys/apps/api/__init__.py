"""rlsys from Python: train a policy that searches, in a script or a notebook.

The same engine as the command line. `SearchR1Trainer` composes the settings that `rlsys train` would be given, checks
them and trains; `TrainingResult.command` is that very command. Mistakes are `rlsys.errors.UserError`, a run that cannot
go on is `rlsys.errors.RunError`, each with one sentence that says what to do.

    from rlsys import DenseRetriever, SearchR1Trainer

    retriever = DenseRetriever("data/wiki18/e5-Flat", embedding_model="intfloat/e5-base-v2", top_k=3)
    trainer = SearchR1Trainer("Qwen/Qwen2.5-3B-Instruct", retriever, "grpo", max_search_turns=2, devices=8)
    result = trainer.train("data/searchr1/train.jsonl", num_iterations=100, batch_size=512)
    print(result.evaluate())
"""

from rlsys.apps.api.retrievers import BM25Retriever, DenseRetriever, HttpRetriever, SearchBackend, WebSearch
from rlsys.apps.api.trainer import SearchR1Trainer
from rlsys.apps.api.training_result import EvaluationResult, TrainingResult

__all__ = [
    "BM25Retriever",
    "DenseRetriever",
    "EvaluationResult",
    "HttpRetriever",
    "SearchBackend",
    "SearchR1Trainer",
    "TrainingResult",
    "WebSearch",
]
