"""Test of a training step beside the check of the search server."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rlsys.config.schema import RunConfig
from rlsys.errors import RunError
from rlsys.orchestrator.run import Run
from tests.support.virtual_time import virtually


@virtually
async def test_search_server_that_stays_away_ends_a_step_that_waits_for_groups() -> None:
    async def take(*_: Any) -> None:
        await asyncio.Event().wait()

    async def check() -> None:
        raise RunError("the search server does not answer")

    actor = SimpleNamespace(fills_micro_batches=lambda _: True)
    groups = SimpleNamespace(count_to=lambda _: None, trained={"actor": actor}, devices=None)
    parts: dict[str, Any] = dict.fromkeys(("weights", "supervisor", "elastic", "evaluator", "saver", "rewards", "kl"))
    parts |= {
        "groups": groups,
        "log": SimpleNamespace(begin_step=lambda: None, faults=SimpleNamespace()),
        "questions_sha256": {},
    }
    parts |= {"pipeline": SimpleNamespace(take=take), "search": SimpleNamespace(check=check)}
    with pytest.raises(ExceptionGroup) as found:
        await Run(config=RunConfig(), **parts).train_step(1)
    assert isinstance(found.value.exceptions[0], RunError)
