"""Processes of a conversion."""

from __future__ import annotations

import multiprocessing

import pytest

from tests.trainer.harness import forks


@pytest.fixture
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a conversion fork its processes, in milliseconds: to spawn them takes seconds."""
    context = forks()
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
