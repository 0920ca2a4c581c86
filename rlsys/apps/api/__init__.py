"""rlsys from Python: train a policy that searches, in a script or a notebook (docs/how-to/python.md).

The same engine as the command line: `SearchR1Trainer` composes the settings that `rlsys train` would be given, checks
them and trains. Mistakes are `rlsys.errors.UserError`, a run that cannot go on is `rlsys.errors.RunError`, each with
one sentence.
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
