"""An engine of your own: transformers in the worker's process, without a KV cache, one token of each request in turn.

PYTHONPATH=$PWD rlsys train -c searchr1_tiny_cpu rollout.engine=examples.extend.engine.OneByOne rollout.engine.ban='[5]'
"""

from __future__ import annotations

import asyncio
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlsys.config.schema import Device, Dtype
from rlsys.rollout.agent.recorder import Generation, OnTokens, TurnSampling
from rlsys.rollout.interface import EngineCapabilities, EngineSetup, RolloutEngine
from rlsys.weights.bucket import Bucket, checksum, unpack


class OneByOne(RolloutEngine):
    """Samples each token with a forward pass over the whole context, on a CPU and in float32."""

    capabilities = EngineCapabilities(max_tp={Device.cpu: 1}, dtypes=(Dtype.float32,), continues=True)

    def __init__(self, setup: EngineSetup, *, ban: list[int] | None = None) -> None:
        """`ban` lists tokens that are never sampled; it becomes the key rollout.engine.ban."""
        super().__init__(setup)
        self._ban = ban or []
        self._draws = torch.Generator().manual_seed(setup.seed)
        self._running = asyncio.Event()
        self._running.set()
        self._aborts = 0
        self._next, self._version = 0, 0

    async def start(self) -> None:
        """Load the model."""
        path = self.setup.model_path
        self._words = AutoTokenizer.from_pretrained(path)
        self._model = await asyncio.to_thread(AutoModelForCausalLM.from_pretrained, path, dtype=torch.float32)
        self._held = {name: parameter.data for name, parameter in self._model.named_parameters()}

    async def generate(
        self,
        input_ids: list[int],
        sampling: TurnSampling,
        rid: str,  # noqa: ARG002 (names the request in logs)
        on_tokens: OnTokens | None = None,
    ) -> Generation:
        """Sample until a stop string, the end token, or the limit."""
        ids, logprobs, versions, aborts = list[int](), list[float](), list[int](), self._aborts
        finish: Literal["stop", "length", "abort"] | None = None
        while finish is None:
            await asyncio.sleep(0)  # Others sample too, and a cancelled request ends here.
            await self._running.wait()
            if self._aborts != aborts:
                finish = "abort"
                break
            token, logprob = self._sample([*input_ids, *ids], sampling)
            ids, logprobs, versions = [*ids, token], [*logprobs, logprob], [*versions, self._version]
            if on_tokens is not None:
                on_tokens(ids)
            text = self._words.decode(ids)
            if token == self.setup.eos_id or any(stop in text for stop in sampling.stop):
                finish = "stop"
            elif len(ids) == sampling.max_new_tokens:
                finish = "length"
        return Generation(ids, logprobs, finish, cached_tokens=0, versions=versions)

    @torch.inference_mode()
    def _sample(self, context: list[int], sampling: TurnSampling) -> tuple[int, float]:
        logits = self._model(torch.tensor([context]), logits_to_keep=1).logits[0, -1] / (sampling.temperature or 1.0)
        logprobs = torch.log_softmax(logits, dim=-1)
        kept = logprobs.clone()
        kept[self._ban] = -torch.inf
        if sampling.temperature == 0:
            token = int(kept.argmax())
        else:
            token = int(torch.multinomial(kept.exp(), 1, generator=self._draws))
        return token, float(logprobs[token])

    def abort_all(self) -> None:
        """End all requests at their next token."""
        self._aborts += 1

    async def pause(self) -> None:
        """Sample no token until `resume`."""
        self._running.clear()

    async def resume(self) -> None:
        """Sample again."""
        self._running.set()

    async def begin_update(self, version: int) -> None:
        """Remember the version."""
        self._next = version

    async def load_bucket(self, bucket: Bucket) -> None:
        """Copy the tensors; those that the model ties to others are left out."""
        for record, tensor in unpack(bucket):
            if record.name in self._held:
                self._held[record.name].copy_(tensor)

    async def finish_update(self) -> None:
        """Sample under the new version."""
        self._version = self._next

    async def hashes(self) -> list[dict[str, str]]:
        """Hash the tensors as the default `weight_check` does."""
        return [{name: checksum(name, tensor) for name, tensor in self._held.items()}]

    async def sleep(self) -> None:
        """Free nothing: the capabilities say so."""

    async def wake(self) -> None:
        """Allocate nothing."""

    def stop(self) -> None:
        """End nothing: there is no process."""
