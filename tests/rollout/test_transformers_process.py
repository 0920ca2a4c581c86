"""Tests of the decoder of the transformers engine, in this process: model folders, ends, draws."""

from __future__ import annotations

import json
import shutil
from multiprocessing import Pipe
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlsys.rollout.agent.recorder import Generation, TurnSampling
from rlsys.rollout.transformers_process import Decoder, DecoderSpec, Server
from tests.rollout.bench import greedy
from tests.support.refusals import refused
from tests.support.tensors import pack
from tests.support.tiny_models import LAYERS, POLICY, tiny_model


def decoder_of(folder: Path, batch: int = 8, seed: int = 0) -> Decoder:
    return Decoder(DecoderSpec(str(folder), "float32", "cpu", batch, seed, eos_id=-1, frees_memory=False))


def decoded(decoder: Decoder, *requests: tuple[str, list[int], TurnSampling]) -> dict[str, Generation]:
    """Return the result of each request by its id."""
    found = {}
    for rid, ids, sampling in requests:
        decoder.add(rid, ids, sampling, streams=False)
    while decoder.has_work:
        found |= {rid: generation for kind, rid, generation in decoder.step() if kind == "answer"}
    return found


def test_missing_misshaped_and_truncated_weights_are_refused(tmp_path: Path) -> None:
    """Transformers would initialise them at random."""
    folder, name = shutil.copytree(POLICY, tmp_path / "model"), "model.norm.weight"
    weights = load_file(folder / "model.safetensors")
    norm = weights.pop(name)
    for changed in (weights, weights | {name: norm[:5].contiguous()}):
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        with refused("mismatch", "model.path") as caught:
            decoder_of(folder)
        assert name in str(caught.value)
    for file in ("model.safetensors", "tokenizer.json", "config.json"):
        (folder / file).write_bytes((folder / file).read_bytes()[:100])
        with refused("malformed", "model.path"):
            decoder_of(folder)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_end_tokens_of_both_configs_end_a_request(file: str, tmp_path: Path) -> None:
    """Chat models have several end tokens."""
    ids = [11, 12, 13]
    said = decoded(decoder_of(POLICY), ("r", ids, greedy(24)))["r"].token_ids
    end = next(token for token in said[2:] if token not in said[:2])
    folder = shutil.copytree(POLICY, tmp_path / "model")
    config = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(config | {"eos_token_id": [0, end]}))
    got = decoded(decoder_of(folder), ("r", ids, greedy(24)))["r"]
    assert (got.token_ids, got.finish) == (said[: said.index(end) + 1], "stop")


def test_stop_string_is_found_in_an_unusual_split() -> None:
    """The letters of a stop string come one by one, whereas the tokenizer has longer tokens for them."""
    decoder = decoder_of(POLICY)
    words = decoder._tokenizer
    letters = [words(letter)["input_ids"][0] for letter in "</search>"]
    assert words.decode(letters) == "</search>"
    assert len(letters) > len(words("</search>")["input_ids"])
    decoder.add("r", [1, 2], greedy(20, ("</search>",)), streams=False)
    (request,) = decoder._waiting
    for letter in letters:
        assert request.finish == ""
        decoder._extend(request, letter, -0.1)
    assert request.finish == "stop"


def test_a_sample_depends_on_seed_version_and_request_but_not_on_the_batch() -> None:
    requests = [
        (f"{number}~{number}", [number + 5] * (number + 1), TurnSampling(1.5, max_new_tokens=9)) for number in range(5)
    ]

    def said(batch: int, seed: int = 0, version: int = 0) -> list[list[int]]:
        decoder = decoder_of(POLICY, batch, seed)
        decoder.version = version
        return [one.token_ids for _, one in sorted(decoded(decoder, *requests).items())]

    alone = said(batch=1)
    assert said(batch=2) == said(batch=8) == alone
    assert said(8, seed=1) != alone
    assert said(8, version=1) != alone


def test_experts_are_those_of_one_pass_over_all_tokens(tmp_path: Path) -> None:
    """Requests join and leave a batch of two, and all are prefilled again in between."""
    folder = tiny_model("qwen3_moe", tmp_path)
    spec = DecoderSpec(str(folder), "float32", "cpu", 2, 0, eos_id=-1, frees_memory=False, routed_layers=LAYERS)
    decoder, found = Decoder(spec), dict[str, Generation]()
    inputs = {"one": list(range(10, 30)), "two": [7, 8, 9], "three": list(range(40, 51))}
    for number, (rid, ids) in enumerate(inputs.items()):
        decoder.add(rid, ids, TurnSampling(1.0, max_new_tokens=4 + number, routes_from=number), streams=False)
    decoder.add("plain", [3, 4], greedy(2), streams=False)
    for step in range(100):
        if step == 4:
            decoder.drop_cache()
        found |= {rid: each for kind, rid, each in decoder.step() if kind == "answer"} if decoder.has_work else {}
    assert found.pop("plain").routes is None
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for number, (rid, ids) in enumerate(inputs.items()):
        read = torch.tensor([[*ids, *found[rid].token_ids[:-1]]])
        with torch.no_grad():
            logits = model(read, output_router_logits=True).router_logits
        expected = torch.stack([layer.topk(2).indices for layer in logits], dim=1)[number:]
        routes = found[rid].routes
        assert routes is not None
        assert routes.dtype == np.uint8
        assert np.array_equal(np.sort(routes), np.sort(expected.numpy()))


def test_model_without_experts_is_refused_where_they_are_needed() -> None:
    spec = DecoderSpec(str(POLICY), "float32", "cpu", 2, 0, eos_id=-1, frees_memory=False, routed_layers=LAYERS)
    with refused("unsupported", "algorithm.router_replay"):
        Decoder(spec)


def test_prefill_without_memory_fails_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request runs, one joins when the memory runs out, and one waits: the batch holds two."""
    decoder, inbox, (here, there) = decoder_of(POLICY, batch=2), SimpleQueue[Any](), Pipe()
    forward = decoder._forward

    def first_only(*arguments: Any) -> Any:
        if decoder._batch:
            inbox.put(("end of the test", ""))  # No such call, so the server ends with a ValueError.
            raise torch.OutOfMemoryError("no room")
        for rid in ("joins", "waits"):
            inbox.put(("generate", rid, [3, 4], greedy(5), False))
        return forward(*arguments)

    monkeypatch.setattr(decoder, "_forward", first_only)
    inbox.put(("generate", "runs", [1, 2], greedy(5), False))
    with pytest.raises(ValueError, match="end of the test"):
        Server(decoder, there, inbox).run()
    told = []
    while here.poll():
        told.append(here.recv()[:2])
    assert told[0] == ("answer", "ready")
    assert sorted(one for one in told[1:] if one[0] != "beat") == [("error", rid) for rid in ("joins", "runs", "waits")]


def test_experts_have_the_names_and_values_of_a_checkpoint(tmp_path: Path) -> None:
    folders = [tiny_model("qwen3_moe", tmp_path / str(seed), seed) for seed in range(2)]
    decoder = decoder_of(folders[0])
    for folder in folders:
        sent = load_file(folder / "model.safetensors")
        for bucket in pack(sent.items(), bucket_bytes=1 << 20):
            decoder.load(bucket)
        held = dict(decoder.tensors())
        assert held.keys() == sent.keys()
        assert all(torch.equal(held[name], sent[name]) for name in sent)
