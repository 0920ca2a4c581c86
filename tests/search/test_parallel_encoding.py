"""Several processes give what one gives; their ends are noticed, and they end with the pool."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
import torch

from rlsys.errors import RunError, UserError
from rlsys.search.encoders.encoder import Encoder
from rlsys.search.encoders.process import EncoderPool
from rlsys.search.encoders.spec import EncoderSpec
from tests.search.conftest import encoder_workers

CHUNKS = [(number, [f"passage {number}.{row} " * (1 + row) for row in range(8)]) for number in range(12)]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pool() -> Iterator[EncoderPool]:
    with EncoderPool(EncoderSpec("minilm", passage_prefix="note: "), 2) as pool:
        yield pool


def worker_pids() -> set[int]:
    return {child.pid for child in encoder_workers()}


def test_two_processes_give_what_one_gives_bit_by_bit(pool: EncoderPool) -> None:
    alone = Encoder.load("minilm", passage_prefix="note: ")
    for pid in worker_pids():
        os.kill(pid, signal.SIGINT)
    found = dict(pool.map(CHUNKS))
    assert sorted(found) == list(range(12))
    for number, texts in CHUNKS:
        np.testing.assert_array_equal(found[number], alone.encode_passages(texts))
    assert list(pool.map([])) == []


def test_no_more_chunks_are_taken_than_workers_can_hold(pool: EncoderPool) -> None:
    taken = 0

    def chunks() -> Iterator[tuple[int, list[str]]]:
        nonlocal taken
        for chunk in CHUNKS:
            taken += 1
            yield chunk

    for given, _ in enumerate(pool.map(chunks())):
        assert taken <= given + 1 + 2
    assert taken == 12


def test_one_worker_is_this_process() -> None:
    before = worker_pids()
    with EncoderPool(EncoderSpec("minilm"), 1) as pool:
        assert [number for number, _ in pool.map(CHUNKS[:3])] == [0, 1, 2]
        assert worker_pids() == before


def test_a_killed_worker_ends_the_work_and_the_rest_ends_with_the_pool() -> None:
    before = worker_pids()
    with EncoderPool(EncoderSpec("minilm"), 2) as pool:
        first, second = worker_pids() - before
        results = pool.map((number, ["word"]) for number in range(100_000))
        next(results)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(RunError, match=rf"encoding worker {first} died \(exit code -9\)"):
            list(results)
        assert psutil.pid_exists(second)
    assert not psutil.pid_exists(second)


def test_mistakes_are_the_users_from_any_process() -> None:
    before = worker_pids()
    with (
        pytest.raises(UserError, match="hf download intfloat/e5-none"),
        EncoderPool(EncoderSpec("intfloat/e5-none"), 2),
    ):
        pass
    assert worker_pids() == before
    with pytest.raises(UserError, match="workers 0 is out of range: give 1 or more"):
        EncoderPool(EncoderSpec("minilm"), 0)


def test_gpus_are_dealt_out_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    dealt = EncoderPool(EncoderSpec("minilm", device="cuda"), 3).devices
    assert dealt == ["cuda:0", "cuda:1", "cuda:0"]
    assert EncoderPool(EncoderSpec("minilm"), 2).devices == ["cpu", "cpu"]
