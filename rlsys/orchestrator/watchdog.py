"""Finds out that a run makes no progress although no single call is late, and names the stage that blocks it.

Each wait of a run ends with a call that has a time limit. If nothing progresses for longer than the largest of these
limits, stages wait for each other, or for something without a limit. If the driver's event loop is blocked, no limit takes
effect; a thread then ends the process, and with it all processes of the run.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from math import ceil
from pathlib import Path

from rlsys.cluster.stacks import DRIVER, StackWriter, call_of
from rlsys.config.derived import asks_teacher, longest_group_s
from rlsys.config.schema import RunConfig
from rlsys.observe.status import WAIT_PREFIX, StageState
from rlsys.orchestrator.endpoint import longest_s
from rlsys.orchestrator.engine_pool import MARGIN_S

POLL_S = 5.0
ATTEMPTS = 2
"""Attempts of the engine pool at a prompt group."""
_PROVIDERS = {
    "rollouts": "rollout",
    "log-probs": "inference",
    "values": "critic",
    "training": "actor",
    **dict.fromkeys(("weight sync", "activation", "the previous activation"), "sync"),
}
"""Cause of a wait -> worker group that ends it."""


def stall_limit_s(config: RunConfig) -> float:
    """Return the longest time that a run may need without progress: the largest limit of a single wait, and a margin."""
    cluster, rollout, reward, judge = config.cluster, config.rollout, config.reward, config.reward.judge
    teacher = config.algorithm.teacher
    samples = config.algorithm.n_samples
    group_s = longest_group_s(config) + MARGIN_S
    judge_s = longest_s(judge.timeout_s, judge.retries)
    if judge.requests_per_minute is not None:
        judge_s += 60.0 * samples / judge.requests_per_minute
    limits = (
        cluster.call_timeout_s,
        cluster.start_timeout_s,
        rollout.engine.start_timeout_s,
        config.search.start_timeout_s,
        config.search.outage_s,
        ATTEMPTS * group_s,
        reward.custom_timeout_s,
        judge_s,
        longest_s(teacher.timeout_s, teacher.retries) if asks_teacher(config.algorithm) else 0.0,
    )
    return max(limits) + MARGIN_S


async def until_stalled(progress: Callable[[], Hashable], limit_s: float) -> None:
    """Return once `progress` has had the same value for `limit_s`.

    Time in which the event loop is blocked does not count, because nothing can progress in it.
    """
    last, still = progress(), 0
    while still < ceil(limit_s / POLL_S):
        await asyncio.sleep(POLL_S)
        now = progress()
        last, still = now, still + 1 if now == last else 0


@contextmanager
def ending_if_blocked(run_dir: Path, limit_s: float) -> Iterator[None]:
    """End this process with status 1 if the running event loop is blocked for `limit_s`, after writing the stacks."""
    loop, over = asyncio.get_running_loop(), threading.Event()
    missed = 0

    def beat() -> None:
        nonlocal missed
        missed = 0

    def watch() -> None:
        nonlocal missed
        while not over.wait(POLL_S):
            missed += 1  # Time in which the machine sleeps does not count.
            if missed * POLL_S > limit_s:
                found = StackWriter(run_dir).dump_here()
                where = call_of(found.texts[DRIVER])
                print(
                    f"The driver has been blocked for {limit_s:.0f} s, so the run ends: it is in {where}; the stacks of all "
                    f"processes of this machine are in {found.folder}.",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)
            if not loop.is_closed():
                loop.call_soon_threadsafe(beat)

    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def blocking(states: Mapping[str, StageState]) -> str:
    """Return the stage for which the others wait, and all activities, as a clause.

    It is the stage that has worked for the longest time. If all stages wait, it is the end of the chain of waits that
    begins at the actor, or the cycle.
    """
    listed = ", ".join(f"{stage}: {state.text}" for stage, state in states.items())
    working = {stage: state for stage, state in states.items() if not state.text.startswith(WAIT_PREFIX)}
    if working:
        stage = min(working, key=lambda stage: working[stage].since)
        return f"{stage} blocks it ({listed})"
    if not states:
        return "no stage reports an activity"
    chain = ["actor" if "actor" in states else next(iter(states))]
    while True:
        cause = states[chain[-1]].text.removeprefix(WAIT_PREFIX).strip().removeprefix("for ")
        provider = _PROVIDERS.get(cause.partition(" and ")[0], "")
        if provider not in states:
            return f"it waits for {cause} ({listed})"
        if provider in chain:
            return f"{' -> '.join([*chain[chain.index(provider) :], provider])} wait for each other ({listed})"
        chain.append(provider)
