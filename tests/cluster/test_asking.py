"""Questions to Ray that are answered, refused, or never answered."""

from __future__ import annotations

import threading

import pytest

from rlsys.cluster.runtime import answer
from rlsys.errors import RunError


async def test_an_answer_a_refusal_and_silence_are_told_apart() -> None:
    assert await answer(lambda: 3, 5) == 3

    def refuse() -> None:
        raise RuntimeError("no such node")

    with pytest.raises(RunError, match=r"refuses to answer \(no such node\)"):
        await answer(refuse, 5)
    never = threading.Event()
    with pytest.raises(RunError, match="has not answered for 0 s"):
        await answer(never.wait, 0.05)
    never.set()
