"""Measures how well the tiny policy copies on the right path.

`forced` gives the policy the right context at every point of the right path, and checks that it would write the right
query or answer there. It measures copying only.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from examples.searchr1.tiny.batches import pad
from examples.searchr1.tiny.traces import OBSERVATION, Behaviour, Script, write_trace

COPIED = re.compile(r"(?<=<search>).*?</search>|(?<=<answer>).*?</answer>")
ROWS = 32


@torch.no_grad()
def forced(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, scripts: Sequence[Script]) -> dict[str, float]:
    """Return the share of correct queries and answers by hops and position, and the share of paths without an error."""
    model.eval()
    right: dict[str, list[bool]] = defaultdict(list)
    for start in range(0, len(scripts), ROWS):
        chunk = scripts[start : start + ROWS]
        texts = [write_trace(script, Behaviour.RIGHT) for script in chunk]
        encoded = tokenizer(texts, return_offsets_mapping=True)
        batch = pad([(ids, [1.0] * len(ids)) for ids in encoded["input_ids"]], tokenizer.pad_token_id)
        hidden = model.model(input_ids=batch.tokens).last_hidden_state
        for row, (script, text) in enumerate(zip(chunk, texts, strict=True)):
            hops, path = len(script.steps), True
            for number, span in enumerate(m.span() for m in COPIED.finditer(OBSERVATION.sub(_blank, text))):
                positions = [
                    index
                    for index, (low, high) in enumerate(encoded["offset_mapping"][row])
                    if low >= span[0] and high <= span[1]
                ]
                logits = model.lm_head(hidden[row, torch.tensor(positions) - 1])
                same = bool((logits.argmax(-1) == batch.tokens[row, positions]).all())
                right[f"hop{hops}/copy{number + 1}"].append(same)
                path = path and same
            right[f"hop{hops}/path"].append(path)
    return {key: sum(values) / len(values) for key, values in sorted(right.items())}


def _blank(match: re.Match[str]) -> str:
    return " " * len(match.group())
