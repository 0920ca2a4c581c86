"""An encoder in a process of its own gives what one here gives, and its death costs one batch."""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
import sys
from collections.abc import Iterator
from subprocess import run

import numpy as np
import psutil
import pytest

from rlsys.errors import RunError, UserError
from rlsys.search.encoders.encoder import Encoder
from rlsys.search.encoders.process import EncoderProcess, EncoderWorker
from rlsys.search.encoders.spec import EncoderSpec
from tests.search.conftest import encoder_workers


@pytest.fixture(scope="module")
def process() -> Iterator[EncoderProcess]:
    started = EncoderProcess(EncoderSpec("minilm", query_prefix="ask: "))
    yield started
    started.close()


def worker() -> psutil.Process:
    """The one that was started last."""
    return max(encoder_workers(), key=lambda child: (child.create_time(), child.pid))


def test_it_is_the_encoder_of_its_spec(process: EncoderProcess) -> None:
    here = Encoder.load("minilm", query_prefix="ask: ")
    assert process.facts == here.facts
    queries = [f"population of {name}" for name in ("Mali", "Chad and Togo", "Peru")]
    np.testing.assert_allclose(process.encode_queries(queries), here.encode_queries(queries), atol=1e-5)
    assert process.encode_queries([]).shape == (0, 384)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_dies_or_hangs_is_replaced(
    process: EncoderProcess, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlsys.search.encoders.process._ANSWER_S", 2.0)
    before = process.encode_queries(["Mali"])
    dead = worker()
    dead.send_signal(number)
    np.testing.assert_allclose(process.encode_queries(["Mali"]), before, atol=1e-6)
    assert worker().pid != dead.pid
    assert dead not in encoder_workers()


def test_a_death_in_the_midst_of_an_answer_is_one_too() -> None:
    started = EncoderWorker(EncoderSpec("minilm"), one_thread=True)
    started.pipe.close()
    started.pipe, there = multiprocessing.Pipe()
    os.write(there.fileno(), struct.pack("!i", 100) + b"a tenth of it")
    there.close()
    with pytest.raises(RunError, match="died"):
        started.take()


def test_ctrl_c_in_a_terminal_leaves_a_worker_to_its_owner() -> None:
    started = EncoderWorker(EncoderSpec("minilm"), one_thread=True)
    worker().send_signal(signal.SIGINT)  # while it still imports
    assert started.take().name == "minilm"
    worker().send_signal(signal.SIGINT)
    started.give(0, ["Mali"], queries=True)
    assert started.take()[1].shape == (1, 384)
    started.close()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_what_cannot_be_loaded_is_refused_as_here_and_leaves_nothing() -> None:
    others = encoder_workers()
    with pytest.raises(UserError, match="run `hf download intfloat/e5-none`"):
        EncoderProcess(EncoderSpec("intfloat/e5-none"))
    assert encoder_workers() == others


def test_a_process_that_only_asks_loads_no_library_of_models() -> None:
    code = (
        "import sys; from rlsys.search.encoders.process import open_encoder; "
        "from rlsys.search.encoders.spec import EncoderSpec; import rlsys.search.server.command; "
        "e = open_encoder(EncoderSpec('minilm'), own_process=True); e.encode_queries(['Mali']); e.close(); "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=os.environ.copy())
    assert done.stdout == "[]\n", done.stderr
