"""The world, built once."""

from __future__ import annotations

import pytest

from examples.searchr1.tiny.world import World, build_world


@pytest.fixture(scope="session")
def world() -> World:
    return build_world()
