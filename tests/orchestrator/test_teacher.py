"""Tests of a teacher behind an address: against real servers with scripted values, and with a transformers model."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from rlsys.config.algorithm import AlgorithmConfig, OldLogprobs, TeacherApi, TeacherConfig
from rlsys.config.schema import ModelConfig, RunConfig
from rlsys.data.trajectory import Branch, Sample
from rlsys.errors import RunError
from rlsys.orchestrator import endpoint
from rlsys.orchestrator.teacher import TeacherServer, require_teacher
from rlsys.orchestrator.watchdog import stall_limit_s
from rlsys.orchestrator.worker_groups import Scorer
from tests.support import tiny, tiny_configs
from tests.support.refusals import refused
from tests.support.serving import Answer, Body, Server, served
from tests.support.teachers import scored_by, sglang
from tests.support.trajectories import sample
from tests.support.virtual_time import virtually
from tests.trainer import reference

BY_HAND = np.linspace(-0.5, -12.0, 24)


def scripted(body: Body) -> Any:
    """SGLang's answer; the log-prob of the token at index t is BY_HAND[t]."""
    tokens, start = body["input_ids"], body["logprob_start_len"]
    return sglang(tokens, start, BY_HAND[: len(tokens)].tolist(), [f"<{token}>" for token in tokens])


def completion(body: Body) -> Any:
    """Answer of an OpenAI-compatible server, with a generated token at the end."""
    tokens = body["prompt"]
    texts = [*(f"<{token}>" for token in tokens), "?"]
    logprobs = [None, *BY_HAND[1 : len(tokens)].tolist(), -3.0]
    return {"choices": [{"text": "", "logprobs": {"tokens": texts, "token_logprobs": logprobs}}]}


@pytest.fixture
def server() -> Iterator[Server]:
    with served(scripted) as started:
        yield started


@pytest.fixture
def gone() -> Iterator[str]:
    """Address at which nothing listens, and which nothing else can take."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_PAUSE", lambda _: 0.0)


def settings(url: str, **more: Any) -> TeacherConfig:
    return TeacherConfig(url, retries=1, **more)


async def scored(config: TeacherConfig, samples: list[Sample]) -> tuple[list[np.ndarray], dict[str, float]]:
    """Log-probs of the samples, and the metrics of the requests."""
    teacher = TeacherServer(config)
    try:
        return await teacher.compute(samples), teacher.metrics()
    finally:
        await teacher.close()


EPISODE = sample([5, 6, 7, 8, 9, 4], [False, False, True, False, True, False])
TWO_BRANCHES = sample([1, 2, 3, 1, 9], [False, True, False, False, True])
TWO_BRANCHES = replace(TWO_BRANCHES, trajectory=replace(TWO_BRANCHES.trajectory, branches=(Branch(0), Branch(3))))
UNTRAINED = sample([1, 2], [False, False])


async def test_only_trained_tokens_are_scored_in_the_context_of_their_own_branch(server: Server) -> None:
    found, figures = await scored(settings(server.url), [EPISODE, TWO_BRANCHES, UNTRAINED])
    first, second, third = BY_HAND[[2, 4, 1]].astype(np.float32)
    expected = ([0, 0, first, 0, second, 0], [0, third, 0, 0, third], [0, 0])
    for one, of_sample in zip(found, expected, strict=True):
        assert_array_equal(one, np.array(of_sample, dtype=np.float32))
    asked = sorted((body["input_ids"], body["logprob_start_len"]) for body in server.bodies)
    assert asked == [([1, 2], 0), ([1, 9], 0), ([5, 6, 7, 8, 9], 1)], "nothing after the last trained token is sent"
    assert {path for path, *_ in server.seen} == {"/generate"}
    assert all(body["sampling_params"]["max_new_tokens"] == 0 for body in server.bodies)
    assert figures["distillation/requests"] == 3
    assert figures["distillation/request_s"] > 0


async def test_openai_compatible_server_gives_the_same(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", "secret")
    server.answer = completion
    more: Body = {"api": TeacherApi.openai, "served_model": "big", "token_env": "TEACHER_KEY"}
    (found,), _ = await scored(settings(f"{server.url}/v1/", **more), [EPISODE])
    assert_array_equal(found, np.where(EPISODE.trajectory.loss_mask, BY_HAND[:6], 0).astype(np.float32))
    ((path, body, headers),) = server.seen
    assert (path, headers["Authorization"]) == ("/v1/completions", "Bearer secret")
    assert (body["model"], body["prompt"], body["echo"], body["logprobs"]) == ("big", [5, 6, 7, 8, 9], True, 1)


async def test_scorer_puts_the_servers_log_probs_where_the_references_are(server: Server) -> None:
    """The policy's come from the engine here, so the run has no inference group at all."""
    teacher = TeacherServer(settings(server.url))
    (found,) = await Scorer(None, None, OldLogprobs.engine, teacher).compute([EPISODE])
    await teacher.close()
    assert found.reference is not None
    assert_array_equal(found.reference[[2, 4]], BY_HAND[[2, 4]].astype(np.float32))


async def test_server_has_transformers_log_probs_of_long_episodes(server: Server, tmp_path: Path) -> None:
    model = reference.load(reference.make_model(tiny_configs.llama3(), tmp_path))
    server.answer = scored_by(model)
    random = np.random.default_rng(3)
    samples = []
    for length in (8, 40, 90):
        mask = (np.arange(length) > 3) & (random.random(length) < 0.5)
        samples.append(sample(random.integers(0, tiny_configs.VOCAB, length).tolist(), mask.tolist()))
    found, _ = await scored(settings(server.url), samples)
    for one, theirs in zip(samples, found, strict=True):
        tokens = torch.tensor(one.trajectory.tokens, dtype=torch.int64)[None]
        with torch.no_grad():
            log_p = torch.log_softmax(model(tokens).logits.double(), dim=-1)[0, :-1].gather(-1, tokens[0, 1:, None])[
                :, 0
            ]
        expected = np.append(0.0, log_p.numpy()) * one.trajectory.loss_mask
        assert_allclose(theirs, expected, rtol=1e-5, atol=1e-5)
        assert len({*theirs[one.trajectory.loss_mask].tolist()}) > 1


async def test_busy_server_is_asked_again(server: Server) -> None:
    server.statuses = [503]
    _, figures = await scored(settings(server.url), [EPISODE])
    assert (len(server.seen), figures["distillation/requests"]) == (2, 2)


@virtually
async def test_time_of_a_sequence_has_no_wait_for_a_place() -> None:
    statuses = [503]

    async def answer(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(2.0)
        content = json.dumps(scripted(json.loads(request.content))).encode()
        return httpx.Response(statuses.pop() if statuses else 200, stream=httpx.ByteStream(content))

    teacher = TeacherServer(settings("http://teacher.test", max_concurrent=1), httpx.MockTransport(answer))
    await teacher.compute([EPISODE] * 5)
    assert teacher.metrics() == {"distillation/requests": 5 + 1, "distillation/request_s": pytest.approx(6 * 2.0 / 5)}
    await teacher.compute([EPISODE])
    assert teacher.metrics() == {"distillation/requests": 1, "distillation/request_s": pytest.approx(2.0)}
    await teacher.close()


def spoilt(change: Callable[[list[Any]], Any]) -> Answer:
    """Return the answer of a server that sends `change` of the entries."""

    def answer(body: Body) -> Any:
        entries = scripted(body)["meta_info"]["input_token_logprobs"]
        return {"meta_info": {"input_token_logprobs": change(entries)}}

    return answer


@pytest.mark.parametrize(
    "answer",
    [
        spoilt(lambda entries: entries[1:-1]),
        spoilt(lambda entries: [[value, token + 1, text] for value, token, text in entries]),
        spoilt(lambda entries: [[None, *rest] for _, *rest in entries]),
        spoilt(lambda entries: [[float("nan"), *rest] for _, *rest in entries]),
        spoilt(lambda _: None),
        lambda _: {"meta_info": {}},
        lambda _: [],
    ],
    ids=["shorter", "other ids", "null", "nan", "none", "no log-probs", "a list"],
)
async def test_answer_that_is_no_log_prob_of_each_trained_token_ends_the_run(server: Server, answer: Answer) -> None:
    server.answer = answer
    with pytest.raises(ExceptionGroup) as caught:
        await scored(settings(server.url), [EPISODE])
    (error,) = caught.value.exceptions
    assert isinstance(error, RunError)
    assert len(server.seen) == 2


async def test_server_that_is_gone_or_refuses_ends_the_run(server: Server, gone: str) -> None:
    for url, statuses, code, asked in ((gone, [], "unreachable", 0), (server.url, [401], None, 1)):
        server.statuses = statuses
        with pytest.raises(ExceptionGroup) as caught:
            await scored(settings(url), [EPISODE])
        (error,) = caught.value.exceptions
        assert isinstance(error, RunError)
        assert error.code == code
        assert len(server.seen) == asked


def taught(url: str) -> RunConfig:
    return RunConfig(model=ModelConfig("policy"), algorithm=AlgorithmConfig(teacher=settings(url)))


def decoded(body: Body, shifted: int = 0) -> Any:
    """Answer of a server whose token is that of the policy, `shifted` places before it."""
    tokens, words = body["input_ids"], tiny.tokenizer()
    texts = [words.decode([max(0, token - shifted)]) for token in tokens]
    return sglang(tokens, body["logprob_start_len"], [-1.0] * len(tokens), texts)


def test_tokens_of_the_server_are_compared_before_the_start(server: Server, gone: str) -> None:
    server.answer = decoded
    require_teacher(taught(server.url), tiny.tokenizer)
    (body,) = server.bodies
    assert body["return_text_in_logprobs"]
    assert len(body["input_ids"]) > 100
    server.answer = partial(decoded, shifted=1)
    with refused("mismatch", "algorithm.teacher.model"):
        require_teacher(taught(server.url), tiny.tokenizer)
    with pytest.raises(RunError):
        require_teacher(taught(gone), tiny.tokenizer)
    require_teacher(taught("/models/teacher"), tiny.tokenizer)


def test_watchdog_waits_for_all_tries_of_the_teacher() -> None:
    config = taught("http://teacher.test")
    config.algorithm.teacher = replace(config.algorithm.teacher, timeout_s=10_000.0, retries=2)
    assert stall_limit_s(config) > 3 * 10_000.0 + 2 * 60.0
