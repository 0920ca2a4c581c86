"""Texts and outputs of policies, drawn by Hypothesis, with a tokenizer whose merges cross tags."""

from __future__ import annotations

from hypothesis import strategies as st

from rlsys.rollout.agent.tokens import Codec
from tests.support.bpe import build_tokenizer

TOKENIZER = build_tokenizer()
CODEC = Codec(TOKENIZER)

PIECES = ["<search>", "</search>", "東京", "🚀", "é", "naïve", " ", "\n\n", ">", "Paris", "Doc 1(Title: ", "x"]
TEXTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join)
PLAIN_IDS = st.integers(3, len(TOKENIZER) - 1)  # The lowest ids are special tokens.
CANONICAL = TEXTS.map(CODEC.encode)
BY_CHARACTER = TEXTS.map(lambda text: [token for letter in text for token in CODEC.encode(letter)])
OUTPUTS = st.one_of(CANONICAL, BY_CHARACTER, st.lists(PLAIN_IDS, max_size=6))
