"""Processes of a conversion."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import BaseContext

import pytest

from tests.support.megatron_processes import fork


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> BaseContext:
    """Let a conversion fork its processes, in milliseconds: to spawn them takes seconds."""
    fork(0)
    context = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    return context
