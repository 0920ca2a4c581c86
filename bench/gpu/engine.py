"""Measures an SGLang engine: start, tokens per second, weight updates beside generation, and sleep.

The rollout worker receives versions from another process, over the transports that a run uses, while requests are in
flight. It verifies every tensor of each version itself.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter

import torch

from bench.gpu.figures import PROMPT_TOKENS, Figure, Setting, compared, holds
from bench.gpu.part import in_new_process
from rlsys.config.schema import OnUpdate, RolloutConfig, SearchConfig, SglangConfig, SyncMode, TaskConfig
from rlsys.observe.environment import version_of
from rlsys.rollout.agent.recorder import Generation, TurnSampling
from rlsys.rollout.engine import EngineDriver
from rlsys.rollout.worker import RolloutWorker
from rlsys.weights.bucket import digest, pack_into
from rlsys.weights.hf_io import HfReader
from rlsys.weights.transport import TransportSpec, open_sender
from rlsys.weights.weight_map import aligned, packed

MEMORY_FRACTION = 0.6
"""Leaves room for staged weights and the sender's buckets on the same device."""
GREEDY_TOKENS = 32
_PLAIN_TOKENS = 256
"""Number of token ids from which prompts are drawn; every vocabulary has these ids."""
_CONTEXT_TOKENS, _KV_TOKENS_ON_CPU = 1024, 16384
_START_S, _TRANSPORT_S = 400.0, 60.0
_GIB = 2**30


def measure(setting: Setting) -> Iterator[Figure]:
    """Yield the figures of an engine as in a run, of one without CUDA graphs, and of one that sleeps."""
    figures = _as_in_a_run(setting)

    async def following() -> Figure | None:
        return await anext(figures, None)

    with asyncio.Runner() as runner:  # Yields each figure without waiting for the next.
        while (figure := runner.run(following())) is not None:
            yield figure
    if setting.on_gpu:
        yield from in_new_process(without_graphs, setting)
        if version_of("torch-memory-saver") is None:
            yield Figure("sleep", "not measured: torch-memory-saver is not installed")
            return
    yield from in_new_process(with_sleep, setting)


def without_graphs(setting: Setting) -> list[Figure]:
    """Return the speeds of an engine without CUDA graphs. Call it in a new process."""

    async def run() -> list[Figure]:
        async with started(setting, cuda_graphs=False) as worker:
            return [figure async for figure in _speeds(worker.engine, setting, "no graphs: ")]

    return asyncio.run(run())


def with_sleep(setting: Setting) -> list[Figure]:
    """Return the memory that sleep frees, and check that the engine wakes as it was. Call it in a new process."""

    async def run() -> list[Figure]:
        async with started(setting, memory_saver=True) as worker:
            engine, (prompt,) = worker.engine, prompts(1)
            greedy = TurnSampling(temperature=0.0, max_new_tokens=GREEDY_TOKENS)
            before, times, free = (await engine.generate(prompt, greedy, "before")).token_ids, [], [_free(setting)]
            for switch in (engine.sleep, engine.wake):
                begun = perf_counter()
                await switch()
                times.append(perf_counter() - begun)
                free.append(_free(setting))
            after = (await engine.generate(prompt, greedy, "after")).token_ids
        found = [
            holds("sleep: the same tokens before and after", before == after),
            *(
                Figure(f"sleep: {name}", seconds, "s")
                for name, seconds in zip(("sleeping", "waking"), times, strict=True)
            ),
        ]
        if setting.on_gpu:
            planned = MEMORY_FRACTION * torch.cuda.mem_get_info()[1] / _GIB
            freed, kept = (free[1] - free[0]) / _GIB, (free[0] - free[2]) / _GIB
            found.append(compared("sleep: freed", freed, "GiB", "memory_fraction", planned, (0.9, float("inf"))))
            found.append(Figure("sleep: more memory after waking than before", kept, "GiB"))
        return found

    return asyncio.run(run())


def _free(setting: Setting) -> int:
    """Return the free bytes of the device; 0 on a CPU."""
    return torch.cuda.mem_get_info()[0] if setting.on_gpu else 0


async def _as_in_a_run(setting: Setting) -> AsyncIterator[Figure]:
    begun = perf_counter()
    async with started(setting) as worker:
        yield Figure("start", perf_counter() - begun, "s")
        async for figure in _speeds(worker.engine, setting, ""):
            yield figure
        modes = (SyncMode.tensor, SyncMode.ipc) if setting.on_gpu else (SyncMode.tensor,)
        for version, mode in enumerate(modes, 1):
            for figure in await _update(worker, setting, mode, version):
                yield figure


@asynccontextmanager
async def started(
    setting: Setting, *, cuda_graphs: bool = True, memory_saver: bool = False
) -> AsyncIterator[RolloutWorker]:
    """Yield a started worker on the model with random weights; stop it at the end."""
    config = SglangConfig(
        dtype=setting.dtype,
        memory_fraction=MEMORY_FRACTION if setting.on_gpu else 0.05,
        kv_cache_tokens=None if setting.on_gpu else _KV_TOKENS_ON_CPU,
        max_running=max(setting.scale.requests),
        cuda_graphs=cuda_graphs,
        start_timeout_s=_START_S,
    )
    worker = RolloutWorker(
        str(setting.model),
        RolloutConfig(engine=config),
        TaskConfig(train_path="", eval_path="", max_total_tokens=_CONTEXT_TOKENS),
        SearchConfig(enabled=False),
        setting.device,
        seed=0,
        on_update=OnUpdate["continue"],
        memory_saver=memory_saver,
    )
    try:
        await worker.start()
        yield worker
    finally:
        await worker.stop()


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(_PLAIN_TOKENS) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


async def generate(engine: EngineDriver, count: int, new_tokens: int) -> list[Generation]:
    """Return the continuations of `count` random prompts, sampled side by side at temperature 1."""
    sampling = TurnSampling(temperature=1.0, max_new_tokens=new_tokens)
    return await asyncio.gather(
        *(engine.generate(prompt, sampling, f"bench-{at}") for at, prompt in enumerate(prompts(count)))
    )


async def _speeds(engine: EngineDriver, setting: Setting, title: str) -> AsyncIterator[Figure]:
    """Yield the tokens generated per second with each number of requests; the first round of each is a warm-up."""
    alone = 0.0
    for count in setting.scale.requests:
        await generate(engine, count, setting.scale.new_tokens)
        begun = perf_counter()
        found = await generate(engine, count, setting.scale.new_tokens)
        rate = sum(len(each.token_ids) for each in found) / (perf_counter() - begun)
        name = f"{title}{count} requests"
        yield compared(name, rate, "tokens/s", "one", alone) if alone else Figure(name, rate, "tokens/s")
        alone = alone or rate


async def _update(worker: RolloutWorker, setting: Setting, mode: SyncMode, version: int) -> list[Figure]:
    """Send a version over `mode` beside generation, and switch to it."""
    names, size = ("the sender", "the engine"), setting.scale.bucket_bytes
    spec = TransportSpec(mode, 0, names, size, _TRANSPORT_S, setting.device, None, "")
    counts = worker.engine.counts
    sent, paused = counts.update_bytes, counts.pause_s
    with _sender(spec, setting.model) as pipe:
        await worker.open_transport(replace(spec, rank=1))
        await asyncio.to_thread(pipe.recv)  # The sender is ready.
        async with _traffic(worker.engine, setting) as done:
            begun = perf_counter()
            await worker.begin_update(version)
            pipe.send(version)
            while not isinstance(message := await asyncio.to_thread(pipe.recv), str):
                await worker.load_bucket(message)
                pipe.send(message.number)
            staged = perf_counter()
            await worker.finish_update(version, message)
            switched = perf_counter()
    return [
        Figure(f"{mode}: staging beside generation", (counts.update_bytes - sent) / (staged - begun) / 1e9, "GB/s"),
        Figure(f"{mode}: switching", switched - staged, "s"),
        Figure(f"{mode}: generation paused", counts.pause_s - paused, "s"),
        holds(f"{mode}: requests in flight continue under the new version", continued(done, version)),
    ]


def continued(done: list[Generation], version: int) -> bool:
    """Return True if some of the requests have tokens of `version` after tokens of the version before, and all ended
    whole, without a token of an older version after one of a newer."""
    orderly = all(each.finish in ("length", "stop") and each.versions == sorted(each.versions) for each in done)
    return orderly and any(set(each.versions) == {version - 1, version} for each in done)


@asynccontextmanager
async def _traffic(engine: EngineDriver, setting: Setting) -> AsyncIterator[list[Generation]]:
    """Keep requests in flight during the body; yield the list that has all of them after it."""
    done: list[Generation] = []
    ending = asyncio.Event()
    sampling = TurnSampling(temperature=1.0, max_new_tokens=2 * setting.scale.new_tokens)

    async def ask(prompt: list[int]) -> None:
        while not ending.is_set():
            done.append(await engine.generate(prompt, sampling, "traffic"))

    async with asyncio.TaskGroup() as requests:
        for prompt in prompts(setting.scale.requests[1]):
            requests.create_task(ask(prompt))
        try:
            yield done
        finally:
            ending.set()


@contextmanager
def _sender(spec: TransportSpec, model: Path) -> Iterator[Connection]:
    """Yield the pipe to a process that sends versions of `model`; end the process at the end."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=send, args=(spec, model, theirs), daemon=True)
    process.start()
    theirs.close()  # So that `recv` raises EOFError if the process dies.
    try:
        yield ours
    finally:
        process.kill()
        process.join()


def send(spec: TransportSpec, model: Path, pipe: Connection) -> None:
    """Say on `pipe` when ready; send the versions that arrive, each bucket when the one before is taken, and the digest.

    An odd version has half of the weights of `model`.
    """
    sender, reader = open_sender(spec), HfReader(model)
    pipe.send(None)
    while True:
        factor = 0.5 if pipe.recv() % 2 else 1.0
        checksums: dict[str, str] = {}
        for run in packed(sorted(reader.names()), lambda name: aligned(reader.spec(name).nbytes), spec.bucket_bytes):
            bucket = pack_into(sender.next_slot(), ((name, reader.get(name) * factor) for name in run))
            handle = sender.send(bucket)
            checksums |= {record.name: record.checksum for record in handle.records}
            pipe.send(handle)
            sender.release(pipe.recv())
        pipe.send(digest(checksums))
