"""Tests of encoder processes: the same vectors as in this process, and workers that hang, die or cannot start."""

import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from rlsys.errors import RunError
from rlsys.search.encoders import process as process_module
from rlsys.search.encoders.encoder import Encoder
from rlsys.search.encoders.process import EncoderPool, EncoderProcess, EncoderWorker
from rlsys.search.encoders.spec import EncoderSpec
from rlsys.search.server_process import child_with_pipe
from tests.search.conftest import encoder_workers
from tests.support.refusals import refused

CHUNKS = [(number, [f"passage {number}.{row} " * (1 + row) for row in range(8)]) for number in range(12)]


def newest() -> psutil.Process:
    return max(encoder_workers(), key=lambda child: (child.create_time(), child.pid))


@pytest.mark.slow
def test_a_worker_survives_sigint_and_is_replaced_when_it_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Encoder.load("minilm", query_prefix="ask: ")
    queries = [f"population of {name}" for name in ("Mali", "Chad and Togo", "Peru")]
    expected = here.encode_queries(queries)
    process = EncoderProcess(EncoderSpec("minilm", query_prefix="ask: "))
    try:
        assert process.facts == here.facts
        assert process.encode_queries([]).shape == (0, 384)
        gone, take = newest(), EncoderWorker.take
        gone.send_signal(signal.SIGINT)
        np.testing.assert_allclose(process.encode_queries(queries), expected, atol=1e-5)
        assert newest() == gone
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        gone.suspend()

        def impatient(worker: EncoderWorker, timeout_s: float | None = None) -> Any:
            return take(worker, 0.2 if worker._process.pid == gone.pid else timeout_s)

        monkeypatch.setattr(EncoderWorker, "take", impatient)
        np.testing.assert_allclose(process.encode_queries(queries), expected, atol=1e-5)
        assert gone not in encoder_workers()
        assert newest().pid != gone.pid
    finally:
        process.close()


def test_an_unknown_model_is_refused_and_leaves_no_process() -> None:
    others = encoder_workers()
    with refused("not_found", "intfloat/e5-none"):
        EncoderProcess(EncoderSpec("intfloat/e5-none"))
    assert encoder_workers() == others


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The workers that were started, none of which loads a model; checks that all have ended."""
    started: list[subprocess.Popen[bytes]] = []

    def start(_: str) -> Any:
        child, pipe = child_with_pipe("tests.search.encoder_double")
        started.append(child)
        return child, pipe

    monkeypatch.setattr(process_module, "child_with_pipe", start)
    yield started
    running = [child.pid for child in started if child.poll() is None]
    for child in started:
        child.kill()
    assert running == []


def test_a_worker_that_dies_or_hangs_is_replaced_and_its_error_names_it(
    started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = EncoderProcess(EncoderSpec("double"))
    try:
        started[0].kill()
        assert process.encode_queries(["a", "two"]).tolist() == [[1], [3]]
        assert len(started) == 2
        with pytest.raises(RunError) as caught:
            process.encode_queries(["die"])
        assert f" {started[2].pid} " in str(caught.value)
        assert process.encode_queries(["again"]).tolist() == [[5]]
        monkeypatch.setattr(process_module, "_ANSWER_S", 0.1)  # ends the new worker too if it is merely slow
        with pytest.raises(RunError) as caught:
            process.encode_queries(["hang"])
        assert f" {started[4].pid} " in str(caught.value)
        assert len(started) == 5
    finally:
        process.close()
    with pytest.raises(RunError) as caught:
        EncoderProcess(EncoderSpec("die"))
    assert f" {started[5].pid} " in str(caught.value)
    assert len(started) == 6


def test_the_death_of_one_of_two_workers_ends_the_work_and_names_it(started: list[subprocess.Popen[bytes]]) -> None:
    with EncoderPool(EncoderSpec("double"), 2) as pool:
        found = dict(pool.map((number, ["x" * number]) for number in range(6)))
        assert {number: vectors.tolist() for number, vectors in found.items()} == {n: [[n]] for n in range(6)}
        with pytest.raises(RunError) as caught:
            list(pool.map([(0, ["a"]), (1, ["die"]), (2, ["b"])]))
    assert f" {started[1].pid} " in str(caught.value)
    assert len(started) == 2


@pytest.mark.slow
def test_two_processes_give_the_same_vectors_and_a_killed_one_ends_the_work() -> None:
    taken = 0

    def counted() -> Iterator[tuple[int, list[str]]]:
        nonlocal taken
        for chunk in CHUNKS:
            taken += 1
            yield chunk

    alone, before = Encoder.load("minilm", passage_prefix="note: "), encoder_workers()
    with EncoderPool(EncoderSpec("minilm", passage_prefix="note: "), 2) as pool:
        first, second = encoder_workers() - before
        found = {}
        for given, (number, vectors) in enumerate(pool.map(counted())):
            assert taken <= given + 1 + 2, "more chunks are taken than workers can hold"
            found[number] = vectors
        assert sorted(found) == list(range(12))
        for number, texts in CHUNKS:
            np.testing.assert_allclose(found[number], alone.encode_passages(texts), atol=1e-5)
        results = pool.map((number, ["word"]) for number in range(100_000))
        next(results)
        first.kill()
        with pytest.raises(RunError, match=str(first.pid)):
            list(results)
        assert second.is_running()
    assert not second.is_running()
