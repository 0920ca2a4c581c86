"""Tests that a real SGLang answers the requests of a teacher's client as the client reads them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest

from rlsys.config.algorithm import TeacherConfig
from rlsys.orchestrator.teacher import TeacherServer
from tests.rollout.bench import Bench, logprobs_of
from tests.support import tiny
from tests.support.trajectories import sample

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="package")]


async def test_log_probs_of_the_input_are_those_of_transformers(bench: Bench) -> None:
    """The second request finds the beginning of the first in the prefix cache; the requests differ in their start."""
    await bench.bring(bench.first)
    from sglang.srt.managers.io_struct import GenerateReqInput

    async def answer(request: httpx.Request) -> httpx.Response:
        """Do what SGLang's server does with the body of a request for /generate."""
        asked: Any = GenerateReqInput(**json.loads(request.content))
        output = await anext(bench.sglang.engine.tokenizer_manager.generate_request(asked, None))
        return httpx.Response(200, stream=httpx.ByteStream(json.dumps(output, default=str).encode()))

    tokens = bench.encode(tiny.FIRST.text)
    places = np.arange(len(tokens))
    masks = (places >= 8) & (places % 3 > 0), (places >= len(tokens) - 9) & (places < len(tokens) - 2)
    teacher = TeacherServer(TeacherConfig("http://teacher.test", retries=0), httpx.MockTransport(answer))
    found = [(await teacher.compute([sample(tokens, mask.tolist())]))[0] for mask in masks]
    await teacher.close()
    expected = np.append(0.0, logprobs_of(bench.first, tokens))
    for mask, logprobs in zip(masks, found, strict=True):
        np.testing.assert_allclose(logprobs, expected * mask, atol=1e-4)
        assert np.ptp(logprobs[mask]) > 1e-3
