"""Tests of user-defined reward terms: values, errors, and functions that never return."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from rlsys.config.schema import CompatConfig, RewardConfig, TaskConfig
from rlsys.errors import Code
from rlsys.orchestrator.rewards.reward import CustomTerm, Rewards, TimedCalls, load_term
from tests.support.refusals import refused
from tests.support.written_episodes import episode, read, think

HERE = "tests.orchestrator.rewards.own_terms"
TWO_TURNS = episode((think("search", "Mali"), "Bamako"), think("answer", "Bamako"))


@pytest.fixture
async def calls() -> AsyncIterator[TimedCalls]:
    made = TimedCalls(timeout_s=60.0)
    yield made
    made.close()


async def value(name: str, calls: TimedCalls, *said: str) -> Sequence[float]:
    reading, path = read(episode(*said) if said else TWO_TURNS, "Bamako", "Bko"), f"{HERE}.{name}"
    return await asyncio.wait_for(CustomTerm(path, RewardConfig({path: 1.0}), calls)(reading), 600)


@pytest.mark.parametrize(
    ("name", "expected"), [("answers", [0.0, 5.0]), ("per_turn", [0.0, 1.0]), ("in_time", [0.0, 0.5])]
)
async def test_term_returns_one_number_or_one_per_turn(name: str, expected: list[float], calls: TimedCalls) -> None:
    assert await value(name, calls) == expected


async def test_plain_functions_run_in_daemon_threads_at_the_same_time(calls: TimedCalls) -> None:
    """Each function blocks until the other is called, so the first would never return if it ran on the event loop."""
    both = [value("meets_another", calls) for _ in range(2)]
    assert await asyncio.gather(*both) == [[0.0, 1.0], [0.0, 1.0]]


FAILING = [
    *("fails", "stops", "exits", "exits_later", "times_out_itself", "yields"),
    *("not_a_number", "text", "too_large", "with_gradient", "too_many"),
]


@pytest.mark.parametrize("name", FAILING)
async def test_failure_or_invalid_value_names_the_term_and_the_sample(name: str, calls: TimedCalls) -> None:
    with refused("user_code", f"reward.terms.{HERE}.{name}") as error:
        await value(name, calls)
    assert str(error.value).startswith(f"reward.terms.{HERE}.{name} ")
    assert " sample 2 of q:1" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("no_such_package.terms.brevity", "user_code"),
        (f"{HERE}.brevity", "unknown"),
        (f"{HERE}.NUMBER", "user_code"),
        (f"{HERE}.one_argument", "user_code"),
        (".brevity", "malformed"),
        ("broken_terms.brevity", "user_code"),
    ],
)
def test_function_that_cannot_be_loaded_is_refused(
    name: str, code: Code, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_terms.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with refused(code, f"reward.terms.{name}"):
        load_term(name, RewardConfig({name: 1.0}))
    assert "broken_terms" not in sys.modules


async def test_each_term_that_is_computed_counts_as_progress() -> None:
    terms = {"exact_match": 1.0, f"{HERE}.answers": 1.0, f"{HERE}.per_turn": 1.0}
    rewards, reading = Rewards(RewardConfig(terms), TaskConfig(), CompatConfig()), read(TWO_TURNS)
    await rewards.score(reading.question, reading.trajectory)
    assert rewards.finished == len(terms)
    await rewards.close()


@pytest.mark.parametrize("name", ["hangs", "never_ready", "blocks_its_loop"])
async def test_call_that_does_not_return_ends_the_run(name: str) -> None:
    rewards = Rewards(RewardConfig({f"{HERE}.{name}": 1.0}, custom_timeout_s=0.2), TaskConfig(), CompatConfig())
    reading = read(TWO_TURNS)
    with refused("user_code", f"reward.terms.{HERE}.{name}"):
        await rewards.score(reading.question, reading.trajectory)
    await rewards.close()


@pytest.mark.parametrize(("name", "expected"), [("per_turn", [0.0]), ("too_many", [1.0])])
async def test_episode_without_turns_has_one_place_for_a_term(
    name: str, expected: list[float], calls: TimedCalls
) -> None:
    path = f"{HERE}.{name}"
    assert await CustomTerm(path, RewardConfig({path: 1.0}), calls)(read(episode())) == expected
