"""Measures what the gateway adds to a request: time over the engine alone, requests per second, memory of sessions.

    python -m bench.gateway                   # a scripted engine; half a minute
    python -m bench.gateway --engine sglang   # the demo's policy on its real engine
    python -m bench.gateway --run outputs/RUN # adds the gateway's share of a step of this run of the demo

The gateway is the real one, with HTTP on loopback, a chat template and the recorder. Its clients are another process. Each
session holds a conversation of a few requests and begins another. From the time of each request, as its client measures
it, the time of its own call of the engine is subtracted. The scripted engine takes `ENGINE_S` seconds for an answer of
`TOKENS` tokens and uses no CPU. For requests per second and CPU time it takes no time. The results are printed and written
to outputs/bench/gateway.json.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from statistics import fmean, quantiles
from time import perf_counter, process_time
from typing import Annotated, Any

import psutil
import typer
import uvloop
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from bench.gateway_load import VOCABULARY
from rlsys.apps.evaluation.execution import open_generator
from rlsys.config.compose import load_config
from rlsys.config.schema import GatewayAgent, TaskConfig, TokenMode
from rlsys.data.question import Question
from rlsys.rollout.agent.episode import EpisodeTools, run_episode
from rlsys.rollout.agent.gateway import Gateway
from rlsys.rollout.agent.recorder import Generation, Generator, OnTokens, TurnSampling
from rlsys.rollout.agent.tokens import Codec
from tests.support.chat_templates import CHATML

RESULT = Path("outputs/bench/gateway.json")
SESSIONS = (1, 8, 64)
REQUESTS = {1: 60, 8: 24, 64: 12}
"""Sessions -> requests of each."""
OPEN_SESSIONS = 1000
TOKENS = 32
ENGINE_S = 0.2
SAMPLING = TurnSampling(0.0)
CONFIG = "searchr1_tiny_cpu"


class ScriptedEngine:
    """Answers after `seconds` with the same tokens."""

    def __init__(self, answer: list[int], seconds: float) -> None:
        self._answer, self._seconds = answer, seconds

    async def generate(
        self,
        input_ids: list[int],
        sampling: TurnSampling,  # noqa: ARG002
        rid: str,  # noqa: ARG002
        on_tokens: OnTokens | None = None,  # noqa: ARG002
    ) -> Generation:
        await asyncio.sleep(self._seconds)
        return Generation(self._answer, [-1.0] * len(self._answer), "stop", len(input_ids), [0] * len(self._answer))


class Timed:
    """An engine that keeps how long each of its calls takes, by the name of the call."""

    def __init__(self, engine: Generator) -> None:
        self._engine = engine
        self.seconds: dict[str, float] = {}

    async def generate(self, input_ids: list[int], sampling: TurnSampling, rid: str) -> Generation:
        """Let the engine answer."""
        began = perf_counter()
        answer = await self._engine.generate(input_ids, sampling, rid=rid)
        self.seconds[rid] = perf_counter() - began
        return answer


@asynccontextmanager
async def opened(engine: Any, codec: Codec, sessions: int) -> AsyncIterator[list[tuple[str, str]]]:
    """Open sessions of a gateway, whose questions are their numbers; yields the address and key of each."""
    known: dict[int, tuple[str, str]] = {}
    ready, over = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    async def agent(number: str, base_url: str, api_key: str) -> float:
        def note() -> None:
            known[int(number)] = base_url, api_key
            if len(known) == sessions:
                ready.set()

        loop.call_soon_threadsafe(note)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(over.wait(), loop))
        return 0.0

    settings = GatewayAgent(entry=f"{__name__}.opened", timeout_s=3600.0)
    limits = {"max_turns": 1 << 30, "max_prompt_tokens": 7000, "max_turn_tokens": TOKENS, "max_total_tokens": 7096}
    task = TaskConfig("", "", token_mode=TokenMode.append, train_eos=False, **limits)
    with closing(EpisodeTools(engine, None, codec, task)) as tools:
        tools.agent = Gateway(settings, agent)
        questions = [Question(str(number), str(number), ()) for number in range(sessions)]
        episodes = [asyncio.create_task(run_episode(question, 0, tools, SAMPLING)) for question in questions]
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait([waiting, *episodes], return_when=asyncio.FIRST_COMPLETED)
        yield [known[number] for number in range(sessions)]
        over.set()
        await asyncio.gather(*episodes)


async def by_clients(sessions: Sequence[tuple[str, str]], requests: int) -> dict[str, Any]:
    """Let another process send `requests` of each session; return what it measured."""
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-m", "bench.gateway_load"]
    client = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    said, _ = await client.communicate(json.dumps({"sessions": sessions, "requests": requests}).encode())
    found: dict[str, Any] = json.loads(said)
    return found


async def overhead(engine: Generator, codec: Codec, sessions: int) -> dict[str, float]:
    """Return quantiles of requests through the gateway, of their calls of the engine, and of the differences, in ms."""
    timed = Timed(engine)
    async with opened(timed, codec, sessions) as known:
        latencies = (await by_clients(known, REQUESTS[sessions]))["latencies_s"]
    through = [one for of_session in latencies for one in of_session]
    calls = [
        timed.seconds[f"{session}#0.{turn}"] for session, turns in enumerate(latencies) for turn in range(len(turns))
    ]
    added = [one - call for one, call in zip(through, calls, strict=True)]
    found: dict[str, float] = {"sessions": sessions, "requests": len(through)}
    for name, seconds in (("gateway", through), ("engine", calls), ("added", added)):
        cuts = quantiles(seconds, n=100)
        found |= {f"{name}_p50_ms": 1000 * cuts[49], f"{name}_p99_ms": 1000 * cuts[98]}
    return found


async def capacity(answer: list[int], codec: Codec, sessions: int = 8, requests: int = 60) -> dict[str, float]:
    """Return requests per second, and CPU time of this process for each, with an engine that takes no time."""
    async with opened(ScriptedEngine(answer, 0.0), codec, sessions) as known:
        cpu = process_time()
        found = await by_clients(known, requests)
        cpu = process_time() - cpu
    count = sessions * requests
    return {"requests_per_s": count / found["seconds"], "cpu_ms_per_request": 1000 * cpu / count}


async def memory(answer: list[int], codec: Codec) -> dict[str, float]:
    """Return what this process grows by with `OPEN_SESSIONS`, before and after a request of each, in MB."""

    def resident() -> float:
        gc.collect()
        return psutil.Process().memory_info().rss / 1e6

    before = resident()
    async with opened(ScriptedEngine(answer, 0.0), codec, OPEN_SESSIONS) as known:
        idle = resident()
        await by_clients(known, 1)
        return {"sessions": OPEN_SESSIONS, "open_mb": idle - before, "after_requests_mb": resident() - before}


def step_of(run: Path) -> dict[str, float]:
    """Return the mean requests and seconds of a step of a run, without its first; a turn of an episode is a request."""
    file = run / "metrics.jsonl"
    steps = [json.loads(line) for line in file.read_text().splitlines()][1:] if file.is_file() else []
    if not steps:
        raise typer.BadParameter(f"{run} has not two finished steps: give the folder of a longer run.")
    requests = fmean(row["rollout/episodes"] * row["env/number_of_actions/mean"] for row in steps)
    return {"requests_per_step": requests, "step_s": fmean(row["time/step"] for row in steps)}


async def measure(engine: str, step: dict[str, float], report: Callable[[str], None]) -> dict[str, Any]:
    config = load_config(CONFIG)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    tokenizer.chat_template = CHATML
    codec = Codec(tokenizer)
    answer = [*codec.encode(" ".join(VOCABULARY) * 9)[: TOKENS - 1], codec.eos_id]
    found: dict[str, Any] = {"engine": engine, "engine_s": ENGINE_S if engine == "scripted" else None, "overhead": []}
    found["capacity"] = await capacity(answer, codec)
    report(f"capacity {found['capacity']}")
    found["memory"] = await memory(answer, codec)
    report(f"memory {found['memory']}")

    async def all_sessions(used: Generator) -> None:
        for sessions in SESSIONS:
            found["overhead"].append(await overhead(used, codec, sessions))
            report(str(found["overhead"][-1]))

    if engine == "scripted":
        await all_sessions(ScriptedEngine(answer, ENGINE_S))
    else:
        async with open_generator(config, engine) as started:
            await all_sessions(started)
    if step:
        cpu_s = step["requests_per_step"] * found["capacity"]["cpu_ms_per_request"] / 1000
        found["step"] = step | {"share": cpu_s / step["step_s"]}
    return found


def show(found: dict[str, Any]) -> None:
    """Print the figures."""
    table = Table(title=f"Engine: {found['engine']}. Milliseconds of a request")
    for column in ("sessions", "requests", "gateway p50", "engine p50", "added p50", "added p99"):
        table.add_column(column, justify="right")
    for row in found["overhead"]:
        names = ("gateway_p50_ms", "engine_p50_ms", "added_p50_ms", "added_p99_ms")
        table.add_row(str(row["sessions"]), str(row["requests"]), *(f"{row[name]:.2f}" for name in names))
    console = Console()
    console.print(table)
    for name in ("capacity", "memory", "step"):
        if name in found:
            console.print(name, {key: round(value, 4) for key, value in found[name].items()})


def main(
    engine: Annotated[str, typer.Option(help="scripted, sglang or transformers.")] = "scripted",
    run: Annotated[Path | None, typer.Option(help="Folder of a run of the demo, for the share of a step.")] = None,
) -> None:
    """Measure the gateway."""
    step = {} if run is None else step_of(run)
    work: Coroutine[Any, Any, dict[str, Any]] = measure(engine, step, lambda text: print(text, file=sys.stderr))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # As Ray's actors, where engines are, do.
        found = runner.run(work)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    show(found)


if __name__ == "__main__":
    typer.run(main)
