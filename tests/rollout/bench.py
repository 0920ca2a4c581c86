"""An engine for tests, a rollout worker on a real SGLang engine, and helpers."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from rlsys.config.schema import RolloutConfig
from rlsys.data.question import Question
from rlsys.rollout.agent.recorder import Generation, TurnSampling
from rlsys.rollout.engine import EngineDriver
from rlsys.rollout.worker import RolloutWorker
from tests.support import tiny
from tests.support.tensors import digest_of, pack
from tests.support.waiting import until

STOP = ("</search>", "</answer>")
QUESTION = Question(uid="q1", prompt=tiny.FIRST.prompt, answers=("Paris",))


@dataclass
class EngineBench:
    """An engine and models that tests share. Each test begins with `bring`, so that it does not depend on others."""

    engine: EngineDriver
    words: PreTrainedTokenizerFast
    first: Qwen2ForCausalLM
    """Model that has learnt `tiny.FIRST`."""
    second: Qwen2ForCausalLM
    """Model that has learnt `tiny.SECOND`."""
    models: dict[int, Qwen2ForCausalLM] = field(init=False, default_factory=dict)
    """Version -> model."""

    def encode(self, text: str) -> list[int]:
        return self.words(text)["input_ids"]

    def new_version(self, model: Qwen2ForCausalLM) -> int:
        version = max(self.models, default=0) + 1
        self.models[version] = model
        return version

    async def bring(self, model: Qwen2ForCausalLM) -> int:
        """Update the engine to `model`; return the new version."""
        version, total = await self.stage(model)
        await self.engine.finish_update(version, total)
        return version

    async def stage(self, model: Qwen2ForCausalLM, *more: tuple[str, torch.Tensor]) -> tuple[int, str]:
        """Send the weights of `model` without switching to them; return the version and the digest."""
        version = self.new_version(model)
        buckets = list(pack([*model.named_parameters(), *more], bucket_bytes=40_000))
        assert len(buckets) > 2
        await self.engine.begin_update(version)
        for bucket in buckets:
            await self.engine.load_bucket(bucket)
        return version, digest_of(buckets)


@dataclass
class Bench(EngineBench):
    """A worker on a real SGLang engine."""

    worker: RolloutWorker
    rollout: RolloutConfig
    search: tiny.Search

    @property
    def sglang(self) -> Any:
        """The running SGLang behind the worker's engine."""
        return self.engine._engine._sglang  # type: ignore[attr-defined]

    async def bring(self, model: Qwen2ForCausalLM) -> int:
        self.search.answering.set()  # A failed test may have left the search server holding its answers back.
        version, total = await self.stage(model)
        await self.worker.finish_update(version, total)
        return version

    async def until_generating(self, requests: int, tokens: int = 50) -> None:
        """Wait until `requests` requests have at least `tokens` tokens each."""
        # An unstreamed request reports its tokens only at its end, so this reads SGLang's own state.
        states = self.sglang._manager.rid_to_state
        await until(lambda: sum(len(state.output_ids) >= tokens for state in states.values()) >= requests)

    def assert_logprobs(self, input_ids: list[int], generation: Generation) -> None:
        """Check each token's log-prob against transformers with the weights of the version that sampled the token."""
        ids = [*input_ids, *generation.token_ids]
        versions = np.array(generation.versions)
        assert len(versions) == len(generation.token_ids) == len(generation.logprobs)
        for version in set(generation.versions):
            reference = logprobs_of(self.models[version], ids)[len(input_ids) - 1 :].numpy()
            of_version = versions == version
            np.testing.assert_allclose(np.array(generation.logprobs)[of_version], reference[of_version], atol=1e-4)


def endless(model: Qwen2ForCausalLM, words: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Return a copy that never ends its text: the end-of-sequence token has the logit 0, which is never the largest."""
    copy = deepcopy(model)
    with torch.no_grad():
        copy.model.embed_tokens.weight[words.eos_token_id] = 0.0
    return copy


def greedy(max_new_tokens: int, stop: tuple[str, ...] = ()) -> TurnSampling:
    return TurnSampling(temperature=0.0, max_new_tokens=max_new_tokens, stop=stop)


def greedy_by_transformers(model: Qwen2ForCausalLM, ids: list[int], tokens: int) -> list[int]:
    """Return at most `tokens` tokens that transformers picks greedily after `ids`."""
    said = model.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False)
    return said[0].tolist()[len(ids) :]


def logprobs_of(model: Qwen2ForCausalLM, ids: Iterable[int], temperature: float = 1.0) -> torch.Tensor:
    """Return the log-prob by transformers of each token after the first [seq - 1]."""
    tokens = torch.tensor([list(ids)])
    with torch.no_grad():
        logits = model(input_ids=tokens).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
