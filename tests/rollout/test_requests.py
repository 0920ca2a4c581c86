"""A streamed answer of SGLang: what its parts come to, and what is no answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from rlsys.errors import RunError
from rlsys.rollout.engine import read_stream


def part(*tokens: int, finish: dict[str, Any] | None = None) -> dict[str, Any]:
    """As SGLang repeats what it has said so far."""
    logprobs = [(-0.5, token, None) for token in tokens]
    return {"meta_info": {"output_token_logprobs": logprobs, "finish_reason": finish}}


async def stream(*parts: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    async def told() -> AsyncIterator[dict[str, Any]]:
        for part in parts:
            yield part

    return told()


async def test_the_last_part_is_the_answer_and_all_are_heard() -> None:
    heard: list[list[int]] = []
    last = part(1, 2, 3, finish={"type": "stop"})
    assert await read_stream(stream(part(1), last), heard.append) == last
    assert heard == [[1], [1, 2, 3]]


async def test_one_that_was_aborted_here_is_what_there_is() -> None:
    last = part(1, finish={"type": "abort", "message": "Aborted", "status_code": None})
    assert await read_stream(stream(part(1), last), lambda _: None) == last


@pytest.mark.parametrize("status", [400, 500, 503])
async def test_a_refusal_is_raised_with_its_reason(status: int) -> None:
    reason = {"type": "abort", "message": "The input is too long.", "status_code": status}
    refused = {"meta_info": {"finish_reason": reason}}
    with pytest.raises(RunError, match=r"^SGLang has not answered: The input is too long\.$"):
        await read_stream(stream(part(1), refused), lambda _: None)


async def test_nothing_at_all_is_raised() -> None:
    with pytest.raises(RunError, match="ended before it began"):
        await read_stream(stream(), lambda _: None)
