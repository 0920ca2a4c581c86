"""Settings that must come before any other import of a test, and the order in which workers take the tests."""

import os
import random

# On a few cores, threads of torch and of an engine's processes only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

# The time that an example takes depends on how busy the machine is, not on the code.
settings.register_profile("rlsys", deadline=None)
settings.load_profile("rlsys")

LONGEST_FIRST = ("tests/live/", "tests/trainer/", "tests/rollout/", "tests/cluster/")
"""Folders whose tests start first, so that no worker is left with a long one at the end."""
ENGINE = ("tests/live/test_full_loop.py", "tests/rollout/")
"""Files that need an SGLang engine, and run on one worker: most share one, and two at a time would take much memory."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that shuffles the tests."""
    parser.addoption("--order-seed", type=int, help="Run the tests in the random order of this seed.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest first, or all in random order."""
    seed = config.getoption("--order-seed")
    if seed is None:
        items.sort(key=lambda item: [not item.nodeid.startswith(folder) for folder in LONGEST_FIRST])
    else:
        random.Random(seed).shuffle(items)


class ByFile(LoadScopeScheduling):
    """Gives the tests of a file to one worker, and those of all engine files to one."""

    def _split_scope(self, nodeid: str) -> str:
        return "engine" if nodeid.startswith(ENGINE) else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)  # The tests can be run without xdist.
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    """Take the scheduler above in place of xdist's."""
    return ByFile(config, log)
