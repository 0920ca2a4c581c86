"""Tests of an engine on a scripted SGLang: weight switch, drain lock, start, streamed answers."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partialmethod
from typing import Any
from unittest.mock import AsyncMock

import psutil
import pytest
import torch

from rlsys.config.schema import Device, Dtype, SglangConfig
from rlsys.errors import RunError
from rlsys.rollout import sglang_cpu
from rlsys.rollout.agent.episode import EngineDied
from rlsys.rollout.agent.recorder import TurnSampling
from rlsys.rollout.engine import EngineDriver, Liveness
from rlsys.rollout.interface import EngineCapabilities
from rlsys.rollout.sglang_engine import as_generation, read_stream
from rlsys.rollout.sglang_weights import sha256_prefix
from rlsys.rollout.staging import StagedVersion
from rlsys.rollout.worker import DrainLock
from rlsys.weights.bucket import Bucket, pack_into, unpack
from tests.support.tensors import digest_of, pack
from tests.support.tiny_models import POLICY
from tests.support.waiting import let_tasks_run

NAME = "model.norm.weight"
SAMPLING = TurnSampling(temperature=0.0, max_new_tokens=1)


def part(*tokens: int, finish: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a part of a stream; as in SGLang, it has all tokens generated until then."""
    logprobs = [(-0.5, token, None) for token in tokens]
    return {"meta_info": {"output_token_logprobs": logprobs, "finish_reason": finish}}


class Script:
    """An SGLang that holds one tensor and logs its calls; the function `how` answers the step named by `broken`."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.broken = ""
        self.how: Callable[[Script], Awaitable[tuple[bool, str]]] = hang
        self.stray = False
        """True if `load_bucket` stores other values than it receives."""
        self.holds: dict[str, str] = {}
        self.reached = asyncio.Event()
        self.paused = False
        self.engine = self
        self.watched: list[psutil.Process] = []
        self.turn_may_end = asyncio.Event()
        """Set it to answer the requests for the prompt [0]; the others are answered at once."""

    def processes(self) -> list[psutil.Process]:
        return self.watched

    async def freeze_gc(self) -> None:
        self.log.append("freeze_gc")

    async def _step(self, name: str) -> tuple[bool, str]:
        self.log.append(name)
        await asyncio.sleep(0)
        return await self.how(self) if name == self.broken else (True, "")

    begin_update, end_update = partialmethod(_step, "begin_update"), partialmethod(_step, "end_update")

    async def pause(self) -> None:
        self.paused = True
        await self._step("pause")

    async def resume(self) -> None:
        await self._step("resume")
        self.paused = False

    async def load_bucket(self, bucket: Bucket, *_args: int, **_named: int) -> tuple[bool, str]:
        assert self.paused
        for record, tensor in unpack(bucket):
            self.holds[record.name] = sha256_prefix(tensor + 1 if self.stray else tensor)
        return await self._step("load_bucket")

    async def checksums(self) -> tuple[tuple[bool, str], list[dict[str, str]]]:
        return await self._step("checksums"), [dict(self.holds)]

    async def sleep(self, _flush_timeout_s: float) -> tuple[bool, str]:
        return await self._step("sleep")

    def abort_all(self) -> None:
        self.log.append("abort_all")

    async def async_generate(self, *, input_ids: list[int], rid: str, **_options: object) -> dict[str, Any]:
        if input_ids == [0]:
            await self.turn_may_end.wait()
            self.log.append("turn")
        output = part(7, finish={"type": "stop"})
        output["meta_info"] |= {"id": rid, "weight_version": "0", "cached_tokens": 0}
        return output


async def hang(script: Script) -> tuple[bool, str]:
    script.reached.set()
    await asyncio.Event().wait()
    return True, ""


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
async def engine(script: Script) -> EngineDriver:
    engine = EngineDriver(str(POLICY), SglangConfig(dtype=Dtype.float32), Device.cpu, seed=0)
    engine._engine._process = script  # type: ignore[attr-defined]
    engine._liveness = Liveness("The engine", [])
    return engine


async def stage(engine: EngineDriver, version: int) -> str:
    (bucket,) = pack([(NAME, torch.full((4,), float(version)))], bucket_bytes=100)
    await engine.begin_update(version)
    await engine.load_bucket(bucket)
    return digest_of([bucket])


def generate(engine: EngineDriver, ids: list[int]) -> asyncio.Task[object]:
    return asyncio.create_task(engine.generate(ids, SAMPLING, "r"))


async def all_are_refused(*asked: Awaitable[object]) -> None:
    for call in asked:
        with pytest.raises(RunError, match="refused a weight update"):
            await asyncio.wait_for(call, timeout=600)


@pytest.mark.parametrize(
    ("step", "how", "raised"),
    [
        ("pause", hang, asyncio.CancelledError),
        ("begin_update", AsyncMock(return_value=(False, "it would not")), RunError),
        ("load_bucket", AsyncMock(side_effect=ValueError), ValueError),
        ("checksums", AsyncMock(return_value=(False, "it would not")), RunError),
    ],
)
async def test_failed_switch_refuses_requests_until_another_succeeds(
    engine: EngineDriver, script: Script, step: str, how: Any, raised: type[BaseException]
) -> None:
    script.broken, script.how = step, how
    running = generate(engine, [0])
    update = asyncio.create_task(engine.finish_update(1, await stage(engine, 1)))
    await asyncio.sleep(0)
    waiting = generate(engine, [1])
    if how is hang:
        await script.reached.wait()
        assert not waiting.done()
        with pytest.raises(RunError, match="version 2"):
            await engine.begin_update(2)
        update.cancel()
    with pytest.raises(raised):
        await update
    await all_are_refused(running, waiting, generate(engine, [1]))
    assert script.log[-2:] == ["abort_all", "resume"]
    assert not script.paused
    assert (engine.version, engine.running, engine.counts.updates) == (0, 0, 0)
    script.broken = ""
    await engine.finish_update(2, await stage(engine, 2))
    await generate(engine, [1])
    assert (engine.version, engine.counts.updates) == (2, 1)


@pytest.mark.parametrize("wrong", ["digest", "bucket", "tensor"])
async def test_update_that_differs_from_what_was_sent_refuses_requests(
    engine: EngineDriver, script: Script, wrong: str
) -> None:
    running = generate(engine, [0])
    total = await stage(engine, 1)
    await asyncio.sleep(0)
    (bucket,) = pack([(NAME, torch.ones(4))], bucket_bytes=100)
    bucket.data[0] ^= 1
    script.stray = wrong == "tensor"
    finish = engine.finish_update(1, total if wrong == "tensor" else "")
    with pytest.raises(RunError):
        await (engine.load_bucket(bucket) if wrong == "bucket" else finish)
    finish.close()
    script.stray = False
    await all_are_refused(running, generate(engine, [1]))
    assert engine.version == 0
    await engine.finish_update(2, await stage(engine, 2))
    await generate(engine, [1])


ENDS_TURNS = EngineCapabilities(continues=False)


async def test_engine_that_cannot_continue_turns_ends_them_before_it_switches(
    engine: EngineDriver, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._engine, "capabilities", ENDS_TURNS)
    running = [generate(engine, [0]) for _ in range(3)]
    update = asyncio.create_task(engine.finish_update(1, await stage(engine, 1)))
    await let_tasks_run()
    waiting = generate(engine, [1])
    await let_tasks_run()
    assert (engine.running, engine.version, script.log) == (3, 0, []), "no new turn begins, and nothing is switched"
    running.pop().cancel()
    script.turn_may_end.set()
    await asyncio.wait_for(asyncio.gather(update, waiting, *running), timeout=600)
    assert script.log == ["turn", "turn", "pause", "begin_update", "load_bucket", "end_update", "checksums", "resume"]
    assert (engine.version, engine.running) == (1, 0)
    drained = engine.counts.drain_s
    assert drained > 0
    await engine.finish_update(2, await stage(engine, 2))
    assert engine.counts.drain_s == drained, "nothing to wait for"


@pytest.mark.parametrize("continues", [True, False])
async def test_death_during_a_switch_ends_every_call_with_the_process_id(
    engine: EngineDriver, script: Script, monkeypatch: pytest.MonkeyPatch, continues: bool
) -> None:
    sglang = psutil.Popen(["sleep", "600"])
    engine._liveness = Liveness("The engine", [sglang])
    script.broken, script.how = "load_bucket", hang
    if not continues:
        monkeypatch.setattr(engine._engine, "capabilities", ENDS_TURNS)
    running = generate(engine, [0])
    update = asyncio.create_task(engine.finish_update(1, await stage(engine, 1)))
    await (script.reached.wait() if continues else let_tasks_run())
    waiting = generate(engine, [0])
    await asyncio.sleep(0)
    sglang.kill()
    for told in (running, update, waiting, generate(engine, [0])):
        with pytest.raises(EngineDied, match=str(sglang.pid)):
            await asyncio.wait_for(told, timeout=600)
    sglang.wait()


async def test_process_that_vanishes_while_it_is_looked_at_counts_as_dead() -> None:
    class Vanishing:
        pid = 7

        def is_running(self) -> bool:
            return True

        def status(self) -> str:
            raise psutil.NoSuchProcess(self.pid)

    liveness = Liveness("The engine", [Vanishing()])  # type: ignore[list-item]
    with pytest.raises(EngineDied, match=r"process 7\b"):
        await asyncio.wait_for(liveness.guard(asyncio.Event().wait()), timeout=600)


async def test_engine_survives_a_helper_process_that_exits(
    engine: EngineDriver, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The helper is the older process, so an engine that watched both would name the helper."""
    children: list[psutil.Popen] = []

    def launch() -> Script:
        children.extend(psutil.Popen(["sleep", "600"]) for _ in range(2))
        script.watched = [children[1]]
        return script

    monkeypatch.setattr(engine._engine, "_launch", launch)
    monkeypatch.setattr(sglang_cpu, "prepare", lambda _device: None)
    monkeypatch.setattr(sglang_cpu, "start_fork_server", lambda: None)
    await engine.start()
    helper, scheduler = children
    helper.kill()
    helper.wait()
    await generate(engine, [1])
    scheduler.kill()
    with pytest.raises(EngineDied, match=str(scheduler.pid)):
        await asyncio.wait_for(generate(engine, [0]), timeout=600)
    scheduler.wait()


async def test_sleep_waits_for_a_bucket_that_is_being_staged(
    engine: EngineDriver, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    taken = StagedVersion.stage

    def take(self: StagedVersion, bucket: Bucket, to_host: bool = False) -> None:
        begun.set()
        assert may_end.wait(600)
        taken(self, bucket, to_host)

    monkeypatch.setattr(StagedVersion, "stage", take)
    await engine.begin_update(1)
    bucket = pack_into(torch.empty(100, dtype=torch.uint8), [(NAME, torch.ones(4))])
    left: list[str] = []
    monkeypatch.setattr(StagedVersion, "move_to_host", lambda update: left.append(f"{update.nbytes} bytes"))
    staging = asyncio.create_task(engine.load_bucket(bucket))
    assert await asyncio.to_thread(begun.wait, 600)
    sleeping = asyncio.create_task(engine.sleep())
    await let_tasks_run()
    assert (left, script.log) == ([], [])
    may_end.set()
    await asyncio.gather(staging, sleeping)
    assert (left, script.log) == (["16 bytes"], ["sleep"])


async def test_closing_drain_lock_waits_for_those_inside_and_blocks_others() -> None:
    lock, leave, happened = DrainLock(), asyncio.Event(), list[str]()

    async def visit(name: str) -> None:
        async with lock.inside():
            happened.append(f"{name} is in")
            await leave.wait()
        happened.append(f"{name} is out")

    async def close(name: str) -> None:
        async with lock.closed():
            happened.append(f"{name} has closed")
            await asyncio.sleep(0)
            happened.append(f"{name} opens")

    visits = [asyncio.create_task(visit(name)) for name in "ab"]
    await asyncio.sleep(0)
    rest = [asyncio.create_task(each) for each in (close("x"), visit("late"), close("y"))]
    cancelled = asyncio.create_task(visit("cancelled"))
    await let_tasks_run()
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert happened == ["a is in", "b is in"], "neither closed nor open to others"
    leave.set()
    async with asyncio.timeout(600):
        await asyncio.gather(*visits, *rest)
    assert sorted(happened[2:4]) == ["a is out", "b is out"]
    assert happened[4:] == ["x has closed", "x opens", "late is in", "late is out", "y has closed", "y opens"]


async def test_start_that_times_out_ends_the_processes_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineDriver(str(POLICY), SglangConfig(start_timeout_s=0.05), Device.cpu, seed=0)
    started: list[subprocess.Popen[bytes]] = []

    def launch() -> None:
        started.append(subprocess.Popen(["sleep", "600"]))
        started[0].wait()

    monkeypatch.setattr(engine._engine, "_launch", launch)
    monkeypatch.setattr(sglang_cpu, "prepare", lambda _device: None)
    monkeypatch.setattr(sglang_cpu, "start_fork_server", lambda: None)
    with pytest.raises(RunError, match=str(POLICY)):
        await engine.start()
    assert [child.returncode for child in started] == [-9]


async def stream(*parts: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    async def told() -> AsyncIterator[dict[str, Any]]:
        for part in parts:
            yield part

    return told()


async def test_stream_returns_its_last_part_and_raises_a_refusal() -> None:
    heard: list[list[int]] = []
    last = part(1, 2, 3, finish={"type": "abort", "message": "Aborted", "status_code": None})
    assert await read_stream(stream(part(1), last), heard.append) == last
    assert heard == [[1], [1, 2, 3]]
    refused = part(1, finish={"type": "abort", "message": "The input is too long.", "status_code": 400})
    with pytest.raises(RunError, match=r"The input is too long"):
        await read_stream(stream(part(1), refused), heard.append)
    with pytest.raises(RunError):
        await read_stream(stream(), heard.append)


def test_versions_must_cover_all_tokens() -> None:
    output = part(1, 2, 3, 4, 5, finish={"type": "stop"})
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 5}]
    output["meta_info"] |= {"id": "r", "weight_version": "9", "weight_versions": spans}
    assert as_generation(output).versions == [3, 3, 4, 4, 4]
    spans[1]["end"] = 4
    with pytest.raises(RunError, match="4 of the 5"):
        as_generation(output)
