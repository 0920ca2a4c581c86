"""Requests to an engine for one turn, and its answers. Pure: SGLang's side of it is plain values."""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable
from typing import Any, Protocol

from rlsys.config.schema import SamplingConfig
from rlsys.errors import RunError
from rlsys.rollout.agent.episode import Generation, TurnSampling

Heard = Callable[[list[int]], None]
"""Told what a turn has so far, each time that there is more: all of its tokens, not the new ones alone."""


class Streaming(Protocol):
    """A generator that can be followed."""

    async def generate(
        self, input_ids: list[int], sampling: TurnSampling, rid: str, heard: Heard | None = None
    ) -> Generation:
        """As an episode's `Generator`; `heard` is called in the event loop while the tokens come."""


def in_training(rollouts: SamplingConfig) -> TurnSampling:
    """The sampling of turns of rollouts."""
    return TurnSampling(rollouts.temperature, rollouts.top_p, rollouts.top_k, tuple(rollouts.stop))


def of_answers(rollouts: SamplingConfig, temperature: float, *, as_rollouts: bool) -> TurnSampling:
    """The sampling of turns of an evaluation: at `temperature`, 0 is greedy, from the whole vocabulary.

    `as_rollouts`, which is `compat.sampled_validation`, draws them as in training, whatever temperature is asked for.
    """
    return in_training(rollouts) if as_rollouts else TurnSampling(temperature, stop=tuple(rollouts.stop))


def sampling_params(sampling: TurnSampling, eos_id: int) -> dict[str, Any]:
    """SGLang's parameters for a turn, which its stop strings or `eos_id` end."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "stop": list(sampling.stop),
        "no_stop_trim": True,
        "stop_token_ids": [eos_id],
        "spaces_between_special_tokens": False,
    }


def token_ids(output: dict[str, Any]) -> list[int]:
    """The sampled tokens of an answer, or of a part of one, in which SGLang repeats what it said before."""
    return [token for _, token, _ in output["meta_info"]["output_token_logprobs"]]


async def followed(call: Awaitable[AsyncIterable[dict[str, Any]]], heard: Heard) -> dict[str, Any]:
    """The last part of a streamed answer, which is the whole; `heard` is told of each.

    Raises RunError, with SGLang's reason, for a request that was refused or given up, and where nothing came. One that
    somebody here has aborted is an answer, as far as it came.
    """
    output: dict[str, Any] = {}
    async for output in await call:
        finish = output["meta_info"].get("finish_reason") or {}
        if finish.get("status_code"):
            raise RunError(f"SGLang has not answered: {str(finish.get('message')).rstrip('.')}.")
        if "output_token_logprobs" in output["meta_info"]:
            heard(token_ids(output))
    if not output:
        raise RunError("SGLang has not answered: its stream ended before it began.")
    return output


def as_generation(output: dict[str, Any]) -> Generation:
    """Read a whole answer. Raises RunError where SGLang does not say which version sampled each token."""
    meta, sampled = output["meta_info"], token_ids(output)
    # A version that is guessed would hide a stale token, so the spans [start, end) must cover all.
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": len(sampled)}]
    versions = [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
    if len(versions) != len(sampled):
        raise RunError(f"SGLang names versions for {len(versions)} of the {len(sampled)} tokens of {meta['id']}.")
    return Generation(
        token_ids=sampled,
        logprobs=[logprob for logprob, _, _ in meta["output_token_logprobs"]],
        finish=meta["finish_reason"]["type"],
        # SGLang leaves it out for a request that was aborted while it waited.
        cached_tokens=meta.get("cached_tokens", 0),
        versions=versions,
    )
