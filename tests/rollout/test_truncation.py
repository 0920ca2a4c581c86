"""What SGLang's log-probs are of when it draws from a part of the vocabulary; `rlsys.report.drift` builds on it."""

from __future__ import annotations

import numpy as np
import pytest

from rlsys.report.drift import log_kept_mass
from rlsys.rollout.agent.episode import TurnSampling
from tests.rollout.bench import Bench, logprobs_of

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(300)]


@pytest.mark.parametrize(("top_p", "top_k"), [(0.6, -1), (1.0, 3), (0.6, 3)])
async def test_logprobs_are_of_the_whole_vocabulary_whatever_is_cut(bench: Bench, top_p: float, top_k: int) -> None:
    await bench.bring(bench.first)
    ids = bench.encode("France is")
    sampling = TurnSampling(temperature=1.7, top_p=top_p, top_k=top_k, max_new_tokens=60)
    generation = await bench.engine.generate(ids, sampling, f"cut-{top_p}-{top_k}")
    whole = logprobs_of(bench.first, [*ids, *generation.token_ids], temperature=1.7)[len(ids) - 1 :]
    np.testing.assert_allclose(generation.logprobs, whole, atol=1e-4)
    low, high = log_kept_mass(np.array(generation.logprobs), top_p, top_k)
    assert (low < high).any(), "something was cut whose share is not known"
