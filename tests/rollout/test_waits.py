"""The waits of an engine: its gate, its processes, its start and its streamed answers; none is for ever."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rlsys.config.schema import Device, Dtype, EngineConfig
from rlsys.errors import RunError
from rlsys.rollout import sglang_cpu
from rlsys.rollout.engine import DrainLock, Engine, as_generation, read_stream
from tests.support.tiny_models import POLICY


async def test_a_gate_closes_once_all_have_left_and_lets_nobody_in_meanwhile() -> None:
    gate, leave, happened = DrainLock(), asyncio.Event(), list[str]()

    async def visit(name: str) -> None:
        async with gate.inside():
            happened.append(f"{name} is in")
            await leave.wait()
        happened.append(f"{name} is out")

    async def close(name: str) -> None:
        async with gate.closed():
            happened.append(f"{name} has closed")
            await asyncio.sleep(0)
            happened.append(f"{name} opens")

    visits = [asyncio.create_task(visit(name)) for name in "ab"]
    await asyncio.sleep(0)
    rest = [asyncio.create_task(each) for each in (close("x"), visit("late"), close("y"))]
    for _ in range(10):
        await asyncio.sleep(0)
    assert happened == ["a is in", "b is in"], "neither closed nor open to others"
    leave.set()
    async with asyncio.timeout(60):
        await asyncio.gather(*visits, *rest)
    assert sorted(happened[2:4]) == ["a is out", "b is out"]
    assert happened[4:] == ["x has closed", "x opens", "late is in", "late is out", "y has closed", "y opens"]


async def test_a_gate_opens_again_after_a_failure_and_after_a_closing_that_was_given_up() -> None:
    gate = DrainLock()
    with pytest.raises(ZeroDivisionError):
        async with gate.closed():
            raise ZeroDivisionError
    async with gate.inside():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), gate.closed():
                raise AssertionError("closed with somebody inside")
    async with asyncio.timeout(60), gate.inside():
        pass


async def test_a_start_out_of_time_ends_what_it_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(dtype=Dtype.float32, start_timeout_s=0.05)
    engine = Engine(str(POLICY), config, Device.cpu, seed=0)
    started: list[subprocess.Popen[bytes]] = []

    def launch() -> None:
        started.append(subprocess.Popen(["sleep", "600"]))
        started[0].wait()

    monkeypatch.setattr(engine, "_launch", launch)
    monkeypatch.setattr(sglang_cpu, "prepare", lambda _device: None)
    with pytest.raises(RunError, match=str(POLICY)):
        await engine.start()
    assert [child.returncode for child in started] == [-9]


def part(*tokens: int, finish: dict[str, Any] | None = None) -> dict[str, Any]:
    """As SGLang repeats what it has said so far."""
    logprobs = [(-0.5, token, None) for token in tokens]
    return {"meta_info": {"output_token_logprobs": logprobs, "finish_reason": finish}}


async def stream(*parts: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    async def told() -> AsyncIterator[dict[str, Any]]:
        for part in parts:
            yield part

    return told()


async def test_the_last_part_of_a_stream_is_the_answer_all_are_heard_and_a_refusal_is_raised() -> None:
    heard: list[list[int]] = []
    last = part(1, 2, 3, finish={"type": "abort", "message": "Aborted", "status_code": None})
    assert await read_stream(stream(part(1), last), heard.append) == last
    assert heard == [[1], [1, 2, 3]]
    refused = part(1, finish={"type": "abort", "message": "The input is too long.", "status_code": 400})
    with pytest.raises(RunError, match=r"The input is too long"):
        await read_stream(stream(part(1), refused), heard.append)
    with pytest.raises(RunError):
        await read_stream(stream(), heard.append)


def test_versions_that_do_not_cover_the_tokens_are_an_error() -> None:
    def answer(*spans: tuple[str, int, int]) -> dict[str, Any]:
        output = part(1, 2, 3, 4, 5, finish={"type": "stop"})
        versions = [dict(zip(("version", "start", "end"), span, strict=True)) for span in spans]
        output["meta_info"] |= {"id": "r", "weight_version": "9", "weight_versions": versions}
        return output

    assert as_generation(answer(("3", 0, 2), ("4", 2, 5))).versions == [3, 3, 4, 4, 4]
    with pytest.raises(RunError, match="4 of the 5"):
        as_generation(answer(("3", 0, 2), ("4", 2, 4)))
