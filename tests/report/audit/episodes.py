"""Makes kept episodes from chosen token ids with the real book-keeping.

Every log-prob is a function of the token and all tokens before it (`drawn_logprob` for the engine, `trained_logprob`
for the trained policy), so that a test can recompute any of them.
"""

import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlsys.config.schema import TokenMode
from rlsys.observe.kept import Pieces, TrajectoryRecord
from rlsys.rollout.agent.tokens import Codec, SampledTurn, open_context
from tests.support.bpe import build_tokenizer
from tests.support.made_run import Maker, Size

TOKENIZER = build_tokenizer()
CODEC = Codec(TOKENIZER)
MADE = Maker(Size(steps=1)).kept(1, 0, 0)
"""A kept episode. The episodes built here take from it every field that they do not set themselves."""
POLICY = 3
"""The version that is trained."""


def by_letter(text: str) -> list[int]:
    """Token ids of `text`, each letter encoded separately."""
    return [token for letter in text for token in CODEC.encode(letter)]


def drawn_logprob(prefix: Sequence[int]) -> float:
    """Engine's log-prob of the last token of `prefix`: a multiple of 1/1024, so that float32 sums are exact."""
    return -(zlib.crc32(np.array(prefix, np.int32).tobytes()) % 8192) / 1024


def trained_logprob(prefix: Sequence[int]) -> float:
    """Trained policy's log-prob of the last token of `prefix`."""
    return -(zlib.crc32(np.array([7, *prefix], np.int32).tobytes()) % 8192) / 1024


def played(
    prompt: str,
    turns: Sequence[tuple[list[int], str]],
    mode: TokenMode = TokenMode.retokenize,
    *,
    versions: Sequence[int] | None = None,
    eos: bool = False,
    uid: str = "q",
    step: int = POLICY + 1,
) -> TrajectoryRecord:
    """An episode of `turns` (drawn ids, observation); turn i has version `versions[i]`, by default `POLICY`."""
    context = open_context(mode, CODEC, prompt)
    of_turns = []
    for number, (drawn, observation) in enumerate(turns):
        inputs = context.input_ids()
        logprobs = [drawn_logprob([*inputs, *drawn[: at + 1]]) for at in range(len(drawn))]
        version = POLICY if versions is None else versions[number]
        text = CODEC.decode(drawn)
        context.add_turn(SampledTurn(inputs, drawn, logprobs, [version] * len(drawn), True), text)
        context.add_observation(observation)
        sampled = {"sampled_ids": np.array(drawn, np.int32), "sampled_logprobs": np.array(logprobs, np.float32)}
        of_turns.append(replace(MADE.turns[0], text=text, observation=observation, **sampled))
    record = context.close(eos, 10_000)
    tokens = record.tokens.tolist()
    old = [trained_logprob(tokens[: at + 1]) if own else 0.0 for at, own in enumerate(record.loss_mask)]
    return replace(
        MADE,
        step=step,
        question_uid=uid,
        prompt=prompt,
        policy_version=step - 1,
        token_ids=record.tokens,
        prompt_length=record.prompt_length,
        pieces=Pieces(TOKENIZER.decode)(tokens[record.prompt_length :]),
        loss_mask=record.loss_mask,
        turn_of_token=record.turn_of_token,
        versions=record.versions,
        rollout_logprobs=record.rollout_logprobs,
        old_logprobs=np.array(old, np.float32),
        ref_logprobs=None,
        advantages=np.zeros(len(tokens), np.float32),
        turns=tuple(of_turns),
    )


def with_differences(by_version: dict[int, float]) -> TrajectoryRecord:
    """An episode with a turn of each version in `by_version`, which gives the number to add to the turn's log-probs."""
    turn = (CODEC.encode("Paris"), "\n")
    one = played("x", [turn] * len(by_version), versions=list(by_version))
    known = np.isfinite(one.rollout_logprobs)
    offsets = np.array([by_version.get(int(version), 0.0) for version in one.versions], np.float32)
    return replace(one, old_logprobs=np.where(known, one.rollout_logprobs + offsets, 0.0).astype(np.float32))
