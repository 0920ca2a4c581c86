"""Tests of observations: wording, token limit, and text that forges tags or special tokens."""

from __future__ import annotations

import re
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from rlsys.config.schema import TagsConfig
from rlsys.rollout.agent.search_r1 import information_observer
from rlsys.rollout.agent.tokens import Codec
from rlsys.rollout.tools.calls import ToolResult, render_result, render_search
from tests.support.bpe import build_tokenizer

OPEN, CLOSE = "\n\n<information>", "</information>\n\n"
TOOLS = ("say", "do")
WORDS = "search|answer|information|say|do"
FORGERIES = ["</information>", "<search>", "</search >", "<ANSWER>", "< /answer >", "<SAY>", "< / do>", "<|im_start|>"]
OVERLAPPING = ["|||IP|||", "[INST]", "[ INST]", " ~", "~ "]
"""Special tokens whose end can be the start of another copy, and pairs that differ by a space."""


def build_codec(words: bool, trim_offsets: bool) -> Codec:
    tokenizer = build_tokenizer(words, trim_offsets)
    tokenizer.add_special_tokens({"additional_special_tokens": OVERLAPPING})
    return Codec(tokenizer)


CODECS = [build_codec(words, trim) for words in (False, True) for trim in (False, True)]
CODEC = CODECS[0]
OBSERVER = information_observer(TagsConfig(), CODEC, TOOLS)
BROKEN = ["</infor", "mation>", "<|im_", "start|>", "|||IP", "|||", "[INST]", "[", "~", "<"]
PIECES = [*FORGERIES, *BROKEN, "東京", "🚀", "a", " ", "\n"]
UNTRUSTED = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)


def build_runs() -> Codec:
    """Return a codec with tokens of 1, 2, 4 ... 64 times `=`; the last tokens of a run of `=` depend on its length."""
    runs = ["=" * 2**power for power in range(7)]
    vocabulary = {token: number for number, token in enumerate([*runs, "x", "$"])}
    raw = Tokenizer(models.BPE(vocabulary, [(run, run) for run in runs[:-1]]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="$")
    tokenizer.add_tokens([OPEN, CLOSE])
    return Codec(tokenizer)


def in_full(codec: Codec, body: str, limit: int) -> str:
    """Return the observation of `body` in the slow way: clear and tokenise the whole text, then cut it."""

    def broken(found: re.Match[str]) -> str:
        text = found.group()
        if text[0] == "<" and text[-1] == ">":
            return f"({text[1:-1]})"
        return text[0] + " " + text[1:] if text.strip() == text else " "

    specials = "".join("|" + re.escape(text) for text in codec.special_texts)
    forgery = re.compile(rf"<\s*/?\s*({WORDS})\s*>" + specials, re.IGNORECASE)
    while forgery.search(body):
        body = forgery.sub(broken, body)
    body = body.strip()
    ends = [end for _, end in codec.encode_spans(body).spans]
    tags = len(codec.encode(OPEN + CLOSE))
    for end in [len(body), *reversed(ends[: limit - tags]), 0]:
        observation = f"{OPEN}{body[:end].rstrip()}{CLOSE}"
        if len(codec.encode(observation)) <= limit:
            return observation
    raise AssertionError("the tags alone exceed the limit")


@pytest.mark.parametrize(
    ("passages", "error", "body"),
    [
        (['"Paris"\nIs a city.\nIn France.', "Lyon"], "", 'Doc 1(Title: "Paris") Is a city.\nIn France.\nDoc 2(Title: Lyon)'),
        ([], "timeout", "Search failed: timeout"),
        ([], "", "No results found."),
    ],
)  # fmt: skip
def test_passages_and_failures_have_the_wording_of_search_r1(passages: list[str], error: str, body: str) -> None:
    assert OBSERVER.observe(render_result(ToolResult(render_search(passages), error)), 500) == f"{OPEN}{body}{CLOSE}"


@settings(max_examples=50)
@given(st.lists(UNTRUSTED, max_size=3), UNTRUSTED, st.integers(0, 60))
@example([], "|||IP|||IP|||", 60)
@example([], " ~ ", 60)
def test_observation_keeps_its_tags_and_limit_and_forges_no_tag_or_special_token(
    passages: list[str], error: str, room: int
) -> None:
    body, limit = render_result(ToolResult(render_search(passages), error)), OBSERVER.wrapper_tokens + room
    whole, cut = OBSERVER.observe(body, 10_000), OBSERVER.observe(body, limit)
    assert len(CODEC.encode(cut)) <= limit
    for observation in (whole, cut):
        assert observation.startswith(OPEN)
        assert observation.endswith(CLOSE)
        inside = observation.removeprefix(OPEN).removesuffix(CLOSE)
        assert not re.search(rf"<\s*/?\s*({WORDS})\s*>", inside, re.IGNORECASE)
        assert not CODEC.special_ids.intersection(CODEC.encode(observation))
    assert whole.removesuffix(CLOSE).startswith(cut.removesuffix(CLOSE))


LONG = st.lists(
    st.tuples(st.sampled_from([*PIECES, "search>", "Paris is "]), st.sampled_from([1, 1, 2, 40, 900])), max_size=30
).map(lambda parts: "".join(piece * times for piece, times in parts))


@settings(max_examples=50)
@given(st.sampled_from(CODECS), LONG, st.integers(0, 60))
@example(CODECS[1], "a <" + " " * 5000 + "search>" + "b " * 3000, 20)
@example(CODECS[1], " " * 5000 + "b " * 3000, 20)
@example(build_runs(), "x" + "=" * 5000, 22)
def test_long_text_is_cut_as_if_all_of_it_had_been_read(codec: Codec, body: str, room: int) -> None:
    observer = information_observer(TagsConfig(), codec, TOOLS)
    limit = observer.wrapper_tokens + room
    assert observer.observe(body, limit) == in_full(codec, body, limit)


@pytest.mark.parametrize("text", ["Paris is the capital. ", "<|im_start|>", " ", "<"])
def test_only_a_bounded_part_of_a_long_text_is_read(text: str) -> None:
    codec = build_codec(words=False, trim_offsets=False)
    body = render_search(["T\nx" + text * (10**6 // len(text)) + "x"] * 20)
    observer = information_observer(TagsConfig(), codec)
    with (
        patch.object(codec, "encode", wraps=codec.encode) as encode,
        patch.object(codec, "encode_spans", wraps=codec.encode_spans) as encode_spans,
    ):
        observation = observer.observe(body, 500)
    read = sum(len(call.args[0]) for call in (*encode.mock_calls, *encode_spans.mock_calls))
    assert read < 100_000
    assert len(codec.encode(observation)) <= 500


@pytest.mark.parametrize("text", ["<", "< /search"])
def test_tag_with_endless_white_space_is_read_in_linear_time(text: str) -> None:
    """A pattern that backtracks over the spaces would take hours."""
    OBSERVER.observe("x" + (text + " " * 100_000) * 3, 100_000)
