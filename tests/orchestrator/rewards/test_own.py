"""Terms of the user's own: what they may return, and the sentence for what they may not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from rlsys.config.schema import CompatConfig, RewardConfig, TaskConfig
from rlsys.errors import RunError, UserError
from rlsys.orchestrator.rewards.reward import Calls, OwnTerm, Rewards, load_term
from tests.orchestrator.rewards.episodes import episode, read, think

HERE = "tests.orchestrator.rewards.own_terms"
TWO_TURNS = episode((think("search", "Mali"), "Bamako"), think("answer", "Bamako"))


@pytest.fixture
async def calls() -> AsyncIterator[Calls]:
    made = Calls(timeout_s=60.0)
    yield made
    made.close()


async def value(name: str, calls: Calls, *said: str) -> Sequence[float]:
    reading = read(episode(*said) if said else TWO_TURNS, "Bamako", "Bko")
    return await asyncio.wait_for(OwnTerm(f"{HERE}.{name}", calls)(reading), 20)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("answers", [0.0, 5.0]),
        ("per_turn", [0.0, 1.0]),
        ("as_array", [1.0, 1.0]),
        ("in_time", [0.0, 0.5]),
        ("hidden_coroutine", [0.0, 0.5]),
    ],
)
async def test_what_a_term_gives(name: str, expected: list[float], calls: Calls) -> None:
    assert await value(name, calls) == expected


async def test_an_episode_without_turns_has_a_place_for_it(calls: Calls) -> None:
    reading = read(episode())
    assert await OwnTerm(f"{HERE}.per_turn", calls)(reading) == [0.0]
    assert await OwnTerm(f"{HERE}.answers", calls)(reading) == [3.0]
    assert await OwnTerm(f"{HERE}.too_many", calls)(reading) == [1.0], "or gives one for that place"


async def test_plain_functions_run_beside_each_other_in_threads(calls: Calls) -> None:
    """Each waits for the other, so on the event loop the first would never return."""
    both = [value("meets_another", calls) for _ in range(2)]
    assert await asyncio.gather(*both) == [[0.0, 1.0], [0.0, 1.0]]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fails", "raised KeyError: 'no such"),
        ("stops", "StopIteration"),
        ("times_out_itself", "raised TimeoutError: no server"),
        ("yields", "returned <generator"),
        ("not_a_number", "returned nan: a finite number"),
        ("one_infinite", "returned [inf, 0.0]: a finite number"),
        ("nothing", "returned None: a finite number"),
        ("text", "returned '1.0': a finite number"),
        ("nested", "returned [[1.0]]: a finite number"),
        ("too_many", "returned [1.0, 1.0, 1.0]: one number for each of the 2 turns"),
    ],
)
async def test_a_bad_value_is_one_sentence(name: str, said: str, calls: Calls) -> None:
    with pytest.raises(RunError) as error:
        await value(name, calls)
    sentence = str(error.value)
    assert sentence.startswith(f"reward.terms.{HERE}.{name}, asked about sample 2 of q:1,")
    assert said in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_package.terms.brevity", "No module named 'no_such_package'"),
        (f"{HERE}.brevity", "has no function brevity"),
        (f"{HERE}.NUMBER", "has no function NUMBER"),
        (f"{HERE}.one_argument", "does not take two arguments"),
        (".brevity", "cannot be imported"),
        ("..", "cannot be imported"),
        ("own.", "cannot be imported"),
        ("a b.c", "cannot be imported"),
    ],
)
def test_a_function_that_cannot_be_had_is_one_sentence(name: str, said: str) -> None:
    with pytest.raises(UserError, match=r"^reward\.terms\.") as error:
        load_term(name)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["hangs", "hangs_later", "never_ready", "blocks_its_loop"])
async def test_a_call_that_does_not_return_ends_the_run_with_a_sentence(name: str) -> None:
    rewards = Rewards(RewardConfig({f"{HERE}.{name}": 1.0}, own_timeout_s=0.2), TaskConfig(), CompatConfig())
    reading = read(TWO_TURNS)
    async with asyncio.timeout(30):
        with pytest.raises(RunError) as error:
            await rewards.score(reading.question, reading.trajectory)
        await rewards.close()
    sentence = str(error.value)
    assert sentence.startswith(f"reward.terms.{HERE}.{name}, asked about sample 2 of q:1,")
    assert "reward.own_timeout_s=0.2 s" in sentence
    assert "\n" not in sentence


async def test_async_terms_share_a_loop_that_is_not_that_of_the_episodes(calls: Calls) -> None:
    first, second = await value("on_which_loop", calls), await value("on_which_loop", calls)
    assert first == second
    assert first[-1] != id(asyncio.get_running_loop())


def test_a_module_that_fails_says_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_terms.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="ZeroDivisionError: division by zero"):
        load_term("broken_terms.brevity")
    assert "broken_terms" not in sys.modules


def test_a_function_that_never_returns_does_not_keep_the_process() -> None:
    program = """
import asyncio, threading
from rlsys.orchestrator.rewards.reward import in_daemon_thread

async def main():
    try:
        await asyncio.wait_for(in_daemon_thread(threading.Event().wait), 0.05)
    except TimeoutError:
        print("went on")

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "went on\n"
    assert done.stderr == ""
