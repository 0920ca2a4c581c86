"""Answers of a teacher's server, in the form of SGLang's `/generate`."""

from typing import Any

import torch

from tests.support.serving import Answer, Body


def sglang(tokens: list[int], start: int, logprobs: list[float], texts: list[str]) -> Any:
    """SGLang's answer for `tokens` with these log-probs; the first that it returns is unknown to it."""
    values = [None, *logprobs[start + 1 :]]
    entries = [
        [value, *pair] for value, pair in zip(values, list(zip(tokens, texts, strict=True))[start:], strict=True)
    ]
    return {"text": "", "meta_info": {"prompt_tokens": len(tokens), "input_token_logprobs": entries}}


def scored_by(model: torch.nn.Module, tokenizer: Any = None) -> Answer:
    """Answer with the log-probs of a transformers model, and with the texts of its tokenizer if given."""

    def answer(body: Body) -> Any:
        tokens = body["input_ids"]
        with torch.no_grad():
            log_p = torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1], dim=-1)
        picked = log_p.gather(-1, torch.tensor(tokens)[1:, None])[:, 0]
        texts = ["" if tokenizer is None else tokenizer.decode([token]) for token in tokens]
        return sglang(tokens, body["logprob_start_len"], [0.0, *picked.tolist()], texts)

    return answer
