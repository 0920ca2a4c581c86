"""Tests of the watchdog of a run: no progress is noticed, and the blocking stage is named."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlsys.cluster.stacks import DRIVER, STACKS
from rlsys.config.schema import RunConfig
from rlsys.observe.status import StageState
from rlsys.orchestrator.engine_pool import MARGIN_S
from rlsys.orchestrator.membership import Members
from rlsys.orchestrator.run import Run
from rlsys.orchestrator.watchdog import POLL_S, blocking, stall_limit_s, until_stalled
from tests.support.virtual_time import virtually


@virtually
async def test_run_is_stalled_once_nothing_has_changed_for_the_limit() -> None:
    now = asyncio.get_running_loop().time
    finished = [0]

    async def work() -> None:
        for _ in range(7):
            await asyncio.sleep(0.9 * 60.0)
            finished[0] += 1

    working, begun = asyncio.create_task(work()), now()
    await until_stalled(lambda: finished[0], 60.0)
    assert working.done()
    last = begun + 7 * 0.9 * 60.0
    assert last + 60.0 <= now() <= last + 60.0 + 2 * POLL_S


@virtually
async def test_rewards_that_take_long_together_are_progress() -> None:
    """Functions of the user take turns, and no group is rewarded before the last one has ended."""
    config, rewards = RunConfig(), SimpleNamespace(finished=0)
    engines = SimpleNamespace(workers=SimpleNamespace(finished=0), engines=SimpleNamespace(members=Members.first(1)))
    groups = SimpleNamespace(engines=engines, inference=None, trained={})
    log = SimpleNamespace(faults=SimpleNamespace(metrics=dict))
    pipeline = SimpleNamespace(progress=())
    run: Any = SimpleNamespace(config=config, groups=groups, pipeline=pipeline, log=log, teacher=None, rewards=rewards)
    watching = asyncio.ensure_future(Run.watch_progress(run))
    for _ in range(3):
        await asyncio.sleep(0.9 * stall_limit_s(config))
        rewards.finished += 1
    assert not watching.done()
    watching.cancel()


BLOCKED = """
import asyncio, sys, threading
from pathlib import Path
from rlsys.orchestrator import watchdog
watchdog.POLL_S = 0.2

def wait_for_nothing():
    threading.Event().wait()

async def drive(blocks):
    with watchdog.ending_if_blocked(Path(sys.argv[1]), 4.0 if blocks else 1e9):
        if blocks:
            wait_for_nothing()
        await asyncio.sleep(0.1)

asyncio.run(drive(False))
print("the loop was not blocked", flush=True)
asyncio.run(drive(True))
"""


def test_blocked_driver_ends_and_names_the_call_that_blocks_it(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(BLOCKED)
    ended = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "the loop was not blocked\n"), ended.stderr
    (folder,) = (tmp_path / STACKS).iterdir()
    assert "wait, called by wait_for_nothing (" in ended.stderr
    assert str(folder) in ended.stderr
    assert "in wait_for_nothing" in (folder / f"{DRIVER}.txt").read_text()


@pytest.mark.parametrize(
    ("texts", "stage"),
    [
        ({"actor": "waits for rollouts", "rollout": "generates 3 groups", "sync": "sends version 2"}, "rollout blocks it"),
        ({"rollout": "waits for training", "actor": "waits for log-probs and values", "inference": "waits for rollouts"},
         "actor -> inference -> rollout -> actor wait for each other"),
        ({"rollout": "waits for search", "actor": "waits for rollouts"}, "it waits for search"),
        ({"actor": "waits for trajectories to be written"}, "it waits for trajectories to be written"),
        ({"actor": "waits for values"}, "it waits for values"),
        ({}, "no stage reports an activity"),
    ],
)  # fmt: skip
def test_blocking_stage_is_the_end_of_the_chain_of_waits(texts: dict[str, str], stage: str) -> None:
    said = blocking({name: StageState(text, float(place)) for place, (name, text) in enumerate(texts.items())})
    assert said.startswith(stage)
    assert all(f"{name}: {text}" in said for name, text in texts.items())


def test_limit_is_above_that_of_every_single_wait() -> None:
    """Each key with a time limit of a wait raises the limit of the whole; others do not."""
    config = RunConfig()
    usual = stall_limit_s(config)
    assert usual == config.cluster.call_timeout_s + MARGIN_S
    high = 50_000.0
    for part in ("cluster", "rollout", "search", "reward"):
        settings = getattr(config, part)
        for key in (name for name in vars(settings) if re.fullmatch("(call|start|episode|custom)_timeout_s", name)):
            raised = stall_limit_s(replace(config, **{part: replace(settings, **{key: high})}))
            assert raised > high, key
    engine = replace(config.rollout, engine=replace(config.rollout.engine, start_timeout_s=high))
    judge = replace(config.reward, judge=replace(config.reward.judge, timeout_s=high))
    slow = replace(config.reward, judge=replace(config.reward.judge, requests_per_minute=1))
    assert stall_limit_s(replace(config, rollout=engine)) > high
    assert stall_limit_s(replace(config, reward=judge)) > 4 * high
    many = replace(config.algorithm, n_samples=100)
    assert stall_limit_s(replace(config, reward=slow, algorithm=many)) > 100 * 60
