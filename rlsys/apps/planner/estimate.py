"""Estimates the stages of a step by formulas, without simulation: to rank placements, and to fit reached shares. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from statistics import fmean

from rlsys.cluster.planning.work import CallCosts, EngineCosts
from rlsys.trainer.batches import SampleSize


def generation_s(engine: EngineCosts, lengths: Sequence[float], prompt: float, requests: float) -> float:
    """Return the seconds in which an engine generates `requests` responses, whose lengths are like the sorted `lengths`.

    As many as fit run at a time; the last ones end one after the other. Infinite if the cache has no room for one.
    """
    if not requests:
        return 0.0
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


def packed(lengths: Sequence[float], budget: int) -> float:
    """Return the mean number of samples in a micro-batch of at most `budget` tokens, by first fit, the longest first.

    A sample that is longer than `budget` is alone. `lengths` are sorted.
    """
    rooms: list[float] = []
    for length in reversed(lengths):
        at = next((number for number, room in enumerate(rooms) if room >= length), None)
        if at is None:
            rooms.append(budget - length)
        else:
            rooms[at] -= length
    return len(lengths) / len(rooms)


def calls_s(call: CallCosts, size: SampleSize, samples: float, held: float, updates: int) -> float:
    """Return the seconds in which a Megatron group works on `samples` of one `size` on each of its data-parallel ranks.

    A micro-batch holds `held` of them. `updates` is the number of times that the pipeline drains: optimiser steps, or calls.
    """
    held = min(held, max(1.0, samples))
    one = call.alike_s(size, held)
    return max(1.0, samples) / held * one + updates * ((call.stages - 1) * one + call.call_s + call.apply_s)
