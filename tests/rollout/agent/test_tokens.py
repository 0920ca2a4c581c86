"""Token book-keeping against an independent account in bytes, on a tokenizer whose merges cross tags.

The engine here gives every token a log-prob that is a hash of the whole prefix. A log-prob that is kept
therefore proves that the prefix is, token by token, the one that the engine saw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from rlsys.config.schema import TokenMode
from rlsys.rollout.agent.tokens import Codec, SampledTurn, TokenRecord, _count_differing, open_context
from tests.support.bpe import build_tokenizer
from tests.support.refusals import refused

TOKENIZER = build_tokenizer()
CODEC = Codec(TOKENIZER)
FIRST_PLAIN = 3

PIECES = ["<search>", "</search>", "東京", "🚀", "é", "naïve", " ", "\n\n", ">", "Paris", "Doc 1(Title: ", "x"]
TEXTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join)
PLAIN_IDS = st.integers(FIRST_PLAIN, len(TOKENIZER) - 1)
CANONICAL = TEXTS.map(CODEC.encode)
BY_CHARACTER = TEXTS.map(lambda text: [token for letter in text for token in CODEC.encode(letter)])
OUTPUTS = st.one_of(CANONICAL, BY_CHARACTER, st.lists(PLAIN_IDS, max_size=6))
TURNS = st.lists(st.tuples(OUTPUTS, st.one_of(TEXTS, st.just(""))), min_size=1, max_size=4)
"""What is sampled, which may be nothing, and what is observed, which may part no turns."""


def hashed(prefix: Sequence[int]) -> float:
    """A log-prob that only this prefix has."""
    return -(hash(tuple(prefix)) % 1_000_003) / 1e6


def sampled_by(inputs: list[int], output: list[int]) -> SampledTurn:
    return SampledTurn(inputs, output, [0.0] * len(output), [0] * len(output), True)


def play(
    mode: TokenMode,
    prompt: str,
    turns: Sequence[tuple[list[int], str]],
    eos: bool,
    versions: Sequence[Sequence[int]] | None = None,
) -> TokenRecord:
    """Generate and observe in turn; the last observation is left out.

    Every turn is of the version of its number, unless `versions` names one for each of its tokens.
    """
    context = open_context(mode, CODEC, prompt)
    for number, (output, observation) in enumerate(turns):
        inputs = context.input_ids()
        logprobs = [hashed([*inputs, *output[: at + 1]]) for at in range(len(output))]
        of_turn = [number] * len(output) if versions is None else versions[number]
        context.add_turn(SampledTurn(inputs, output, logprobs, of_turn, True), CODEC.decode(output))
        if number < len(turns) - 1:
            context.add_observation(observation)
    return context.close(eos, limit=10_000)


def bytes_of(token: int) -> bytes:
    """A token's bytes by GPT-2's table from characters to bytes, written anew."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(rest)}
    return bytes(table[letter] for letter in TOKENIZER.convert_ids_to_tokens(token))


@settings(max_examples=50)
@given(st.sampled_from(TokenMode), TEXTS, TURNS, st.booleans())
def test_a_logprob_is_kept_exactly_where_the_engine_saw_the_same_prefix(
    mode: TokenMode, prompt: str, turns: list[tuple[list[int], str]], eos: bool
) -> None:
    record = play(mode, prompt, turns, eos)
    tokens = record.tokens.tolist()
    context = open_context(mode, CODEC, prompt)
    sampled: dict[tuple[int, ...], int] = {}
    for version, (output, observation) in enumerate(turns):
        inputs = context.input_ids()
        sampled |= {(*inputs, *output[: at + 1]): version for at in range(len(output))}
        context.add_turn(sampled_by(inputs, output), CODEC.decode(output))
        context.add_observation(observation)
    for at, logprob in enumerate(record.rollout_logprobs):
        prefix = tuple(tokens[: at + 1])
        if math.isnan(logprob):
            # Two turns may have sampled the same prefix only if a turn was empty of text.
            assert not record.loss_mask[at] or sampled.get(prefix) != record.versions[at]
        else:
            assert record.loss_mask[at]
            assert logprob == np.float32(hashed(prefix))
    assert not record.loss_mask[: record.prompt_length].any()


@st.composite
def updated_turns(draw: st.DrawFn) -> tuple[list[tuple[list[int], str]], list[list[int]]]:
    """Turns, and a version for each sampled token; versions never fall along an episode."""
    turns = draw(TURNS)
    rises = iter(draw(st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=200, max_size=200)))
    version = 0
    versions: list[list[int]] = []
    for output, _ in turns:
        versions.append([])
        for _ in output:
            version += next(rises, 0)
            versions[-1].append(version)
    return turns, versions


@settings(max_examples=50)
@given(TEXTS, updated_turns(), st.booleans())
def test_append_trains_what_was_sampled_with_the_version_of_every_token(
    prompt: str, updated: tuple[list[tuple[list[int], str]], list[list[int]]], eos: bool
) -> None:
    turns, versions = updated
    record = play(TokenMode.append, prompt, turns, eos, versions)
    tokens = CODEC.encode(prompt)
    turn_of_token = [-1] * len(tokens)
    of_token = [-1] * len(tokens)
    for number, (output, observation) in enumerate(turns):
        seen = CODEC.encode(observation) if number < len(turns) - 1 else []
        tokens += [*output, *seen]
        turn_of_token += [number] * len(output) + [-1] * len(seen)
        of_token += [*versions[number], *[-1] * len(seen)]
    assert record.tokens.tolist() == tokens + [CODEC.eos_id] * eos
    assert record.turn_of_token.tolist() == turn_of_token + [len(turns) - 1] * eos
    assert record.versions.tolist() == of_token + [-1] * eos
    assert record.loss_mask.tolist() == [turn >= 0 for turn in record.turn_of_token]
    assert record.tokens_differing == 0
    assert not np.isnan(record.rollout_logprobs[record.versions >= 0]).any()


@settings(max_examples=50)
@given(TEXTS, updated_turns())
def test_retokenize_trains_the_tokens_whose_bytes_one_turn_generated_with_no_later_version(
    prompt: str, updated: tuple[list[tuple[list[int], str]], list[list[int]]]
) -> None:
    turns, versions = updated
    record = play(TokenMode.retokenize, prompt, turns, False, versions)
    tokens = record.tokens.tolist()
    # By byte of the whole text: its turn, and the version of the sampled token that it comes from. Ill-formed
    # output is decoded to other bytes than were sampled; of those only the turn's latest version is known.
    owner, true = [-1] * len(prompt.encode()), [-1] * len(prompt.encode())
    calls: list[list[int]] = []
    text = prompt
    for number, (output, observation) in enumerate(turns):
        calls.append([*CODEC.encode(text), *output])
        said = CODEC.decode(output)
        pieces = [bytes_of(token) for token in output]
        by_byte = [version for piece, version in zip(pieces, versions[number], strict=True) for _ in piece]
        well_formed = b"".join(pieces) == said.encode()
        seen = observation if number < len(turns) - 1 else ""
        owner += [number] * len(said.encode()) + [-1] * len(seen.encode())
        true += by_byte if well_formed else versions[number][-1:] * len(said.encode())
        true += [-1] * len(seen.encode())
        text += said + seen
    assert tokens == TOKENIZER(text)["input_ids"]
    assert record.response == text[len(prompt) :]
    at = 0
    for place, (token, version) in enumerate(zip(tokens, record.versions, strict=True)):
        here = range(at, at := at + len(bytes_of(token)))
        owners = {owner[byte] for byte in here}
        (turn,) = owners if len(owners) == 1 else (-1,)
        assert record.turn_of_token[place] == turn
        assert record.loss_mask[place] == (turn >= 0)
        if turn < 0:
            assert version == -1
            continue
        start = len(calls[turn]) - len(turns[turn][0])
        if tokens[: place + 1] == calls[turn][: place + 1]:
            assert version == versions[turn][place - start], "the sampled token at its place"
        else:
            assert version == versions[turn][0], "the oldest of its turn"
        assert version <= min(true[byte] for byte in here)
    assert at == len(text.encode())


SOME = st.lists(st.integers(0, 4), max_size=24)


def longest_common(first: list[int], second: list[int]) -> int:
    """By the textbook's table."""
    row = [0] * (len(second) + 1)
    for one in first:
        new = [0]
        for at, other in enumerate(second):
            new.append(row[at] + 1 if one == other else max(new[at], row[at + 1]))
        row = new
    return row[-1]


@settings(max_examples=50)
@given(SOME, SOME)
def test_differing_tokens_are_those_outside_a_longest_common_subsequence(
    sampled: list[int], trained: list[int]
) -> None:
    assert _count_differing(sampled, trained) == len(trained) - longest_common(sampled, trained)


def test_a_collapsed_policy_is_counted_too() -> None:
    """Thousands of repeated tokens, which a recursive search for blocks does not get through in hours."""
    assert _count_differing([1, 2] * 2000, [1, 2, 3] * 1300) == 1300
    assert _count_differing([1] * 3000 + [2], ([1] * 9 + [3]) * 300) == 300


@pytest.mark.parametrize("mode", TokenMode)
def test_an_added_eos_is_trained_and_a_sampled_one_is_not_doubled(mode: TokenMode) -> None:
    plain = CODEC.encode("Paris")
    added = play(mode, "x", [(plain, "")], eos=True)
    sampled = play(mode, "x", [([*plain, CODEC.eos_id], "")], eos=True)
    without = play(mode, "x", [(plain, "")], eos=False)
    assert added.tokens.tolist() == sampled.tokens.tolist() == [*without.tokens.tolist(), CODEC.eos_id]
    assert (added.loss_mask[-1], sampled.loss_mask[-1]) == (True, True)
    assert (added.versions[-1], sampled.versions[-1]) == (-1, 0)
    assert (added.turn_of_token[-1], sampled.turn_of_token[-1]) == (0, 0)
    assert np.isnan(added.rollout_logprobs[-1])
    assert sampled.rollout_logprobs[-1] == np.float32(hashed(sampled.tokens.tolist()))


def test_append_cuts_after_the_token_that_completes_the_tag() -> None:
    context = open_context(TokenMode.append, CODEC, "x")
    kept = [token for letter in "q</search" for token in CODEC.encode(letter)]
    # One token may hold the tag's last letter and more; it cannot be split.
    closing = TOKENIZER.convert_tokens_to_ids(">Ċ")
    output = [*kept, closing, *CODEC.encode("Paris")]
    context.add_turn(sampled_by([], output), "q</search>")
    assert context.input_ids() == [*CODEC.encode("x"), *kept, closing]


def test_offsets_without_white_space_never_train_an_observation() -> None:
    codec = Codec(build_tokenizer(words=True, trim_offsets=True))
    context = open_context(TokenMode.retokenize, codec, "q:")
    context.add_observation("\n\n <information>x</information>  ")
    output = codec.encode("Paris")
    inputs = context.input_ids()
    context.add_turn(sampled_by(inputs, output), "Paris")
    record = context.close(False, limit=100)
    trained = codec.decode(record.tokens[record.loss_mask].tolist())
    assert trained in "Paris"


def test_prompts_take_the_chat_template_once_where_there_is_one() -> None:
    tokenizer: PreTrainedTokenizerFast = build_tokenizer()
    assert Codec(tokenizer).prompt("Why?") == "Why?"
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    templated = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert Codec(tokenizer).prompt("Why?") == Codec(tokenizer).prompt(templated) == templated


def test_a_tokenizer_without_offsets_or_an_end_is_refused() -> None:
    tokenizer = build_tokenizer()
    tokenizer.name_or_path = "some/model"
    tokenizer.eos_token = None
    with refused("missing", "some/model"):
        Codec(tokenizer)
    with refused("unsupported", "slow/model"):
        Codec(SimpleNamespace(is_fast=False, name_or_path="slow/model", eos_token_id=1))
