"""Runs whole episodes of the tiny policy with plain transformers, to evaluate it.

Every turn tokenises the episode's text again. Limits are `MAX_SEARCHES` searches and `MAX_TURN_TOKENS` generated tokens
per turn. A turn with neither a search nor an answer ends the episode.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from examples.searchr1.tiny.passages import observation
from examples.searchr1.tiny.retrieval import DirectRetriever
from examples.searchr1.tiny.traces import Script

MAX_SEARCHES = 3
MAX_TURN_TOKENS = 48
ROWS = 50
ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)


@dataclass(slots=True)
class Episode:
    """One attempt at a question; `answer` is None if there was none."""

    script: Script
    text: str
    queries: list[str] = field(default_factory=list)
    answer: str | None = None
    over: bool = False

    @property
    def right(self) -> bool:
        """True if the answer is the script's answer, ignoring case."""
        return self.answer is not None and self.answer.casefold() == self.script.answer.casefold()

    @property
    def right_path(self) -> bool:
        """True if the answer is right and the queries are the script's queries."""
        return self.right and self.queries == [step.query for step in self.script.steps]


@dataclass(frozen=True, slots=True)
class Scores:
    """Shares over the questions of one hop count."""

    questions: int
    exact: float
    right_path: float
    searches: float
    """Mean number of searches."""


def run_episodes(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    retriever: DirectRetriever,
    scripts: Sequence[Script],
    temperature: float,
) -> list[Episode]:
    """Run one episode per script; greedy at temperature 0, else sampled with torch's global generator."""
    model.eval()
    episodes = [Episode(script, script.prompt) for script in scripts]
    for turn in range(MAX_SEARCHES + 1):
        live = [episode for episode in episodes if not episode.over]
        for start in range(0, len(live), ROWS):
            chunk = live[start : start + ROWS]
            written = _generate(model, tokenizer, [episode.text for episode in chunk], temperature)
            for episode, text in zip(chunk, written, strict=True):
                _advance(episode, text, retriever, last=turn == MAX_SEARCHES)
    return episodes


def scores_by_hops(episodes: Sequence[Episode]) -> dict[int, Scores]:
    """Return number of hops -> scores of the questions with that many hops."""
    table = {}
    for hops in sorted({len(episode.script.steps) for episode in episodes}):
        group = [episode for episode in episodes if len(episode.script.steps) == hops]
        table[hops] = Scores(
            questions=len(group),
            exact=sum(episode.right for episode in group) / len(group),
            right_path=sum(episode.right_path for episode in group) / len(group),
            searches=sum(len(episode.queries) for episode in group) / len(group),
        )
    return table


def _advance(episode: Episode, written: str, retriever: DirectRetriever, last: bool) -> None:
    episode.text += written
    action = ACTION.search(written)
    if action is not None and action.group(1) == "search" and not last:
        query = action.group(2).strip()
        episode.queries.append(query)
        episode.text += observation(retriever.passages([query])[0])
        return
    episode.over = True
    if action is not None and action.group(1) == "answer":
        episode.answer = action.group(2).strip()


@torch.no_grad()
def _generate(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, contexts: Sequence[str], temperature: float
) -> list[str]:
    """Return the text that the model writes after each context, up to and including the closing tag of an action."""
    ends = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(["</search>", "</answer>"])]
    batch = tokenizer(list(contexts), padding=True, padding_side="left", return_tensors="pt")
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    output = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=MAX_TURN_TOKENS,
        eos_token_id=ends,
        pad_token_id=tokenizer.pad_token_id,
        **sampling,
    )
    width = batch["input_ids"].shape[1]
    return [
        text.replace(tokenizer.pad_token, "").replace(tokenizer.eos_token, "")
        for text in tokenizer.batch_decode(output[:, width:])
    ]
