"""One worker on one real engine for all tests of this folder.

The worker does not live for a whole session: SGLang ends all children of a process, including an engine that a later
test starts.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from rlsys.config.schema import Device, Dtype, RolloutConfig, SearchConfig, SglangConfig, TaskConfig
from rlsys.rollout.worker import RolloutWorker
from tests.rollout.bench import Bench
from tests.support import tiny
from tests.support.processes import words_of


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    words = tiny.tokenizer()
    first, second = tiny.train(tiny.FIRST, words, seed=0), tiny.train(tiny.SECOND, words, seed=1)
    path: Path = tmp_path_factory.mktemp("policy")
    limits = {"kv_cache_tokens": 16384, "max_running": 32, "start_timeout_s": 1500.0}
    engine = SglangConfig(dtype=Dtype.float32, **limits)
    rollout = RolloutConfig(engine=engine, max_episodes=3)
    task = TaskConfig(train_path="", eval_path="", max_turns=2, max_turn_tokens=64, max_total_tokens=4090)
    with tiny.search_server() as search:
        worker = RolloutWorker(
            tiny.save(first, words, path), rollout, task, SearchConfig(url=search.url), Device.cpu, seed=7
        )
        before, handlers = set(psutil.Process().children(recursive=True)), set(logging.getLogger().handlers)
        await worker.start()
        assert handlers <= set(logging.getLogger().handlers), "SGLang removes no log handler"
        started = set(psutil.Process().children(recursive=True)) - before
        assert started
        yield Bench(worker.engine, words, first, second, worker, rollout, search)
        mapped = set[str]()
        for process in started:
            with suppress(psutil.NoSuchProcess):  # Also of a zombie.
                mapped |= {file.path for file in process.memory_maps()}
        shared = {path for path in mapped if path.startswith("/dev/shm/") and Path(path).exists()}
        links = {path: os.readlink(path) for path in Path(tempfile.gettempdir()).glob(f"{os.getpid()}-*")}
        assert shared
        assert shared <= {*links.values()}, "whoever kills these processes must find their shared memory"
        await worker.stop()
        assert not [path for path in shared if Path(path).exists()], "shared memory is removed"
        assert not [path for path in links if path.is_symlink()]
        # SGLang also ends Python's resource tracker, which stays a zombie until Python needs it again.
        assert not any(words_of(process) for process in started)
