"""Tests of kept trajectories: exact rows, damage, texts of tokens, and writing during training."""

import asyncio
import errno
import gzip
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rlsys.data.trajectory import Action, Group, Sample, Turn
from rlsys.observe import kept as module
from rlsys.observe.kept import (
    Pieces,
    TrajectoryRecord,
    TrajectoryWriter,
    read_row,
    read_trajectories,
    remove_trajectories_after,
    select_trajectories,
    trajectory_file,
    trajectory_steps,
    write_row,
    write_trajectories,
)
from tests.support.trajectories import question, rewarded, same, trajectory
from tests.support.waiting import let_tasks_run

NAN = float("nan")
SAMPLED = [NAN, -1.5, -0.1, NAN, -1e-7, NAN]


def decode_ids(ids: Sequence[int]) -> str:
    return "".join(f"<{one}>" for one in ids)


def scored(number: int = 0, uid: str = "q:1") -> Sample:
    """An episode of two turns: a search and a right answer."""
    turns = [
        Turn("<search>a</search>", Action.SEARCH, "a", "hit", 2, 1, 0, 0.5, 0.25, "", 7),
        Turn("<answer>yes</answer>", Action.ANSWER, "yes", "", 1, 4, 3, 0.1, 0.0),
    ]
    mask, turn_of_token = [False, True, True, False, True, True], [-1, 0, 0, -1, 1, 1]
    one = trajectory(
        range(6), mask, uid=uid, sample=number, turns=turns, rollout_logprobs=SAMPLED, turn_of_token=turn_of_token
    )
    drawn = np.array([1, 2, 4], np.int32)
    one = replace(one, sampled_ids=drawn, sampled_logprobs=np.array(SAMPLED, np.float32)[drawn])
    scores = np.linspace(-3, 0, 6, dtype=np.float32)
    return replace(rewarded(one, 1.0), old_logprobs=scores, parts={"em": 1.0}, advantages=scores / np.float32(3))


def group(number: int, samples: int = 3) -> Group:
    uid = f"q:{number}"
    return Group(question(number), tuple(scored(of, uid) for of in range(samples)))


def kept_one() -> TrajectoryRecord:
    return next(select_trajectories([group(1, 1)], 4, None, decode_ids))


def test_trajectory_is_kept_turn_by_turn() -> None:
    one = kept_one()
    assert (one.answer, one.exact, one.reward, one.parts, one.policy_version) == ("yes", True, 1.0, {"em": 1.0}, 3)
    assert one.pieces == ("<1>", "<2>", "<3>", "<4>", "<5>"), "the prompt has one token"
    assert [turn.sampled_ids.tolist() for turn in one.turns] == [[1, 2], [4]]
    assert [turn.observation for turn in one.turns] == ["hit", ""]


@pytest.mark.parametrize(
    ("groups", "most", "uids"),
    [
        (6, None, [0, 1, 2, 3, 4, 5]),
        (6, 0, []),
        (6, 1, [0]),  # A group is kept whole, even if it exceeds the limit.
        (6, 11, [0, 2, 4]),
    ],
)
def test_kept_groups_are_whole_and_spread_over_the_step(groups: int, most: int | None, uids: list[int]) -> None:
    samples = 3
    found = select_trajectories([group(number, samples) for number in range(groups)], 1, most, decode_ids)
    expected = [(f"q:{uid}", sample) for uid in uids for sample in range(samples)]
    assert [(one.question_uid, one.sample) for one in found] == expected


FLOATS = arrays(np.float32, 6, elements=st.floats(width=32, allow_infinity=False))


@given(FLOATS, st.none() | FLOATS, st.text(st.characters()), st.dictionaries(st.text(), st.integers() | st.text()))
@settings(max_examples=40)
def test_row_comes_back_bit_for_bit(
    logprobs: np.ndarray, weights: np.ndarray | None, text: str, extra: dict[str, int | str]
) -> None:
    pieces = (text, "\u2028\n", "", "", "")
    logprobs = np.where(np.isnan(logprobs), np.float32("nan"), logprobs)  # The file stores any NaN as null.
    weights = None if weights is None else np.nan_to_num(weights)
    one = replace(
        kept_one(), old_logprobs=logprobs, weights=weights, prompt=text + "\ud83d", pieces=pieces, extra=extra
    )
    line = write_row(replace(one, answer=None))
    assert line.count(b"\n") == 1
    assert same(read_row(line), replace(one, answer=None))


def test_steps_come_back_in_order_and_later_ones_can_be_removed(tmp_path: Path) -> None:
    problems: list[str] = []
    assert list(read_trajectories(tmp_path, problems.append)) == []
    for step in (12, 3, 4):
        write_trajectories(tmp_path, step, select_trajectories([group(step)], step, None, decode_ids))
    read = [(one.step, one.question_uid) for one in read_trajectories(tmp_path, problems.append)]
    assert read == [(step, f"q:{step}") for step in (3, 4, 12) for _ in range(3)]
    (tmp_path / "trajectories" / ".step_000012.jsonl.gz.123.part").touch()
    remove_trajectories_after(tmp_path, 3)
    assert [path.name for path in (tmp_path / "trajectories").iterdir()] == ["step_000003.jsonl.gz"]
    assert problems == []


def test_damage_loses_only_the_rows_that_it_hit(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_trajectories(tmp_path, step, select_trajectories([group(step)], step, None, decode_ids))
    rows = gzip.decompress(trajectory_file(tmp_path, 1).read_bytes()).splitlines(keepends=True)
    rows[1] = b"[1]\n"
    trajectory_file(tmp_path, 1).write_bytes(gzip.compress(b"".join(rows)))
    whole = trajectory_file(tmp_path, 2).read_bytes()
    trajectory_file(tmp_path, 2).write_bytes(whole[: len(whole) // 2])
    problems: list[str] = []
    found = [(one.step, one.sample) for one in read_trajectories(tmp_path, problems.append)]
    assert [one for one in found if one[0] != 2] == [(1, 0), (1, 2), (3, 0), (3, 1), (3, 2)]
    assert [problem.split(" is ")[0] for problem in problems] == [
        "trajectories/step_000001.jsonl.gz, row 2",
        "trajectories/step_000002.jsonl.gz",
    ]


def byte_level(ids: Sequence[int]) -> str:
    """Text of one-byte tokens, as byte-level BPE decodes them."""
    return bytes(ids).decode("utf-8", "replace")


def sentence_pieces(ids: Sequence[int]) -> str:
    """Text of one-word tokens; the space before the first word is dropped."""
    return "".join(f" w{one}" for one in ids).removeprefix(" ")


@given(st.lists(st.integers(0, 255), max_size=60))
@pytest.mark.parametrize("decode", [byte_level, sentence_pieces])
@settings(max_examples=40)
def test_pieces_join_to_the_whole_text(decode: Callable[[Sequence[int]], str], ids: list[int]) -> None:
    pieces = Pieces(decode)(ids)
    assert (len(pieces), "".join(pieces)) == (len(ids), decode(ids))


@given(st.text(st.characters(exclude_characters="\ufffd", codec="utf-8"), max_size=40))
@settings(max_examples=40)
def test_character_belongs_to_the_last_of_its_tokens(text: str) -> None:
    expected = [part for char in text for part in [*[""] * (len(char.encode()) - 1), char]]
    assert list(Pieces(byte_level)(list(text.encode()))) == expected


class GatedWriter:
    def __init__(self) -> None:
        self.go, self.begun = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, run_dir: Path, step: int, kept: Iterable[TrajectoryRecord]) -> None:
        self.begun.release()
        assert self.go.acquire(timeout=300)
        write_trajectories(run_dir, step, kept)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[GatedWriter]:
    writes = GatedWriter()
    monkeypatch.setattr(module, "write_trajectories", writes)
    yield writes
    writes.go.release(9)


@pytest.fixture
def keeper(tmp_path: Path) -> TrajectoryWriter:
    return TrajectoryWriter(tmp_path, lambda ids: str(list(ids)))


async def still_waits(waiting: asyncio.Task[None]) -> bool:
    """Tell if `waiting` is still pending after other tasks have run."""
    await let_tasks_run()
    return not waiting.done()


async def test_writing_runs_beside_training_and_the_next_step_waits_for_it(
    keeper: TrajectoryWriter, slow: GatedWriter, tmp_path: Path
) -> None:
    await keeper.begin(1, [group(1)], None)  # The call returns before anything is written.
    assert await asyncio.to_thread(slow.begun.acquire, timeout=300)
    second = asyncio.create_task(keeper.begin(2, [group(2)], None))
    assert await still_waits(second)
    slow.go.release()
    await second
    assert trajectory_steps(tmp_path) == [1], "the previous step must be on disk"
    finished = asyncio.create_task(keeper.finish())
    assert await still_waits(finished), "a checkpoint must wait"
    slow.go.release()
    await finished
    assert trajectory_steps(tmp_path) == [1, 2]
    keeper.close()


def test_closing_waits_for_the_last_trajectories(keeper: TrajectoryWriter, slow: GatedWriter, tmp_path: Path) -> None:
    """A run that has failed has no event loop any more."""
    asyncio.run(keeper.begin(1, [group(1)], None))
    closing = threading.Thread(target=keeper.close)
    closing.start()
    assert slow.begun.acquire(timeout=600)
    assert trajectory_steps(tmp_path) == []
    assert closing.is_alive()
    slow.go.release()
    closing.join(600)
    assert trajectory_steps(tmp_path) == [1]


async def test_full_disk_gives_one_warning_and_ends_the_keeping(
    keeper: TrajectoryWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def train(*steps: int) -> None:
        for step in steps:
            await keeper.begin(step, [group(step)], None)
        await keeper.finish()

    await train(1)
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        await train(2, 3)
    await train(4)
    keeper.close()
    assert [path.name for path in (tmp_path / "trajectories").iterdir()] == ["step_000001.jsonl.gz"]
    (record,) = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert str(tmp_path / "trajectories" / "step_000002.jsonl.gz") in record.getMessage()
