"""Tests of waits that must end: for a Ray that does not start or answer, and for ranks that are missing."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import psutil
import pytest
import ray

from rlsys.cluster import runtime
from rlsys.cluster.preflight.machine import Unseen, cluster_at
from rlsys.cluster.runtime import Machine, RayWatch, answer, joined, ray_runtime
from rlsys.cluster.worker_group import POLLS, STAGES, Rank, RankDied, RankSilent, WorkerGroup, together
from rlsys.config.derived import stage_limits
from rlsys.config.schema import ClusterConfig, Device, StageTimeouts
from rlsys.errors import PeerLost, RunError
from rlsys.rollout.engine import EngineDriver
from rlsys.trainer.actor import Actor
from rlsys.trainer.log_prob import LogProbWorker
from tests.support.refusals import refused
from tests.support.virtual_time import virtually


def test_ray_that_does_not_start_is_retried_and_then_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tries: list[dict[str, Any]] = []

    def slow(**options: Any) -> None:
        tries.append(options)
        raise Exception("The current node timed out during startup.")  # noqa: TRY002 (as Ray does)

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(ray, "init", slow)
    started = ray_runtime(ClusterConfig(device=Device.cpu), [1])
    with pytest.raises(RunError, match="timed out during startup"):
        started.__enter__()
    assert [options["address"] for options in tries] == ["local"] * 3


def test_cluster_address_without_a_listener_is_refused() -> None:
    there = ray_runtime(ClusterConfig(device=Device.cpu, address="127.0.0.1:1"), [1])
    with refused("unreachable", "cluster.address"):
        there.__enter__()


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (RuntimeError("No node info found matching attributes: ''"), "no node on this machine"),
        (RuntimeError("Failed.\nTimed out."), "joined: Timed out[.]$"),
        (None, "gives no reason"),
    ],
)
def test_ray_that_cannot_be_joined_says_why(
    cause: Exception | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = ConnectionError()
    problem.__cause__ = cause
    monkeypatch.setattr(ray, "init", Mock(side_effect=problem))
    monkeypatch.setattr(ray, "shutdown", shut := Mock())
    with pytest.raises(RunError, match=reason):
        joined("here:1").__enter__()
    assert shut.called, "it must be possible to try again"


def test_a_run_does_not_wait_for_devices_of_a_machine_that_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = [Machine(rank, True, f"gpu{rank}", f"10.0.0.{rank}", str(rank), "", {}) for rank in range(2)]
    here, answers = list("01"), iter([False, False])
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": node, "Alive": True} for node in here])

    def wait(_: float) -> bool:
        placed = next(answers)
        here.pop()  # The second machine leaves.
        return placed

    bundles: Any = Mock(wait=wait)
    with pytest.raises(RunError, match=r"node 1 \(gpu1, 10\.0\.0\.1\)"):
        runtime._await_devices(bundles, ClusterConfig(device=Device.cpu), machines, float("inf"))
    assert list(answers) == [False], "found at once"


async def test_interrupt_that_comes_with_an_answer_is_not_lost() -> None:
    """The thread has answered, and its answer waits for the event loop when the task is cancelled."""
    begun, go, before = threading.Event(), threading.Event(), {*threading.enumerate()}

    def ask() -> int:
        begun.set()
        go.wait()
        return 1

    task = asyncio.ensure_future(answer(ask))
    await asyncio.to_thread(begun.wait)
    go.set()
    for thread in {*threading.enumerate()} - before:
        if thread.name == "asks-ray":
            thread.join()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_death_of_a_process_of_ray_is_found_and_named() -> None:
    started = {name: subprocess.Popen(["sleep", "3600"]) for name in ("gcs_server", "raylet")}
    watch = RayWatch({name: psutil.Process(process.pid) for name, process in started.items()})
    try:
        watch.require_alive()
        started["raylet"].kill()
        psutil.Process(started["raylet"].pid).wait()
        for _ in range(2):
            with pytest.raises(RunError, match="raylet"):
                watch.require_alive()
    finally:
        for process in started.values():
            process.kill()
            process.wait()


@pytest.mark.parametrize("silent", [False, True], ids=["raylet", "gcs_server"])
async def test_ray_that_hangs_is_ended_although_it_blocks_the_event_loop(silent: bool) -> None:
    started = {name: subprocess.Popen(["sleep", "3600"]) for name in ("gcs_server", "raylet")}
    answers = threading.Event()
    watch = RayWatch(
        {name: psutil.Process(process.pid) for name, process in started.items()},
        is_lost=answers.wait if silent else lambda: True,
    )
    watching = asyncio.create_task(watch.run(every_s=0.0, timeout_s=0.1 if silent else 300))
    await asyncio.sleep(0)
    try:
        started["raylet"].wait(600)  # As a call to Ray does; nothing else can run on the loop.
        with pytest.raises(RunError, match="gcs_server" if silent else "raylet"):
            await watching
    finally:
        answers.set()
        for process in started.values():
            process.kill()
            process.wait()


def test_stall_of_all_threads_is_not_taken_for_a_silent_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """As during an import: what the head has answered is read only after the first wait has ended."""
    stalled, waits = threading.Event(), []

    def wait(_: object, timeout_s: float) -> None:
        waits.append(timeout_s)
        stalled.set()

    monkeypatch.setattr(runtime.futures, "wait", wait)
    RayWatch({}, is_lost=lambda: not stalled.wait(60))._check(3000.0)
    assert waits == [300.0] * 9, "the last wait is that for the result"


def test_death_of_a_process_is_found_while_the_head_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    with subprocess.Popen(["sleep", "3600"]) as raylet:
        watch = RayWatch({"raylet": psutil.Process(raylet.pid)}, is_lost=answers.wait)
        waits: list[float] = []

        def wait(_: object, timeout_s: float) -> None:
            waits.append(timeout_s)
            raylet.kill()
            raylet.wait()

        monkeypatch.setattr(runtime.futures, "wait", wait)
        with pytest.raises(RunError, match="raylet has died"):
            watch._check(1.0)
    answers.set()
    assert len(waits) == 1


async def test_answer_error_and_silence_of_the_head_are_distinguished() -> None:
    assert await answer(lambda: 3, 300) == 3

    def refuse() -> None:
        raise RuntimeError("no such node")

    with pytest.raises(RunError, match="no such node"):
        await answer(refuse, 300)
    never = threading.Event()
    with pytest.raises(RunError, match="the head of the Ray cluster"):
        await answer(never.wait, 0.05)
    never.set()


@virtually
async def test_calls_together_end_with_the_first_error_but_a_lost_peer_waits_for_the_others() -> None:
    ended: list[str] = []

    async def call(name: str, seconds: float, problem: Exception | None = None) -> str:
        await asyncio.sleep(seconds)
        ended.append(name)
        if problem is not None:
            raise problem
        return name

    assert await together(call("a", 2), call("b", 1)) == ["a", "b"]
    ended.clear()
    with pytest.raises(PeerLost):
        await together(call("lost", 1, PeerLost("b has left")), call("slow", 3), call("also lost", 2, PeerLost("")))
    assert ended == ["lost", "also lost", "slow"]
    ended.clear()
    with pytest.raises(RunError, match="no room"):
        await together(call("lost", 1, PeerLost("b has left")), call("slow", 3), call("full", 2, RunError("no room")))
    assert ended == ["lost", "full"], "the slow call is no longer awaited"


def test_silent_cluster_is_unseen_after_the_time_out() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent, pytest.raises(Unseen):
        cluster_at(f"127.0.0.1:{silent.getsockname()[1]}", 1)


def group_of(
    folder: Path, *calls: Future[Any], timeout_s: float = 300.0, of_stages: Mapping[str, float] | None = None
) -> WorkerGroup:
    """Return a group without Ray; every call of rank i returns the future `calls[i]`."""
    handles = [Mock(**{"call.remote.return_value.future.return_value": call}) for call in calls]
    ranks = [Rank(number, f"a rank {number}", handle, folder / "log") for number, handle in enumerate(handles)]
    return WorkerGroup("a", ranks, timeout_s, of_stages)


def test_a_group_that_is_killed_after_the_end_of_its_ray_starts_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begin = Mock()
    monkeypatch.setattr(ray, "init", begin)
    assert not ray.is_initialized()
    group_of(tmp_path, Future()).kill()
    begin.assert_not_called()


async def test_only_silent_ranks_are_named_as_missing(tmp_path: Path) -> None:
    calls: list[Future[Any]] = [Future() for _ in range(4)]
    for number in (0, 2):
        calls[number].set_result(number)
    group = group_of(tmp_path, *calls, timeout_s=0.05)
    with pytest.raises(RankSilent, match="for a rank 1, a rank 3 to finish it") as silent:
        await group.call("it")
    assert silent.value.rank == 1


@virtually
async def test_call_has_the_limit_of_its_stage_and_counts_unless_it_is_a_poll(tmp_path: Path) -> None:
    now = asyncio.get_running_loop().time
    for method, limit_s in (("accumulate", 60), ("compute", 1800), ("anything", 1800)):
        group = group_of(tmp_path, Future(), timeout_s=1800, of_stages={"training": 60, "sync": 7})
        begun = now()
        with pytest.raises(RankSilent):
            await group.call(method)
        assert (now() - begun, group.finished) == (limit_s, 0)
    done: Future[Any] = Future()
    done.set_result(None)
    group = group_of(tmp_path, done)
    for method in ("accumulate", *POLLS):
        await group.call(method)
    assert group.finished == 1


@pytest.mark.parametrize(("limit_s", "times"), [(None, 1), (60, 1), (5, 0)])
@virtually
async def test_late_ranks_are_located_unless_the_caller_has_a_limit_of_its_own(
    limit_s: float | None, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, located = group_of(tmp_path, Future(), timeout_s=60, of_stages={"sync": 7}), AsyncMock(return_value="")
    monkeypatch.setattr(group, "located", located)
    with pytest.raises(RankSilent):
        await group.call("next_handle", timeout_s=limit_s)
    assert located.await_count == times


def test_every_stage_with_a_limit_of_its_own_has_methods_that_exist() -> None:
    config = ClusterConfig(stage_timeout_s=StageTimeouts(*range(1, 6)))
    assert set(STAGES.values()) == stage_limits(config).keys()
    workers = (EngineDriver, Actor, LogProbWorker)
    assert {method for method in STAGES if not any(hasattr(worker, method) for worker in workers)} == set()


async def test_call_ends_once_its_until_future_is_done(tmp_path: Path) -> None:
    group = group_of(tmp_path, Future())
    until: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    call = asyncio.ensure_future(group.call_rank(0, "it", until=until))
    await asyncio.sleep(0)
    until.set_result("its engine is gone")
    for ended in (call, group.call_rank(0, "it", until=until)):
        with pytest.raises(RankDied, match="its engine is gone"):
            await ended


async def test_death_for_lack_of_memory_says_so(tmp_path: Path) -> None:
    said = "Worker exit type: NODE_OUT_OF_MEMORY Worker exit detail: Task was killed due to the node running low on memory."
    for death, short in (
        (ray.exceptions.RayActorError(error_msg=said), True),
        (ray.exceptions.OutOfMemoryError("Task was killed."), True),
        (ray.exceptions.RayActorError(), False),
    ):
        dead: Future[Any] = Future()
        dead.set_exception(death)
        with pytest.raises(RankDied, match="a rank 0") as died:
            await group_of(tmp_path, dead).call("it")
        assert ("memory of its machine" in str(died.value)) == short
