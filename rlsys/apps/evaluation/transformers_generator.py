"""Generates with plain transformers: the independent check of what the engine answers.

Requests that wait at the same time are decoded together, padded on the left; the caller sees one request at a time. What
is drawn for a request depends on its id and the seed, not on the company it has. Slower than the engine by design: it
shares no code with it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlsys.config.schema import Device, Dtype
from rlsys.errors import UserError
from rlsys.rollout.agent.episode import Generation, Heard, TurnSampling

GATHER_S = 0.02  # How long a batch waits for further requests


@dataclass(slots=True)
class _Request:
    input_ids: list[int]
    sampling: TurnSampling
    draws: torch.Generator
    heard: Heard | None
    loop: asyncio.AbstractEventLoop  # That `heard` is called in
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Literal["", "stop", "length", "abort"] = ""


class TransformersGenerator:
    """Decodes with a Hugging Face model. Raises `UserError` for a folder that does not hold one whole."""

    def __init__(self, model_path: str, dtype: Dtype, device: Device, max_batch: int, seed: int = 0) -> None:
        self._device = torch.device("cuda" if device is Device.gpu else "cpu")
        self._tokenizer, model = _loaded(model_path, getattr(torch, dtype))
        self._model = model.to(self._device).eval()
        self._ends = _end_tokens(self._tokenizer, model)
        self._max_batch = max_batch
        self._seed = seed
        self._waiting: list[_Request] = []
        self._turn = asyncio.Lock()

    async def generate(
        self, input_ids: list[int], sampling: TurnSampling, rid: str, heard: Heard | None = None
    ) -> Generation:
        """Continue `input_ids`; `heard` follows it token by token; after a cancellation no more is decoded for it.

        Raises ValueError where less than the whole vocabulary is to be drawn from.
        """
        if sampling.top_p != 1 or sampling.top_k != -1:
            raise ValueError(
                f"{rid}: top_p={sampling.top_p} and top_k={sampling.top_k} cut the vocabulary, this generator draws from it all"
            )
        request = _Request(input_ids, sampling, self._draws(rid), heard, asyncio.get_running_loop())
        self._waiting.append(request)
        try:
            async with self._turn:  # whoever's turn it is decodes for all that wait, itself first
                if not request.finish:
                    await asyncio.sleep(GATHER_S)
                    await self._decode_batch(request)
        finally:
            request.finish = request.finish or "abort"
        versions = [0] * len(request.token_ids)
        return Generation(request.token_ids, request.logprobs, request.finish, cached_tokens=0, versions=versions)

    async def _decode_batch(self, own: _Request) -> None:
        """Decode for those that wait, `own` among them. A cancelled caller leaves when the others have theirs."""
        batch = [one for one in self._waiting if not one.finish][: self._max_batch]
        work = asyncio.ensure_future(asyncio.to_thread(self._decode, batch))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            own.finish = own.finish or "abort"
            await work
            raise
        finally:
            self._waiting = [one for one in self._waiting if not one.finish]

    @torch.inference_mode()
    def _decode(self, batch: Sequence[_Request]) -> None:
        """Append tokens to every request until each is finished."""
        tokens, mask = self._left_padded([request.input_ids for request in batch])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        temperatures = torch.tensor([[request.sampling.temperature or 1.0] for request in batch], device=self._device)
        cache = None
        while not all(request.finish for request in batch):
            output = self._model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = output.past_key_values
            logprobs = torch.log_softmax(output.logits[:, -1].float() / temperatures, dim=-1)
            chosen = _choose(logprobs, batch)
            taken = logprobs.gather(1, chosen)[:, 0].tolist()
            for request, token, logprob in zip(batch, chosen[:, 0].tolist(), taken, strict=True):
                self._extend(request, token, logprob)
            tokens = chosen
            mask = torch.cat([mask, mask.new_ones(len(batch), 1)], dim=1)
            positions = positions[:, -1:] + 1

    def _draws(self, rid: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self._seed}:{rid}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7]))

    def _left_padded(self, rows: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(len(row) for row in rows)
        tokens = torch.zeros(len(rows), width, dtype=torch.long, device=self._device)
        mask = torch.zeros_like(tokens)
        for index, row in enumerate(rows):
            tokens[index, width - len(row) :] = torch.tensor(row)
            mask[index, width - len(row) :] = 1
        return tokens, mask

    def _extend(self, request: _Request, token: int, logprob: float) -> None:
        if request.finish:
            return
        request.token_ids.append(token)
        request.logprobs.append(logprob)
        if request.heard is not None:
            request.loop.call_soon_threadsafe(request.heard, list(request.token_ids))
        text = self._tokenizer.decode(request.token_ids)
        if token in self._ends or any(stop in text for stop in request.sampling.stop):
            request.finish = "stop"
        elif len(request.token_ids) >= request.sampling.max_new_tokens:
            request.finish = "length"


def _loaded(model_path: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Tokenizer and model. Weights that the files lack are refused: transformers would draw them at random."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        model, info = AutoModelForCausalLM.from_pretrained(
            model_path,
            dtype=dtype,
            output_loading_info=True,
            # Refused below, in a sentence that says which.
            ignore_mismatched_sizes=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as problem:
        reason = (str(problem).splitlines() or [type(problem).__name__])[0].rstrip(".")
        raise UserError(f"model.path={model_path} cannot be loaded: {reason}; give a whole model folder.") from problem
    lacking = {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}
    if lacking:
        raise UserError(
            f"model.path={model_path} lacks {len(lacking)} weights of the model that its config.json names, {min(lacking)} among "
            "them: give a whole model folder."
        )
    return tokenizer, model


def _choose(logprobs: torch.Tensor, batch: Sequence[_Request]) -> torch.Tensor:
    """[batch, 1] the next token of each request: the likeliest, or one drawn where it has a temperature."""
    chosen = logprobs.argmax(dim=-1, keepdim=True)
    for row, request in enumerate(batch):
        if request.sampling.temperature:
            chosen[row] = torch.multinomial(logprobs[row].exp().cpu(), 1, generator=request.draws)
    return chosen


def _end_tokens(tokenizer: Any, model: Any) -> frozenset[int]:
    """Every token that ends a turn: the tokenizer's, and those of both configs, which may be several (as in SGLang)."""
    found = (tokenizer.eos_token_id, model.config.eos_token_id, model.generation_config.eos_token_id)
    listed = [one if isinstance(one, list) else [one] for one in found]
    return frozenset(token for tokens in listed for token in tokens if token is not None)
