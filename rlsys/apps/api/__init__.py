"""Python API: train a policy that searches, in a script or a notebook (docs/how-to/python.md).

`SearchR1Trainer` composes the settings that `rlsys train` would take, checks them and trains. Raises
`rlsys.errors.UserError` for mistakes and `rlsys.errors.RunError` for a run that cannot continue.
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
