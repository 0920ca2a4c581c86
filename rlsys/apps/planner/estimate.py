"""Estimates the stages of a step by formulas, without simulation: to rank placements, and to fit reached shares. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from statistics import fmean

from rlsys.apps.planner.costs import CallCosts
from rlsys.apps.planner.engine import EngineCosts
from rlsys.trainer.batches import SampleSize


def generation_s(engine: EngineCosts, lengths: Sequence[float], prompt: float, requests: float) -> float:
    """Return the seconds in which an engine generates `requests` responses, whose lengths are like the sorted `lengths`.

    As many as fit run at a time; the last ones end one after the other. Infinite if the cache has no room for one.
    """
    mean = fmean(lengths)
    room = min(requests, engine.max_running, engine.cache_tokens / (prompt + mean / 2))
    if room < min(1, requests):
        return inf
    first = engine.decode_s(max(1, round(room)), room * (prompt + mean / 2))[0]
    seconds = (requests - room) * mean / room * first + requests * engine.fill_s(prompt, 0)
    before = 0.0
    for number, length in enumerate(lengths):
        running = room * (1 - number / len(lengths))
        cached = running * (prompt + (before + length) / 2)
        seconds += (length - before) * engine.decode_s(max(1, round(running)), cached)[0]
        before = length
    return seconds


def steady_generation_s(
    engine: EngineCosts, lengths: Sequence[float], prompt: float, requests: float, in_flight: float
) -> float:
    """Return the seconds in which an engine ends `requests` responses while others begin; `in_flight` of them at a time.

    A long response is in flight for longer: the mean length of those in flight so far is the mean square / twice the mean.
    """
    mean = fmean(lengths)
    context = prompt + fmean(length * length for length in lengths) / (2 * mean)
    room = min(in_flight, engine.max_running, engine.cache_tokens / context)
    if room < 1:
        return inf
    step = engine.decode_s(max(1, round(room)), room * context)[0]
    return requests * (mean / room * step + engine.fill_s(prompt, 0))


def calls_s(call: CallCosts, size: SampleSize, samples: float, micro_batch_tokens: int, updates: int) -> float:
    """Return the seconds in which a Megatron group works on `samples` of one `size` on each of its data-parallel ranks.

    `updates` is the number of times that the pipeline drains: optimiser steps, or calls.
    """
    held = min(max(1, micro_batch_tokens // size.tokens), max(1.0, samples))
    whole = max(1, round(held))  # A micro-batch is less efficient the smaller it is, so its samples count together.
    one = call.batch_s([size] * whole) * held / whole
    return max(1.0, samples) / held * one + updates * ((call.stages - 1) * one + call.call_s + call.apply_s)
