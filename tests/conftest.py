"""Sets environment variables before any test imports a library, orders the tests and assigns them to workers."""

import gc
import os
import random
from collections.abc import Generator, Iterator
from contextlib import contextmanager

# On few cores, the threads of torch and of an engine's processes slow each other down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

# Examples take longer on a busy machine. By default, every run draws the same examples, so that a failure is due to the
# change that is tested; `make test-full` draws others.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile("fixed")

LONGEST_FIRST = (
    *("tests/docs/test_commands_run.py", "tests/live/test_miniatures.py", "tests/cluster/launch/test_launch.py"),
    *("tests/extensions/test_family.py", "tests/orchestrator/groups/test_real_restarts.py"),
    *("tests/live/", "tests/bench/test_gpu.py", "tests/weights/convert/test_grid.py"),
    *("tests/trainer/", "tests/rollout/", "tests/cluster/"),
)
"""Files and folders whose tests start first, so that no worker ends with a long one."""
ENGINE = ("tests/live/test_full_loop", "tests/rollout/test_")
"""Files that need an SGLang engine; one xdist worker runs them all, because two engines need much memory."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--order-seed", type=int, help="Run the tests in the random order of this seed.")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Print the seed of a random order, so that it can be repeated."""
    seed = config.getoption("--order-seed")
    return [] if seed is None else [f"order of the tests: --order-seed={seed}"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the longest tests first, or shuffle the files, and the tests of each, with `--order-seed`."""
    seed = config.getoption("--order-seed")
    if seed is None:
        items.sort(key=lambda item: [not item.nodeid.startswith(path) for path in LONGEST_FIRST])
    else:
        draw = random.Random(seed)
        place = {file: draw.random() for file in sorted({item.path for item in items})}
        items.sort(key=lambda item: (place[item.path], draw.random()))


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Import all tests without collecting garbage, which takes a quarter of the time; later collections skip what is left."""
    with _no_garbage_collection():
        found = yield
        gc.collect()
        gc.freeze()
    return found


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """Collect no garbage while the source of a failure is parsed.

    CPython 3.11 raises SystemError if an error in `__del__` is printed meanwhile, because its traceback is parsed too.
    """
    with _no_garbage_collection():
        return (yield)


class ByFile(LoadScopeScheduling):
    """Assigns all tests of a file to the same xdist worker, and all engine files to one worker."""

    def _split_scope(self, nodeid: str) -> str:
        return "engine" if nodeid.startswith(ENGINE) else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)  # The tests can be run without xdist.
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)
