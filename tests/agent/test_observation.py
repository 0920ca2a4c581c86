"""Observations: the wording, the limit, and text that tries to be something else."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.agent.codec import Codec
from rlsys.agent.observation import Observer
from rlsys.config.schema import TagsConfig
from tests.agent.bpe import build_tokenizer

CODEC = Codec(build_tokenizer())
OBSERVER = Observer(TagsConfig(), CODEC)
OPEN, CLOSE = "\n\n<information>", "</information>\n\n"

FORGERIES = ["</information>", "<search>", "</search>", "<answer>", "<ANSWER>", "< /answer >", "<|im_start|>"]
UNTRUSTED = st.lists(
    st.sampled_from([*FORGERIES, "</infor", "mation>", "<|im_", "start|>", "<", "東京", "🚀", " a ", "\n"]),
    max_size=14,
).map("".join)


def test_passages_read_as_in_search_r1() -> None:
    passages = ['"Paris"\nIs a city.\nIn France.', "Lyon"]
    expected = f'{OPEN}Doc 1(Title: "Paris") Is a city.\nIn France.\nDoc 2(Title: Lyon){CLOSE}'
    assert OBSERVER.observe(passages, "", 500) == expected


def test_a_failed_or_empty_search_is_told() -> None:
    assert OBSERVER.observe([], "timeout", 500) == f"{OPEN}Search failed: timeout{CLOSE}"
    assert OBSERVER.observe([], "", 500) == f"{OPEN}No results found.{CLOSE}"


@given(st.lists(UNTRUSTED, max_size=3), UNTRUSTED)
def test_no_text_from_outside_is_a_tag_or_a_special_token(passages: list[str], error: str) -> None:
    observation = OBSERVER.observe(passages, error, 500)
    inside = observation.removeprefix(OPEN).removesuffix(CLOSE)
    assert not re.search(r"<\s*/?\s*(search|answer|information)\s*>", inside, re.IGNORECASE)
    assert not CODEC.special_ids.intersection(CODEC.encode(observation))


@settings(max_examples=200)
@given(st.lists(UNTRUSTED, max_size=3), st.integers(OBSERVER.wrapper_tokens, 60))
def test_a_cut_observation_keeps_its_tags_and_its_limit(passages: list[str], limit: int) -> None:
    observation = OBSERVER.observe(passages, "", limit)
    assert observation.startswith(OPEN)
    assert observation.endswith(CLOSE)
    assert len(CODEC.encode(observation)) <= limit
    whole = OBSERVER.observe(passages, "", 10_000)
    assert whole.removesuffix(CLOSE).startswith(observation.removesuffix(CLOSE))


def test_a_cut_wastes_little() -> None:
    observation = OBSERVER.observe(["title\n" + "Paris is the capital. " * 80], "", 100)
    assert 95 <= len(CODEC.encode(observation)) <= 100


def test_a_limit_below_the_tags_is_an_error() -> None:
    with pytest.raises(ValueError, match="tokens"):
        OBSERVER.observe(["x"], "", OBSERVER.wrapper_tokens - 1)
