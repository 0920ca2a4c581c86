"""Tests of token records against independent counts in bytes, with a tokenizer whose merges cross tags.

The engine of these tests gives every token a hash of the token and all tokens before it as its log-prob. A kept
log-prob therefore proves that the token and all tokens before it are exactly what the engine saw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from rlsys.config.schema import TokenMode
from rlsys.rollout.agent.tokens import Codec, SampledTurn, TokenRecord, _count_differing, open_context
from tests.rollout.agent.drawn_texts import CODEC, OUTPUTS, TEXTS, TOKENIZER
from tests.support.bpe import build_tokenizer
from tests.support.refusals import refused


class Said(NamedTuple):
    """Output of a turn and the observation after it."""

    output: list[int]
    versions: list[int]
    """Version of each token; versions never decrease along an episode."""
    observation: str
    """Text after the turn; empty if there is none."""


@st.composite
def episodes(draw: st.DrawFn) -> list[Said]:
    version, said = 0, []
    for output in draw(st.lists(OUTPUTS, min_size=1, max_size=4)):
        rises = draw(st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=len(output), max_size=len(output)))
        versions = [version := version + rise for rise in rises]
        said.append(Said(output, versions, draw(st.one_of(TEXTS, st.just("")))))
    return said


def hashed(prefix: Sequence[int]) -> float:
    """Return a log-prob that identifies the prefix."""
    return -(hash(tuple(prefix)) % 1_000_003) / 1e6


def sampled_by(inputs: list[int], output: list[int], versions: Sequence[int] | None = None) -> SampledTurn:
    logprobs = [hashed([*inputs, *output[: at + 1]]) for at in range(len(output))]
    return SampledTurn(inputs, output, logprobs, versions or [0] * len(output), ended_itself=True)


def play(mode: TokenMode, prompt: str, turns: Sequence[Said], eos: bool) -> tuple[TokenRecord, list[list[int]]]:
    """Play the turns; return the record, and the engine's input at each turn."""
    context, inputs = open_context(mode, CODEC, prompt), []
    for output, versions, observation in turns:
        inputs.append(context.input_ids())
        context.add_turn(sampled_by(inputs[-1], output, versions), CODEC.decode(output))
        context.add_observation(observation)
    return context.close(eos, limit=10_000), inputs


def bytes_of(token: int) -> bytes:
    """Return the bytes of a token, by GPT-2's table of characters."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(rest)}
    return bytes(table[letter] for letter in TOKENIZER.convert_ids_to_tokens(token))


@settings(max_examples=50)
@given(st.sampled_from(TokenMode), TEXTS, episodes(), st.booleans())
def test_log_prob_is_kept_exactly_where_the_engine_saw_the_same_prefix(
    mode: TokenMode, prompt: str, turns: list[Said], eos: bool
) -> None:
    record, inputs = play(mode, prompt, turns, eos)
    sampled = {
        (*before, *turn.output[: at + 1]): number
        for number, (before, turn) in enumerate(zip(inputs, turns, strict=True))
        for at in range(len(turn.output))
    }
    for at, logprob in enumerate(record.rollout_logprobs):
        prefix = tuple(record.tokens[: at + 1].tolist())
        if math.isnan(logprob):
            # Two turns can have sampled the same prefix only if the text of one of them was empty.
            assert not record.loss_mask[at] or sampled.get(prefix) != record.turn_of_token[at]
        else:
            assert record.loss_mask[at]
            assert logprob == np.float32(hashed(prefix))
    assert not record.loss_mask[: record.prompt_length].any()


@settings(max_examples=50)
@given(TEXTS, episodes())
def test_retokenize_trains_tokens_of_a_single_turn_with_no_version_later_than_the_true_one(
    prompt: str, turns: list[Said]
) -> None:
    record, inputs = play(TokenMode.retokenize, prompt, turns, eos=False)
    tokens = record.tokens.tolist()
    # The turn of each byte of the whole text, and the version of the sampled token that the byte comes from. Ill-formed
    # output decodes to other bytes than were sampled; their version is at most the turn's latest.
    owner, true = [-1] * len(prompt.encode()), [-1] * len(prompt.encode())
    text = prompt
    for number, (output, versions, observation) in enumerate(turns):
        said, seen = CODEC.decode(output), observation.encode()
        pieces = [bytes_of(token) for token in output]
        by_byte = [version for piece, version in zip(pieces, versions, strict=True) for _ in piece]
        well_formed = b"".join(pieces) == said.encode()
        owner += [number] * len(said.encode()) + [-1] * len(seen)
        true += by_byte if well_formed else versions[-1:] * len(said.encode())
        true += [-1] * len(seen)
        text += said + observation
    assert tokens == TOKENIZER(text)["input_ids"]
    assert record.response == text[len(prompt) :]
    at = 0
    for place, (token, version) in enumerate(zip(tokens, record.versions, strict=True)):
        here = range(at, at := at + len(bytes_of(token)))
        owners = {owner[byte] for byte in here}
        (number,) = owners if len(owners) == 1 else (-1,)
        assert record.turn_of_token[place] == number
        assert record.loss_mask[place] == (number >= 0)
        if number < 0:
            assert version == -1
            continue
        output, versions, _ = turns[number]
        if tokens[: place + 1] == [*inputs[number], *output][: place + 1]:
            assert version == versions[place - len(inputs[number])], "the sampled token at its place"
        else:
            assert version == versions[0], "the oldest of its turn"
        assert version <= min(true[byte] for byte in here)
    assert at == len(text.encode())


SOME = st.lists(st.integers(0, 4), max_size=24)


def longest_common(first: list[int], second: list[int]) -> int:
    """Return the length of a longest common subsequence by dynamic programming."""
    row = [0] * (len(second) + 1)
    for one in first:
        new = [0]
        for at, other in enumerate(second):
            new.append(row[at] + 1 if one == other else max(new[at], row[at + 1]))
        row = new
    return row[-1]


@settings(max_examples=50)
@given(SOME, SOME)
def test_differing_tokens_are_outside_a_longest_common_subsequence(sampled: list[int], trained: list[int]) -> None:
    assert _count_differing(sampled, trained) == len(trained) - longest_common(sampled, trained)


def test_differing_tokens_of_a_collapsed_policy_are_counted_fast() -> None:
    """A recursive search for equal blocks would take hours on thousands of repeated tokens."""
    assert _count_differing([1, 2] * 2000, [1, 2, 3] * 1300) == 1300
    assert _count_differing([1] * 3000 + [2], ([1] * 9 + [3]) * 300) == 300


@pytest.mark.parametrize("mode", TokenMode)
def test_added_eos_is_trained_and_a_sampled_one_is_not_doubled(mode: TokenMode) -> None:
    def said(*more: int, eos: bool) -> TokenRecord:
        output = [*CODEC.encode("Paris"), *more]
        return play(mode, "x", [Said(output, [0] * len(output), "")], eos)[0]

    added, sampled, without = said(eos=True), said(CODEC.eos_id, eos=True), said(eos=False)
    assert added.tokens.tolist() == sampled.tokens.tolist() == [*without.tokens.tolist(), CODEC.eos_id]
    assert (added.loss_mask[-1], sampled.loss_mask[-1]) == (True, True)
    assert (added.versions[-1], sampled.versions[-1]) == (-1, 0)
    assert (added.turn_of_token[-1], sampled.turn_of_token[-1]) == (0, 0)
    assert np.isnan(added.rollout_logprobs[-1])
    assert sampled.rollout_logprobs[-1] == np.float32(hashed(sampled.tokens.tolist()))


@pytest.mark.parametrize("mode", TokenMode)
def test_an_observation_after_the_last_turn_is_not_trained(mode: TokenMode) -> None:
    """An episode may end after an observation, such as at its time limit; its last turn may have sampled an EOS."""
    output = [*CODEC.encode("hm"), CODEC.eos_id]
    record, _ = play(mode, "x", [Said(output, [7] * len(output), " again")], eos=True)
    trained = record.tokens[record.loss_mask].tolist()
    assert trained == (output if mode is TokenMode.append else output[:-1])
    assert CODEC.decode(record.tokens.tolist()).endswith(" again")
    assert not np.isnan(record.rollout_logprobs[record.loss_mask]).any(), "as sampled"


def test_append_cuts_after_the_token_that_completes_the_tag() -> None:
    context = open_context(TokenMode.append, CODEC, "x")
    kept = [token for letter in "q</search" for token in CODEC.encode(letter)]
    # A token may hold the tag's last letter and more text; it cannot be split.
    closing = TOKENIZER.convert_tokens_to_ids(">Ċ")
    output = [*kept, closing, *CODEC.encode("Paris")]
    context.add_turn(sampled_by([], output), "q</search>")
    assert context.input_ids() == [*CODEC.encode("x"), *kept, closing]


def test_observation_is_not_trained_if_offsets_lack_white_space() -> None:
    codec = Codec(build_tokenizer(words=True, trim_offsets=True))
    context = open_context(TokenMode.retokenize, codec, "q:")
    context.add_observation("\n\n <information>x</information>  ")
    output = codec.encode("Paris")
    inputs = context.input_ids()
    context.add_turn(sampled_by(inputs, output), "Paris")
    record = context.close(False, limit=100)
    trained = codec.decode(record.tokens[record.loss_mask].tolist())
    assert trained in "Paris"


def test_prompt_takes_the_chat_template_once_if_there_is_one() -> None:
    tokenizer: PreTrainedTokenizerFast = build_tokenizer()
    assert Codec(tokenizer).prompt("Why?") == "Why?"
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    templated = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert Codec(tokenizer).prompt("Why?") == Codec(tokenizer).prompt(templated) == templated


def test_tokenizer_without_offsets_or_end_token_is_refused() -> None:
    tokenizer = build_tokenizer()
    tokenizer.name_or_path = "some/model"
    tokenizer.eos_token = None
    with refused("missing", "some/model"):
        Codec(tokenizer)
    with refused("unsupported", "slow/model"):
        Codec(SimpleNamespace(is_fast=False, name_or_path="slow/model", eos_token_id=1))
