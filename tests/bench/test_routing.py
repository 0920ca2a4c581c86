"""Tests of the mixture of experts and the disturbed routers of `bench.routing`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.routing import CHOSEN, DisturbedDecoder, mixture, write_mixture
from bench.training_run import FIRST_POLICY
from rlsys.rollout.agent.recorder import TurnSampling
from rlsys.rollout.transformers_process import DecoderSpec

TEXT = "Question: What is the time zone of Lipkovo?\n<think> I need to search. </think>\n<search> Lipkovo </search>\n"
IDS = [list(range(5, 45)), list(range(300, 360))]


def test_a_mixture_without_noise_computes_what_the_dense_policy_does() -> None:
    dense = AutoModelForCausalLM.from_pretrained(FIRST_POLICY, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(FIRST_POLICY)(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        theirs, ours = (one(ids).logits.log_softmax(-1) for one in (dense, mixture(dense, 0.0).eval()))
    kl = (theirs.exp() * (theirs - ours)).sum(-1)
    assert kl.mean() < 0.01
    assert kl.median() < 1e-3


def test_disturbed_routers_choose_other_experts_and_the_same_again(tmp_path: Path) -> None:
    folder = write_mixture(tmp_path)
    decoder = DisturbedDecoder(DecoderSpec(str(folder), "float32", "cpu", 4, 1, 0, False, 4))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for rid, ids in enumerate(IDS):
        decoder.add(str(rid), ids, TurnSampling(1.0, max_new_tokens=8, routes_from=0), False)
    while decoder.has_work:
        told = {rid: said for kind, rid, said in decoder.step() if kind == "answer"}
    for rid, said in told.items():
        context = [*IDS[int(rid)], *said.token_ids][:-1]
        decoder.add("again", context, TurnSampling(1.0, max_new_tokens=1, routes_from=0), False)
        ((_, _, again),) = decoder.step()
        assert np.array_equal(np.sort(again.routes), np.sort(said.routes))
        with torch.no_grad():
            logits = model(torch.tensor([context]), output_router_logits=True).router_logits
        own = torch.stack([layer.topk(CHOSEN).indices for layer in logits], dim=1).numpy()
        others = (np.sort(own) != np.sort(said.routes)).any(-1)
        assert 0.05 < others.mean() < 0.95
