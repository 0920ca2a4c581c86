"""Pipelined reinforcement learning for language models that search.

From Python: `from rlsys import SearchR1Trainer, DenseRetriever` (see `rlsys.apps.api`), which is loaded when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlsys.apps.api import (
        BM25Retriever,
        DenseRetriever,
        EvaluationResult,
        HttpRetriever,
        SearchBackend,
        SearchR1Trainer,
        TrainingResult,
        WebSearch,
    )

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


def __getattr__(name: str) -> Any:
    """A name of `rlsys.apps.api`."""
    if name in __all__:
        return getattr(import_module("rlsys.apps.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
