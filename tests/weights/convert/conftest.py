"""Processes of a conversion."""

from __future__ import annotations

from multiprocessing.context import BaseContext

import pytest

from tests.support.megatron_processes import forks


@pytest.fixture
def forked() -> BaseContext:
    """Starts a process in milliseconds; to spawn one takes seconds."""
    return forks()
