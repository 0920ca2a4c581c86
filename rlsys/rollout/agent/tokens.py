"""Records the tokens of an episode and which of them are trained.

Token modes: `retokenize` keeps the context as text and tokenises it again for each turn and for training; a token of
the text is trained only if it lies wholly within generated text. `append` keeps the sampled ids up to the token that
completes the stop tag, and appends observations tokenised on their own.

Example: after prompt P the engine samples a and b under version 7; version 8 is activated during a search, which
returns O; the engine samples c. The record is as follows (in `retokenize` mode, if re-tokenisation gives the same ids):

    tokens             P    a    b    O    c
    loss_mask          0    1    1    0    1
    turn_of_token     -1    0    0   -1    1
    versions          -1    7    7   -1    8
    rollout_logprobs  nan  -.3  -.9  nan  -.1
    routes from turn   0    0    1    1    -

Invariants, in both modes:
- No token that contains a character of the prompt or of an observation is trained.
- `rollout_logprobs[t]` is a number only if the engine sampled `tokens[t]` after exactly `tokens[:t]`, so that it can be
  compared with a recomputed log-prob; elsewhere it is NaN.
- `turn_of_token` is the turn of every trained token, and -1 elsewhere.
- `versions[t]` is set for every trained token, except for an end-of-sequence token that was added and not sampled: this
  token has version -1 and no log-prob.
- A recorded version is never later than the true version, so a bound on recorded staleness bounds the true staleness.
  The recorded version is exact if the engine call had the same token after the same tokens. This always holds in
  `append` mode. In `retokenize` mode, any other generated token has the oldest version of its turn.
- `routes[t]`, if the engine returns routes, are the experts with which the engine computed `tokens[t]` after exactly
  `tokens[:t]`, or, in the last turn that has `tokens[t]`, after tokens that re-tokenisation changed. Unknown are the
  routes of the last token, which no engine call computed, and of the tokens of a turn from the first to the last that
  re-tokenisation changed, unless a later turn read them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlsys.config.schema import TokenMode
from rlsys.data.question import Question
from rlsys.data.trajectory import Finish, Routes, Trajectory, Turn, unrouted
from rlsys.errors import UserError

Number = TypeVar("Number", bound=np.generic)

_SAID = "rlsys_message"
"""Text in place of an answer, to find what a chat template writes after it."""
UNSAMPLED = -1
"""Turn and version of a token that no turn sampled."""


@dataclass(frozen=True, slots=True)
class Encoded:
    ids: list[int]
    spans: list[tuple[int, int]]
    """Half-open character range of each token in the text."""


class Codec:
    """Encodes and decodes text with a Hugging Face fast tokenizer; reports the character span of every token.

    Contract: encoding adds no BOS or EOS, and decoding does not clean up spaces. A templated prompt contains its
    special tokens as text. Spans are conservative: white space that a tokenizer leaves out of its offsets
    (`trim_offsets`) belongs to both neighbouring tokens, so that no token is mistaken for purely generated text.

    Raises `UserError` for a tokenizer without character offsets or without an end-of-sequence token.
    """

    def __init__(self, tokenizer: Any) -> None:
        name = getattr(tokenizer, "name_or_path", "")
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(
                f"The tokenizer of {name!r} gives no character offsets: use a fast tokenizer (tokenizer.json).",
                code="unsupported",
                key=name or "tokenizer",
            )
        if tokenizer.eos_token_id is None:
            raise UserError(
                f"The tokenizer of {name!r} has no end-of-sequence token: set eos_token in its config.",
                code="missing",
                key=name or "tokenizer",
            )
        self._tokenizer = tokenizer
        self.eos_id: int = tokenizer.eos_token_id
        self.special_ids: frozenset[int] = frozenset(tokenizer.all_special_ids)
        added = tokenizer.added_tokens_decoder.values()
        self.special_texts = tuple(sorted({str(token) for token in added if token.special and str(token).strip()}))
        """Texts that the tokenizer encodes as one special token wherever they occur."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`."""
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def encode_spans(self, text: str) -> Encoded:
        """Return the token ids of `text` with their character spans."""
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return Encoded(encoding["input_ids"], _close_gaps(encoding["offset_mapping"], len(text)))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def prompt(self, question: str) -> str:
        """Return `question` as one templated user message; unchanged if the tokenizer has no chat template.

        A question that contains a special token counts as templated already and stays unchanged too.
        """
        if self._tokenizer.chat_template is None or any(text in question for text in self.special_texts):
            return question
        return self.chat([{"role": "user", "content": question}])

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Return `messages` by the chat template, which describes the functions `tools`, up to the start of an answer.

        Without a chat template, messages follow one another as they are; ValueError is raised for tools and their calls.
        """
        if self._tokenizer.chat_template is None:
            if tools or any(message.get("tool_calls") for message in messages):
                raise ValueError("the tokenizer has no chat template, so it writes no tools")
            return "".join(str(message["content"]) for message in messages)
        return self._tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=True
        )

    def following(
        self, messages: Sequence[Mapping[str, Any]], said: int, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """Return what the chat template writes after the text of message `said`: its end, and the later messages, up to
        the start of an answer.

        This follows the tokens of a sampled answer. Raises ValueError for a template that does not write an answer as
        it is.
        """
        mark = _SAID
        while any(mark in str(message) for message in messages):
            mark += "_"
        marked = [*messages[:said], {"role": "assistant", "content": mark}, *messages[said + 1 :]]
        _, found, after = self.chat(marked, tools).partition(mark)
        if not found:
            raise ValueError("it does not write the text of an answer")
        return after

    def decode_all(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` with special tokens."""
        return str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def special_text(self, token: int) -> str:
        """Return the text of a special token; empty for any other token."""
        return self._tokenizer.decode([token]) if token in self.special_ids else ""


def encodable(text: str) -> str:
    """Return `text` with lone surrogates, which JSON can spell and no tokenizer accepts, replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")


def encodable_json(value: Any) -> Any:
    """Return JSON values with lone surrogates replaced in every text."""
    return json.loads(encodable(json.dumps(value, ensure_ascii=False)))


def _close_gaps(offsets: Sequence[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """Widen spans over characters that belong to no token.

    If a multi-byte character has several tokens, all have its range, so ends may repeat but never decrease.
    """
    ends = [0, *(end for _, end in offsets)]
    starts = [*(start for start, _ in offsets[1:]), length]
    return [(min(start, ends[at]), max(end, starts[at])) for at, (start, end) in enumerate(offsets)]


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """One engine call; log-probs and versions are aligned with `output_ids`."""

    input_ids: Sequence[int]
    output_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    """Weight version that sampled each token."""
    ended_itself: bool
    """True if the engine stopped at a stop string or an end-of-sequence token, not at a limit."""
    routes: Routes | None = None
    """Routes of the input and output tokens from number `routes_from` on but the last one; None if not asked for."""
    routes_from: int = 0

    @property
    def ids(self) -> list[int]:
        """Input and output tokens."""
        return [*self.input_ids, *self.output_ids]


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """Per-token part of a trajectory. `Trajectory` explains all fields but `truncated`."""

    tokens: NDArray[np.int32]
    prompt_length: int
    loss_mask: NDArray[np.bool_]
    rollout_logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    turn_of_token: NDArray[np.int32]
    tokens_differing: int
    response: str
    truncated: bool
    """True if tokens were cut off at the end to keep the limit."""
    routes: Routes | None

    def trajectory(
        self,
        question: Question,
        sample: int,
        turns: Sequence[Turn],
        sampled: Sequence[SampledTurn],
        finish: Finish,
        **episode: Any,
    ) -> Trajectory:
        """Return the trajectory of episode `sample`; `sampled` are its engine calls, `episode` its other fields."""
        return Trajectory(
            question_uid=question.uid,
            sample=sample,
            tokens=self.tokens,
            prompt_length=self.prompt_length,
            loss_mask=self.loss_mask,
            rollout_logprobs=self.rollout_logprobs,
            versions=self.versions,
            turn_of_token=self.turn_of_token,
            tokens_differing=self.tokens_differing,
            response=self.response,
            turns=tuple(turns),
            finish=Finish.TOKEN_LIMIT if self.truncated else finish,
            sampled_ids=joined((turn.output_ids for turn in sampled), np.int32),
            sampled_logprobs=joined((turn.logprobs for turn in sampled), np.float32),
            routes=self.routes,
            **episode,
        )


def joined(parts: Iterable[Sequence[float]], dtype: type[Number]) -> NDArray[Number]:
    """Return the values of all `parts` as one array."""
    return np.array(list(chain.from_iterable(parts)), dtype)


class Context(Protocol):
    """Growing context of an episode."""

    def input_ids(self) -> list[int]:
        """Return the engine's input for the next turn."""

    def add_turn(self, turn: SampledTurn, text: str) -> None:
        """Append a generation; `text` is the part of it that the protocol kept."""

    def add_observation(self, text: str) -> None:
        """Append an observation."""

    def close(self, end_with_eos: bool, limit: int) -> TokenRecord:
        """Return the finished sequence of at most `limit` tokens.

        `end_with_eos` adds a trained EOS unless the last turn sampled one.
        """


def open_context(mode: TokenMode, codec: Codec, prompt: str) -> Context:
    """Return a context that begins with `prompt`."""
    return Retokenized(codec, prompt) if mode is TokenMode.retokenize else Appended(codec, prompt)


class Retokenized(Context):
    """Context kept as text."""

    def __init__(self, codec: Codec, prompt: str) -> None:
        self._codec = codec
        self._prompt = prompt
        self._text = prompt
        self._ids: list[int] | None = None
        self._turns: list[SampledTurn] = []
        self._ranges: list[tuple[int, int]] = []
        self._whole = False

    def input_ids(self) -> list[int]:
        if self._ids is None:
            self._ids = self._codec.encode(self._text)
        return list(self._ids)

    def add_turn(self, turn: SampledTurn, text: str) -> None:
        start = len(self._text)
        self.add_observation(text)
        self._turns.append(turn)
        self._ranges.append((start, len(self._text)))
        self._whole = text == self._codec.decode(turn.output_ids)

    def add_observation(self, text: str) -> None:
        self._text += text
        self._ids = None

    def close(self, end_with_eos: bool, limit: int) -> TokenRecord:
        encoded = self._codec.encode_spans(self._text)
        owners = _owners(encoded.spans, self._ranges)
        prompt_length = sum(start < len(self._prompt) for start, _ in encoded.spans)
        tokens = list(encoded.ids)
        eos = _sampled_eos(self._codec, self._turns) if self._whole else None
        if eos is not None and self._ranges[-1][1] == len(self._text):  # Text after it would be its context.
            tokens.append(eos)
            owners.append(len(self._turns) - 1)
        response = self._text[len(self._prompt) :]
        closing = self._codec.eos_id if end_with_eos and eos is None else None
        return _record(tokens, owners, self._turns, prompt_length, response, closing, limit)


class Appended(Context):
    """Context kept as tokens."""

    def __init__(self, codec: Codec, prompt: str) -> None:
        self._codec = codec
        self._tokens = codec.encode(prompt)
        self._prompt_length = len(self._tokens)
        self._owners = [UNSAMPLED] * self._prompt_length
        self._turns: list[SampledTurn] = []
        self._response = ""
        self._eos: int | None = None

    def input_ids(self) -> list[int]:
        return list(self._tokens)

    def add_turn(self, turn: SampledTurn, text: str) -> None:
        """Append the sampled ids up to the token that completes `text`."""
        kept = _shortest_prefix(self._codec, turn.output_ids, text)
        self._owners += [len(self._turns)] * len(kept)
        self._tokens += kept
        self._response += self._codec.decode(kept)
        self._turns.append(turn)
        whole = len(kept) == len(turn.output_ids)
        self._eos = _sampled_eos(self._codec, self._turns) if whole else None

    def add_observation(self, text: str) -> None:
        """Tokenise `text` on its own and append it."""
        ids = self._codec.encode(text)
        self._tokens += ids
        self._owners += [UNSAMPLED] * len(ids)
        self._response += text

    def close(self, end_with_eos: bool, limit: int) -> TokenRecord:
        closing = self._codec.eos_id if end_with_eos and self._eos is None else None
        return _record(self._tokens, self._owners, self._turns, self._prompt_length, self._response, closing, limit)


def _owners(spans: Sequence[tuple[int, int]], ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Return for each span the index of the range that contains all of it, or UNSAMPLED. Both lists are sorted."""
    owners = []
    current = 0
    for start, end in spans:
        while current < len(ranges) and ranges[current][1] <= start:
            current += 1
        inside = current < len(ranges) and ranges[current][0] <= start and end <= ranges[current][1]
        owners.append(current if inside else UNSAMPLED)
    return owners


def _sampled_eos(codec: Codec, turns: Sequence[SampledTurn]) -> int | None:
    """Return the sampled special token that ended the last turn; None if no such token ended it."""
    if not turns or not turns[-1].output_ids or not turns[-1].ended_itself:
        return None
    last = turns[-1].output_ids[-1]
    return last if last in codec.special_ids else None


def _shortest_prefix(codec: Codec, ids: Sequence[int], text: str) -> list[int]:
    """Return the shortest prefix of `ids` whose text begins with `text`; all ids if the turn was not cut.

    The engine itself ends a generation at a stop string, so usually nothing is cut.
    """
    kept = list(ids)
    if codec.decode(kept) == text:
        return kept
    while kept and codec.decode(kept[:-1]).startswith(text):
        kept.pop()
    return kept


def _record(
    tokens: Sequence[int],
    owners: Sequence[int],
    turns: Sequence[SampledTurn],
    prompt_length: int,
    response: str,
    closing_eos: int | None,
    limit: int,
) -> TokenRecord:
    """Align the final tokens with the tokens that each turn sampled. `owners[t]` is the turn of token t.

    A token gets the log-prob and version with which it was sampled if the engine call of its turn had the same token
    after the same tokens. Any other token of a turn gets no log-prob, and the oldest version of the turn.
    """
    length = min(len(tokens), limit)
    final = np.array(tokens[:length], dtype=np.int32)
    owner = np.array(owners[:length], dtype=np.int32)
    logprobs = np.full(length, np.nan, dtype=np.float32)
    versions = np.full(length, UNSAMPLED, dtype=np.int32)
    differing = 0
    for index, turn in enumerate(turns):
        of_turn = owner == index
        versions[of_turn] = min(turn.versions, default=UNSAMPLED)
        differing += _count_differing(turn.output_ids, final[of_turn].tolist())
        start = len(turn.input_ids)
        end = _common_prefix(turn.ids, final)
        if end > start:
            as_sampled = start + np.flatnonzero(of_turn[start:end])
            logprobs[as_sampled] = np.array(turn.logprobs, dtype=np.float32)[as_sampled - start]
            versions[as_sampled] = np.array(turn.versions, dtype=np.int32)[as_sampled - start]
    routes = _routes(turns, final, owner)
    if closing_eos is not None and length < limit:
        final = np.append(final, np.int32(closing_eos))
        owner = np.append(owner, np.int32(len(turns) - 1))
        logprobs = np.append(logprobs, np.float32(np.nan))
        versions = np.append(versions, np.int32(UNSAMPLED))
        if routes is not None:
            routes = np.append(routes, np.full_like(routes[:1], unrouted(routes)), axis=0)
    return TokenRecord(
        tokens=final,
        prompt_length=min(prompt_length, length),
        loss_mask=owner != UNSAMPLED,
        rollout_logprobs=logprobs,
        versions=versions,
        turn_of_token=owner,
        tokens_differing=differing,
        response=response,
        truncated=length < len(tokens),
        routes=routes,
    )


def _routes(turns: Sequence[SampledTurn], final: NDArray[np.int32], owner: NDArray[np.int32]) -> Routes | None:
    """Return the routes of the final tokens; None if no turn has any. A later turn replaces those of an earlier one."""
    routes = no_routes(turns, len(final))
    for index, turn in enumerate(turns):
        if routes is None or turn.routes is None:
            continue
        ids, first, known = turn.ids, turn.routes_from, turn.routes_from + len(turn.routes)
        same = _common_prefix(ids, final)
        end = max(first, min(same, known))
        routes[first:end] = turn.routes[: end - first]
        # After a changed token, tokens of the turn count as unchanged from its end backwards: nothing finer is linear.
        own = np.flatnonzero(owner == index)
        tail = _common_prefix(turn.output_ids[::-1], final[own[::-1]])
        before = np.arange(len(ids) - tail, known)
        after = own[len(own) - tail :][: len(before)]
        changed = after >= same
        routes[after[changed]] = turn.routes[before[changed] - first]
    return routes


def no_routes(turns: Sequence[SampledTurn], length: int) -> Routes | None:
    """Return unknown routes of `length` tokens in the form of those of `turns`; None if no turn has any."""
    known = next((turn.routes for turn in turns if turn.routes is not None), None)
    return None if known is None else np.full((length, *known.shape[1:]), unrouted(known), known.dtype)


def known_routes(turns: Sequence[SampledTurn], input_ids: Sequence[int]) -> int:
    """Return the number of tokens at the beginning of `input_ids` whose routes `turns` have."""
    last = next((turn for turn in reversed(turns) if turn.routes is not None), None)
    if last is None or last.routes is None:
        return 0
    return min(last.routes_from + len(last.routes), _common_prefix(last.ids, np.array(input_ids, np.int32)))


def _count_differing(sampled: Sequence[int], trained: Sequence[int]) -> int:
    """Return the number of trained tokens outside a longest common subsequence of the two lists.

    Uses Hyyrö's bit-vectors ("Bit-parallel LCS-length computation revisited", 2004). This takes milliseconds for
    thousands of tokens, even if a collapsed policy repeats the same few tokens. A set bit of `free` stands for a
    trained token without a match so far.
    """
    if list(sampled[: len(trained)]) == list(trained):
        return 0
    places: dict[int, int] = {}
    for place, token in enumerate(trained):
        places[token] = places.get(token, 0) | 1 << place
    free = every = (1 << len(trained)) - 1
    for token in sampled:
        matching = free & places.get(token, 0)
        free = ((free + matching) | (free - matching)) & every
    return free.bit_count()


def _common_prefix(sampled: Sequence[int], final: NDArray[np.int32]) -> int:
    """Return the number of leading tokens that two sequences share."""
    length = min(len(sampled), len(final))
    unequal = np.flatnonzero(np.asarray(sampled[:length], dtype=np.int32) != final[:length])
    return int(unequal[0]) if len(unequal) else length


@dataclass(frozen=True, slots=True)
class PartialEpisode:
    """The whole turns of an interrupted episode, at least one. Resuming the episode needs nothing else.

    It has no turn if the episode had begun and cannot be resumed: it begins anew.

    `Recorder` rebuilds the context, in either token mode, from the turns and the question. Tokens of an incomplete turn
    are dropped and sampled again.

    Invariant: an episode that is interrupted between two turns and resumed ends with the same trajectory as without the
    interruption, if the later generations and observations are the same.
    """

    question_uid: str
    sample: int
    turns: tuple[Turn, ...]
    """Turns, each with its observation."""
    token_ids: NDArray[np.int32]
    """[sampled] ids as the engine returned them, turn after turn: `generated_tokens` per turn."""
    logprobs: NDArray[np.float32]
    """[sampled] natural log-probs under the sampling temperature."""
    versions: NDArray[np.int32]
    """[sampled] weight version that sampled each token."""
    ended_itself: NDArray[np.bool_]
    """[turns] `SampledTurn.ended_itself` of each turn."""
    routes: Routes | None = field(default=None, metadata={"added later": True})
    """`SampledTurn.routes` of all turns, joined; None if a turn has none."""


def begun_episode(question_uid: str, sample: int) -> PartialEpisode:
    """Return the progress of an episode that had begun and begins anew."""
    ids, logprobs, ended = np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.bool_)
    return PartialEpisode(question_uid, sample, (), ids, logprobs, ids, ended)


EpisodeProgress = Trajectory | PartialEpisode
"""A finished episode, or the whole turns of an unfinished episode."""
