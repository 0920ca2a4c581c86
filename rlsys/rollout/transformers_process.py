"""The child process of `TransformersEngine`: decodes requests with a Hugging Face model.

Requests are batched continuously: a new request is prefilled at once and joins the batch, and a finished one leaves it.
Rows of a batch are padded on the left. Weights are loaded between two tokens; requests in flight then keep their tokens
and their KV cache is computed anew.

Stopping and log-probs are SGLang's: a stop string or an end token ends a request and stays in its tokens; log-probs are
over the whole vocabulary at the temperature, and at temperature 0, which is greedy, at temperature 1. top_k and top_p cut
the same distribution. A stop string is found however its text is split into tokens, whereas SGLang looks only as many
tokens back as its usual split has.
"""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils.logging import disable_progress_bar

from rlsys.components import one_line
from rlsys.data.trajectory import Routes, routes_type
from rlsys.errors import UserError, first_line
from rlsys.rollout.agent.recorder import Generation, TurnSampling
from rlsys.weights.bucket import Bucket, ChecksumError, TensorRecord, checksum, unpack
from rlsys.weights.hf_io import by_expert, with_attention_scale

Message = tuple[str, str, Any]
"""Kind (answer, error, tokens or beat), key of the call or request, and content."""


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Model and settings of a decoder."""

    model_path: str
    dtype: str
    device: str
    max_batch: int
    """Maximum number of requests decoded at the same time."""
    seed: int
    eos_id: int
    """Token that ends a request, besides those that the model's files name."""
    frees_memory: bool
    """True if a sleeping decoder keeps nothing on its device."""
    routed_layers: int = 0
    """Layers with experts, which all are returned with a request that asks for them; 0 if none will."""


@dataclass(slots=True)
class _Request:
    rid: str
    input_ids: list[int]
    sampling: TurnSampling
    streams: bool
    draws: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: list[Routes] = field(default_factory=list)
    """Routes of all tokens that the model has read, in parts."""
    finish: str = ""

    @property
    def context(self) -> list[int]:
        return self.input_ids + self.token_ids

    def generation(self) -> Generation:
        first = self.sampling.routes_from
        routes = None if first is None or not self.routes else np.concatenate(self.routes)[first:]
        return Generation(self.token_ids, self.logprobs, self.finish, 0, self.versions, routes)  # type: ignore[arg-type]


class Decoder:
    """Decodes requests with the model of `spec`. Raises UserError for a folder without a complete model."""

    def __init__(self, spec: DecoderSpec) -> None:
        self._spec = spec
        self._device = torch.device(spec.device)
        self._tokenizer, model = load_model(spec.model_path, getattr(torch, spec.dtype))
        self._model = model.to(self._device).eval()
        self._ends = end_tokens(self._tokenizer, model) | {spec.eos_id}
        self._waiting: list[_Request] = []
        self._batch: list[_Request] = []
        self._cache = DynamicCache()
        """Keys and values of all tokens of `_batch` but the last of each row, padded on the left."""
        self._lengths: list[int] = []
        """Tokens of each row in `_cache`."""
        self.version = 0
        """Version of the weights; not valid between `load` and `set_version`."""
        self._chosen: list[Tensor] = []
        """Experts [tokens, k] that each layer chose in the last pass."""
        self._watch_routers()

    @property
    def has_work(self) -> bool:
        """True if a request is waiting or running."""
        return bool(self._waiting or self._batch)

    def add(self, rid: str, input_ids: list[int], sampling: TurnSampling, streams: bool) -> None:
        """Queue a request. Its draws depend on the seed, the weights' version, and `rid` up to the last ~."""
        name = rid.rpartition("~")[0] or rid
        digest = hashlib.sha256(f"{self._spec.seed}:{self.version}:{name}".encode()).digest()
        draws = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
        self._waiting.append(_Request(rid, input_ids, sampling, streams, draws))

    def abort(self, rid: str | None) -> list[tuple[str, Generation]]:
        """Remove the request, or all requests for None; return their ids and tokens so far."""
        gone = [one for one in [*self._batch, *self._waiting] if rid in (None, one.rid)]
        for request in gone:
            request.finish = "abort"
        self._drop_finished()
        return [(one.rid, one.generation()) for one in gone]

    def drop_cache(self) -> None:
        """Forget keys and values; requests in flight are prefilled again, before those that wait."""
        self._waiting = [*self._batch, *self._waiting]
        self._batch, self._lengths, self._cache = [], [], DynamicCache()

    @torch.inference_mode()
    def step(self) -> list[Message]:
        """Sample one token: of each request that can join the batch, or else of each in the batch."""
        joining = self._waiting[: self._spec.max_batch - len(self._batch)]
        if joining:
            rows, lengths = joining, [len(one.context) for one in joining]
            for one in joining:
                one.routes = []
            logits, cache = self._forward([one.context for one in joining], lengths, DynamicCache())
            self._cache, self._lengths = _joined(self._cache, cache), self._lengths + lengths
            self._batch += joining
            del self._waiting[: len(joining)]  # Not earlier: after a failure, `abort` must still find them.
        else:
            rows = self._batch
            self._lengths = [length + 1 for length in self._lengths]
            logits, self._cache = self._forward([[one.token_ids[-1]] for one in rows], self._lengths, self._cache)
        self._add_routes(rows)
        tokens, logprobs = draw(logits, rows)
        told: list[Message] = []
        for request, token, logprob in zip(rows, tokens, logprobs, strict=True):
            self._extend(request, token, logprob)
            if request.streams:
                told.append(("tokens", request.rid, list(request.token_ids)))
            if request.finish:
                told.append(("answer", request.rid, request.generation()))
        self._drop_finished()
        return told

    def load(self, bucket: Bucket) -> None:
        """Copy the tensors of a bucket into the model. Raises ChecksumError or LookupError naming a tensor."""
        held, tied = dict(self.tensors()), self._model.config.tie_word_embeddings
        for record, tensor in unpack(bucket):
            if tied and record.name == "lm_head.weight":
                continue
            if record.name not in held or held[record.name].shape != tensor.shape:
                raise LookupError(f"the model has no tensor {record.name} of shape {list(tensor.shape)}")
            held[record.name].copy_(tensor)

    def hashes(self) -> dict[str, str]:
        """Return the checksum of each tensor, by name."""
        return {name: checksum(name, tensor.cpu()) for name, tensor in self.tensors()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's tensors by their names in a checkpoint; transformers fuses the experts of a layer."""
        return by_expert({name: parameter.data for name, parameter in self._model.named_parameters()})

    def sleep(self) -> None:
        """Drop the cache; with `frees_memory`, move the model to host memory."""
        self.drop_cache()
        if self._spec.frees_memory:
            self._model.to("cpu")
            gc.collect()
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Move the model to its device."""
        self._model.to(self._device)

    def _forward(
        self, new: Sequence[list[int]], lengths: Sequence[int], cache: DynamicCache
    ) -> tuple[Tensor, DynamicCache]:
        """Return float32 logits [rows, vocabulary] after the `new` tokens of each row, and the extended cache.

        `lengths` counts the tokens of each row, new ones included.
        """
        width, longest = max(map(len, new)), max(lengths)
        tokens = torch.zeros(len(new), width, dtype=torch.long)
        mask = torch.zeros(len(new), longest, dtype=torch.long)
        for row, (ids, length) in enumerate(zip(new, lengths, strict=True)):
            tokens[row, width - len(ids) :] = torch.tensor(ids)
            mask[row, longest - length :] = 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -width:]
        self._chosen.clear()  # Of a pass that failed.
        output = self._model(
            tokens.to(self._device),
            attention_mask=mask.to(self._device),
            position_ids=positions.to(self._device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float(), output.past_key_values

    def _watch_routers(self) -> None:
        """Keep what the routers choose. Raises UserError if not every layer has one."""
        layers = self._spec.routed_layers
        routers = [one for one in self._model.modules() if type(one).__name__.endswith("TopKRouter")] if layers else []
        if len(routers) != layers:
            raise UserError(
                f"algorithm.router_replay=r3 needs a model whose {layers} layers all choose experts in a TopKRouter of "
                f"transformers, and {self._spec.model_path} has {len(routers)}: set it to none.",
                code="unsupported",
                key="algorithm.router_replay",
            )
        for router in routers:  # It returns logits, weights and numbers of experts.
            router.register_forward_hook(lambda _router, _inputs, found: self._chosen.append(found[-1]))

    def _add_routes(self, requests: Sequence[_Request]) -> None:
        """Give each request the routes of its tokens of the last pass, in which rows are padded on the left."""
        if not self._chosen:
            return
        experts = self._model.config.num_experts
        chosen = torch.stack(self._chosen, dim=1).cpu().numpy().astype(routes_type(experts))
        for request, found in zip(requests, np.split(chosen, len(requests)), strict=True):
            request.routes.append(found[-1:] if request.routes else found[-len(request.context) :])

    def _extend(self, request: _Request, token: int, logprob: float) -> None:
        request.token_ids.append(token)
        request.logprobs.append(logprob)
        request.versions.append(self.version)
        # Each token adds at least one byte to the text, unless it is a special one, which ends or follows a stop string.
        reach = max((len(stop.encode()) for stop in request.sampling.stop), default=0) + 1
        tail = self._tokenizer.decode(request.token_ids[-reach:]) if request.sampling.stop else ""
        if any(stop in tail for stop in request.sampling.stop) or token in self._ends:
            request.finish = "stop"
        elif len(request.token_ids) >= request.sampling.max_new_tokens:
            request.finish = "length"

    def _drop_finished(self) -> None:
        self._waiting = [one for one in self._waiting if not one.finish]
        left = [row for row, one in enumerate(self._batch) if not one.finish]
        if len(left) == len(self._batch):
            return
        self._batch = [self._batch[row] for row in left]
        self._lengths = [self._lengths[row] for row in left]
        if not left:
            self._cache = DynamicCache()
            return
        width = max(self._lengths)
        for layer in self._cache.layers:
            rows = torch.tensor(left, device=layer.keys.device)
            layer.keys = layer.keys[rows, :, -width:].contiguous()
            layer.values = layer.values[rows, :, -width:].contiguous()


def _joined(first: DynamicCache, second: DynamicCache) -> DynamicCache:
    """Return a cache with the rows of both, padded on the left to the same width."""
    if not first.layers:
        return second
    for old, new in zip(first.layers, second.layers, strict=True):
        width = max(old.keys.shape[2], new.keys.shape[2])
        old.keys = torch.cat([_widened(old.keys, width), _widened(new.keys, width)])
        old.values = torch.cat([_widened(old.values, width), _widened(new.values, width)])
    return first


def _widened(states: Tensor, width: int) -> Tensor:
    """Return `states` [rows, heads, tokens, dimension] with zeros on the left up to `width` tokens."""
    return torch.nn.functional.pad(states, (0, 0, width - states.shape[2], 0))


def draw(logits: Tensor, requests: Sequence[Any]) -> tuple[list[int], list[float]]:
    """Return the next token of each request and its log-prob; `logits` are [requests, vocabulary] float32.

    A request has `sampling`, and `draws`, the generator of its random numbers.
    """
    temperatures = [one.sampling.temperature or 1.0 for one in requests]
    logprobs = torch.log_softmax(logits / logits.new_tensor(temperatures)[:, None], dim=-1)
    chosen = logprobs.argmax(dim=-1)
    sampled = [row for row, one in enumerate(requests) if one.sampling.temperature]
    if sampled:
        numbers = [float(torch.rand((), generator=requests[row].draws, dtype=torch.float64)) for row in sampled]
        kept = _truncated(logprobs[sampled].exp().double(), [requests[row].sampling for row in sampled])
        sums = kept.cumsum(-1)
        aimed = sums[:, -1:] * sums.new_tensor(numbers)[:, None]
        # The second term is the last token with a probability: rounding must not go past it.
        chosen[sampled] = torch.minimum((sums <= aimed).sum(-1), (sums < sums[:, -1:]).sum(-1))
    return chosen.tolist(), logprobs.gather(1, chosen[:, None])[:, 0].tolist()


def _truncated(probs: Tensor, sampling: Sequence[TurnSampling]) -> Tensor:
    """Return `probs` [rows, vocabulary] with 0 for the tokens outside of top_k, and of top_p of the whole distribution."""
    if all(one.top_p == 1 and one.top_k == -1 for one in sampling):
        return probs
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(probs.shape[-1], device=probs.device)
    counts = torch.tensor([one.top_k if one.top_k > 0 else probs.shape[-1] for one in sampling], device=probs.device)
    masses = probs.new_tensor([one.top_p for one in sampling])
    out = (ranks >= counts[:, None]) | (ordered.cumsum(-1) - ordered > masses[:, None])
    return torch.zeros_like(probs).scatter(-1, order, ordered.masked_fill(out, 0.0))


def end_tokens(tokenizer: Any, model: Any) -> frozenset[int]:
    """Return the tokens that end a turn: the end tokens of the tokenizer and of both configs, as in SGLang."""
    known = (tokenizer.eos_token_id, model.config.eos_token_id, model.generation_config.eos_token_id)
    listed = [ends if isinstance(ends, list) else [ends] for ends in known]
    return frozenset(token for ends in listed for token in ends if token is not None)


def load_model(model_path: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Load tokenizer and model. Raises UserError for missing weights, which transformers would initialise at random."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        # Mismatched sizes are reported below, with the names of the weights.
        options = {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
        model, info = AutoModelForCausalLM.from_pretrained(model_path, **options)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as problem:
        raise UserError(
            f"model.path={model_path} cannot be loaded: {first_line(problem)}; give a complete model folder.",
            code="malformed",
            key="model.path",
        ) from problem
    lacking = {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}
    if lacking:
        raise UserError(
            f"model.path={model_path} lacks {len(lacking)} of the weights that its config.json describes, or has "
            f"them in another shape, such as {min(lacking)}: give a complete model folder.",
            code="mismatch",
            key="model.path",
        )
    return tokenizer, with_attention_scale(model)


class Server:
    """Answers the calls of `TransformersEngine`, and decodes between them."""

    def __init__(self, decoder: Decoder, pipe: Connection, inbox: SimpleQueue[Any]) -> None:
        self._decoder = decoder
        self._pipe = pipe
        self._inbox = inbox
        self._paused = False

    def run(self) -> None:
        """Answer calls and decode, until the process is ended."""
        self._pipe.send(("answer", "ready", None))
        while True:
            works = self._decoder.has_work and not self._paused
            while (message := self._next(wait=not works)) is not None:
                self._answer(*message)
                works = self._decoder.has_work and not self._paused
            try:
                told = [*self._decoder.step(), ("beat", "", None)]
            except Exception as error:  # noqa: BLE001 (such as a lack of memory; the requests raise it)
                told = [("error", rid, one_line(error)) for rid, _ in self._decoder.abort(None)]
            for each in told:
                self._pipe.send(each)

    def _next(self, wait: bool) -> Any:
        try:
            return self._inbox.get(block=wait)
        except Empty:
            return None

    def _answer(self, call: str, key: str, *arguments: Any) -> None:
        if call == "generate":
            self._decoder.add(key, *arguments)
        elif call in ("abort", "abort_all"):
            for rid, generation in self._decoder.abort(key or None):
                self._pipe.send(("answer", rid, generation))
        else:
            try:
                self._pipe.send(("answer", key, self._called(call, *arguments)))
            except (ChecksumError, LookupError, torch.OutOfMemoryError) as error:
                self._pipe.send(("error", key, str(error).strip("'\"")))

    def _called(self, call: str, *arguments: Any) -> Any:
        match call:
            case "pause" | "resume":
                self._paused = call == "pause"
            case "begin_update":
                self._decoder.drop_cache()
            case "load_bucket":
                self._decoder.load(*arguments)
            case "finish_update":
                (self._decoder.version,) = arguments
            case "hashes":
                return self._decoder.hashes()
            case "sleep":
                self._decoder.sleep()
            case "wake":
                self._decoder.wake()
            case _:
                raise ValueError(call)
        return None


def _receive(pipe: Connection, inbox: SimpleQueue[Any]) -> None:
    """Put the parent's calls into `inbox`; end this process when the parent has ended. Runs in a thread."""
    try:
        while True:
            call, key, *arguments = pipe.recv()
            if call == "load_bucket":
                records, on_device = arguments
                arguments = [_bucket(records, on_device, pipe.recv_bytes())]
            inbox.put((call, key, *arguments))
    except (EOFError, OSError):
        os._exit(0)


def _bucket(records: tuple[TensorRecord, ...], on_device: bool, data: bytes) -> Bucket:
    """Return the bucket of these bytes; the checksums of a bucket that was on a device are those of a tensor."""
    array = np.frombuffer(bytearray(data), np.uint8)
    return Bucket(torch.from_numpy(array) if on_device else array, records)


def main(descriptor: int, kind: type[Decoder] = Decoder) -> None:
    """Run the child process on the pipe `descriptor`, with a decoder of `kind`. On SIGUSR1, it writes the stacks of its
    threads to stderr."""
    faulthandler.register(signal.SIGUSR1, file=2)
    disable_progress_bar()
    pipe, inbox = Connection(descriptor), SimpleQueue[Any]()
    spec: DecoderSpec = pipe.recv()
    threading.Thread(target=_receive, args=(pipe, inbox), daemon=True).start()
    try:
        decoder = kind(spec)
    except Exception as error:  # noqa: BLE001 (raised by `start` in the parent)
        pipe.send(("error", "ready", error if isinstance(error, UserError) else one_line(error)))
        return
    Server(decoder, pipe, inbox).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
