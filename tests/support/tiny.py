"""Trains a tiny Qwen2 that repeats one search trace, and serves a search server of one passage."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from tests.support.serving import Body, served
from tests.support.tensors import save_model
from tests.support.waiting import until

EOS = "<|endoftext|>"
PASSAGE = '"Paris"\nParis is the capital and the largest city of France.'
OBSERVATION = (
    '\n\n<information>Doc 1(Title: "Paris") Paris is the capital and the largest city of France.</information>\n\n'
)
QUERY = "capital of France"


@dataclass(frozen=True)
class Trace:
    """An episode to learn."""

    prompt: str
    search: str
    answer: str

    @property
    def text(self) -> str:
        return f"{self.prompt}{self.search}{OBSERVATION}{self.answer}"


FIRST = Trace(
    prompt="Answer the question. Question: What is the capital of France?\n",
    search=f"<think>I do not know.</think><search> {QUERY} </search>",
    answer="<think>It says so.</think><answer> Paris </answer>",
)
SECOND = Trace(FIRST.prompt, f"<think>Let me look.</think><search> {QUERY} </search>", "<answer> Lyon </answer>")


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE tokenizer, trained on the two traces."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=450, special_tokens=[EOS], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    raw.train_from_iterator([FIRST.text, SECOND.text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=EOS)


def train(trace: Trace, words: PreTrainedTokenizerFast, seed: int, steps: int = 120) -> Qwen2ForCausalLM:
    """Model that has learnt to continue `trace` from any point."""
    return deepcopy(_trained(trace, words.backend_tokenizer.to_str(), seed, steps))


@cache
def _trained(trace: Trace, vocabulary: str, seed: int, steps: int) -> Qwen2ForCausalLM:
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(vocabulary), eos_token=EOS)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=words.eos_token_id,
    )
    model = Qwen2ForCausalLM(config)
    ids = torch.tensor([words(trace.text + EOS)["input_ids"]])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return model.eval()


def save(model: Qwen2ForCausalLM, words: PreTrainedTokenizerFast, folder: Path) -> str:
    """Write model and tokenizer to `folder` for an engine. Returns `folder`."""
    save_model(model, folder)
    words.save_pretrained(folder)
    return str(folder)


@dataclass
class Search:
    """A running search server of one passage."""

    url: str
    asked: list[str] = field(default_factory=list)
    """Queries that have arrived, answered or not."""
    answering: threading.Event = field(default_factory=threading.Event)
    """Cleared to let queries wait for their answers."""

    async def until_asked(self, queries: int) -> None:
        """Wait until `queries` queries have arrived in total."""
        await until(lambda: len(self.asked) >= queries)


@contextmanager
def search_server() -> Iterator[Search]:
    """Serve one passage until the end of the context."""

    def answer(body: Body) -> Any:
        search.asked.extend(body["queries"])
        search.answering.wait()
        hit = {"document": {"id": "0", "contents": PASSAGE}, "score": 1.0}
        return {"result": [[hit] for _ in body["queries"]]}

    with served(answer) as server:
        search = Search(server.url)
        search.answering.set()
        try:
            yield search
        finally:
            search.answering.set()
