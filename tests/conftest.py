"""Settings that must come before any other import of a test, and the order in which workers take the tests."""

import os

# On a few cores, threads of torch and of an engine's processes only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import settings

# The time that an example takes depends on how busy the machine is, not on the code.
settings.register_profile("rlsys", deadline=None)
settings.load_profile("rlsys")

LONGEST_FIRST = ("tests/live/", "tests/trainer/", "tests/rollout/", "tests/cluster/")
"""Folders whose tests start first, so that no worker is left with a long one at the end."""
SHARED = {"bench": "SGLang engine"}
"""Fixtures that are too expensive to be made by every worker: all tests that take one run on the same worker."""


@pytest.hookimpl(tryfirst=True)  # Before xdist reads the groups.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests, and give those of one file, or of one shared fixture, to the same worker."""
    items.sort(key=lambda item: [not item.nodeid.startswith(folder) for folder in LONGEST_FIRST])
    for item in items:
        taken = [name for fixture, name in SHARED.items() if fixture in getattr(item, "fixturenames", ())]
        item.add_marker(pytest.mark.xdist_group(taken[0] if taken else item.nodeid.partition("::")[0]))
