"""Tests of encoder processes: the same vectors as in this process, and workers that hang, die or cannot start."""

import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from rlsys.errors import RunError
from rlsys.search.encoders.encoder import Encoder
from rlsys.search.encoders.process import EncoderPool, EncoderProcess, EncoderWorker
from rlsys.search.encoders.spec import EncoderSpec
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
