"""Tests of an engine from outside of the package, chosen by config alone: the example, and engines with mistakes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from examples.extend.engine import OneByOne
from rlsys.cluster.planning.memory import kv_cache_tokens
from rlsys.config.schema import Dtype, RunConfig
from rlsys.errors import RunError, UserError
from rlsys.orchestrator.validate import find_problems
from rlsys.rollout.agent.recorder import Generation, TurnSampling
from rlsys.rollout.engine import EngineDriver
from rlsys.rollout.interface import EngineError, EngineSetup, RolloutEngine
from rlsys.rollout.kinds import capability_problems, engine_class, engine_fact
from rlsys.weights.weight_map import read_architecture
from tests.rollout.bench import EngineBench, greedy
from tests.rollout.contract import ENDS, End, check_end, check_end_token, check_switch
from tests.support import tiny
from tests.support.composed import composed
from tests.support.refusals import refused
from tests.support.tensors import digest_of, pack
from tests.support.tiny_models import POLICY

HERE = "tests.extensions.test_engine"
EXAMPLE = "examples.extend.engine.OneByOne"
KIND = "rollout.engine.kind"


def config_of(path: str, *more: str) -> RunConfig:
    return composed(f"rollout.engine={path}", *more)


def driver(config: RunConfig, folder: Path = POLICY) -> EngineDriver:
    return EngineDriver(str(folder), config.rollout.engine, config.cluster.device, seed=3)


@pytest.mark.parametrize("end", [*ENDS, None])
async def test_example_ends_requests_as_in_the_table(end: End | None, tmp_path: Path) -> None:
    words = tiny.tokenizer()
    engine = driver(config_of(EXAMPLE), Path(tiny.save(tiny.train(tiny.FIRST, words, seed=0), words, tmp_path)))
    await engine.start()
    await (check_end(engine, words, end) if end else check_end_token(engine, words))


async def test_example_switches_weights_in_the_middle_of_a_request(tmp_path: Path) -> None:
    words = tiny.tokenizer()
    first, second = (tiny.train(trace, words, seed=0) for trace in (tiny.FIRST, tiny.SECOND))
    engine = driver(config_of(EXAMPLE), Path(tiny.save(first, words, tmp_path)))
    await engine.start()
    await check_switch(EngineBench(engine, words, first, second), [tiny.FIRST.prompt])


async def test_settings_of_the_class_are_keys_of_the_config() -> None:
    config = config_of(EXAMPLE, "rollout.engine.ban=[3,4]", "rollout.engine.max_running=5")
    engine = driver(config)
    assert isinstance(engine._engine, OneByOne)
    assert engine._engine._ban == [3, 4]
    common = engine._engine.setup.config
    assert (common.max_running, common.dtype) == (5, Dtype.float32), "keys of every engine keep the profile's values"
    with refused("conflict", "rollout.engine.cuda_graphs"):
        config_of(EXAMPLE, "rollout.engine.cuda_graphs=true")
    with refused("wrong_type", "rollout.engine.ban"):
        config_of(EXAMPLE, "rollout.engine.ban=many")


def test_plan_asks_the_class() -> None:
    config = config_of(f"{HERE}.Planned")
    architecture = read_architecture(config.model.path)
    assert kv_cache_tokens(config, architecture) == 777
    assert engine_fact(config, "memory_beside_cache", architecture) == engine_fact(config, "graph_memory") == 0.0
    for change, key in (
        ("rollout.engine.tp=2", "rollout.engine.tp"),
        ("rollout.engine.dtype=bfloat16", "rollout.engine.dtype"),
        ("cluster.device=gpu", KIND),
    ):
        changed = config_of(EXAMPLE, change)
        assert [problem.key for problem in capability_problems(changed)] == [key]
        assert key in [problem.key for problem in find_problems(changed)]
    for limit_s, keys in ((300.0, ["cluster.call_timeout_s"]), (301.0, [])):
        limits = f"cluster.call_timeout_s={limit_s}", "rollout.episode_timeout_s=300"
        asynchronous = config_of(f"{HERE}.Planned", "trainer.schedule=async", *limits)
        assert [problem.key for problem in capability_problems(asynchronous)] == keys
    assert not [*capability_problems(config_of(EXAMPLE))]


@pytest.mark.parametrize(
    "name", ["Unfinished", "not_an_engine", "Unmade", "Overflowing", "TakesNoSampling", "NotAsync", "StopsAsync"]
)
def test_class_that_is_no_engine_is_refused_before_the_start(name: str) -> None:
    config = config_of(f"{HERE}.{name}")
    with refused("user_code", KIND) as caught:
        engine = engine_class(config.rollout.engine)
        assert issubclass(engine, RolloutEngine)
        engine_fact(config, "cache_tokens", 1.0, 1.0)
        driver(config)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"logprobs": [-0.5]},
        {"versions": [0]},
        {"logprobs": [-0.5, float("nan")]},
        {"logprobs": [-0.5, 2.0]},
        {"versions": [0, 9]},
        {"finish": "done"},
        {"token_ids": [1, 2, 3], "logprobs": [-0.5] * 3, "versions": [0] * 3},
        {"logprobs": None},
        ZeroDivisionError("one\ntwo"),
        TimeoutError(),
    ],
    ids=str,
)
async def test_impossible_result_is_one_error_with_the_name_of_the_class(wrong: Any) -> None:
    engine = driver(config_of(f"{HERE}.Toy"))
    await engine.start()
    toy: Any = engine._engine
    await engine.generate([1], TurnSampling(1.0, max_new_tokens=2), "right")
    toy.answer = wrong if isinstance(wrong, Exception) else replace(toy.answer, **wrong)
    with refused("user_code", KIND) as caught:
        await engine.generate([1], TurnSampling(1.0, max_new_tokens=2), "wrong")
    assert f"{HERE}.Toy" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert engine.running == 0


ROUTES = np.array([[[0, 1], [2, 3]], [[3, 0], [1, 2]]], np.uint8)
"""Experts of two tokens in two layers, each with two of four experts."""


@pytest.mark.parametrize(
    "wrong", [None, ROUTES[1:], ROUTES.astype(np.int16), ROUTES + np.uint8(1), ROUTES * np.uint8(0)], ids=str
)
async def test_impossible_experts_are_one_error_with_the_name_of_the_class(wrong: Any) -> None:
    config = config_of(f"{HERE}.Toy")
    shape = replace(read_architecture(POLICY), layers=2, experts=4, experts_per_token=2)
    place = config.rollout.engine, config.cluster.device
    engine = EngineDriver(str(POLICY), *place, seed=3, architecture=shape, returns_routes=True)
    await engine.start()
    toy, asked = cast("Any", engine._engine), TurnSampling(1.0, max_new_tokens=2, routes_from=0)
    toy.answer = replace(toy.answer, routes=ROUTES)
    assert (await engine.generate([1], asked, "right")).routes is ROUTES
    toy.answer = replace(toy.answer, routes=wrong)
    with refused("user_code", KIND):
        await engine.generate([1], asked, "wrong")


async def test_start_that_never_returns_ends_at_its_timeout() -> None:
    engine = driver(config_of(f"{HERE}.Endless", "rollout.engine.start_timeout_s=0.05"))
    with pytest.raises(RunError, match="start_timeout_s"):
        await asyncio.wait_for(engine.start(), timeout=600)


@pytest.mark.parametrize("method", ["pause", "begin_update", "load_bucket", "finish_update", "hashes", "resume"])
async def test_refusal_of_an_update_reaches_every_request(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = driver(config_of(f"{HERE}.Toy"))
    await engine.start()

    async def refuse(*_arguments: Any) -> None:
        raise EngineError("the disk is full")

    (bucket,) = pack(engine._engine._model.named_parameters(), bucket_bytes=1 << 30)  # type: ignore[attr-defined]
    await engine.begin_update(1)
    await engine.load_bucket(bucket)
    with monkeypatch.context() as patch:
        patch.setattr(engine._engine, method, refuse)
        if method == "resume":
            await engine.finish_update(1, digest_of([bucket]))
        else:
            with pytest.raises(RunError, match="the disk is full"):
                await engine.finish_update(1, digest_of([bucket]))
    with pytest.raises(RunError, match="the disk is full"):
        await engine.generate([1], greedy(2), "refused")


@pytest.mark.parametrize("reported", [None, [], [None]], ids=str)
async def test_impossible_hashes_are_one_error_with_the_name_of_the_class(
    reported: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = driver(config_of(f"{HERE}.Toy"))
    await engine.start()

    async def hashes() -> Any:
        return reported

    (bucket,) = pack(engine._engine._model.named_parameters(), bucket_bytes=1 << 30)  # type: ignore[attr-defined]
    await engine.begin_update(1)
    await engine.load_bucket(bucket)
    monkeypatch.setattr(engine._engine, "hashes", hashes)
    with refused("user_code", KIND) as caught:
        await engine.finish_update(1, digest_of([bucket]))
    assert f"{HERE}.Toy" in str(caught.value)
    with pytest.raises(RunError):
        await engine.generate([1], greedy(2), "refused")


async def test_refusal_of_a_request_names_the_engine_and_not_the_agent() -> None:
    engine = driver(config_of(f"{HERE}.Toy"))
    await engine.start()
    toy: Any = engine._engine
    toy.answer = EngineError("the cache is full")
    with pytest.raises(RunError, match=rf"{HERE}\.Toy on .*: the cache is full\.$"):
        await engine.generate([1], greedy(2), "refused")
    assert (engine.running, engine.counts.aborted) == (0, 1)


class Toy(OneByOne):
    """Answers every request with `answer`."""

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        self.answer: Any = Generation([1, 2], [-0.5, -0.25], "length", cached_tokens=0, versions=[0, 0])

    async def generate(self, *_request: Any) -> Generation:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Planned(Toy):
    """Has a KV cache of its own, and does not pause requests."""

    capabilities = replace(OneByOne.capabilities, continues=False)

    @classmethod
    def cache_tokens(cls, *_facts: Any) -> float:
        return 777


class Endless(Toy):
    """Never starts."""

    async def start(self) -> None:
        await asyncio.Event().wait()


class TakesNoSampling(Toy):
    """Does not take what it is called with."""

    async def generate(self, input_ids: list[int]) -> Generation:  # type: ignore[override]
        raise AssertionError(input_ids)


class NotAsync(Toy):
    """Returns hashes that are awaited."""

    def hashes(self) -> Any:  # type: ignore[override]
        return []


class StopsAsync(Toy):
    """Would never be stopped."""

    async def stop(self) -> None:  # type: ignore[override]
        raise AssertionError


class Unfinished(RolloutEngine):
    """Lacks all methods."""


class Unmade(Toy):
    """Cannot be made."""

    def __init__(self, setup: EngineSetup) -> None:
        raise ValueError(setup)


class Overflowing(Toy):
    """Claims an endless KV cache."""

    @classmethod
    def cache_tokens(cls, *_facts: Any) -> float:
        return float("inf")


def not_an_engine(_setup: EngineSetup) -> None:
    raise UserError("not called", code="user_code", key="")
