"""Tests of the cassette's file: torn lines, calls in flight, a full disk and another writer."""

import asyncio
import fcntl
import logging
import resource
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlsys.apps.planner.virtual_time import run_virtually
from rlsys.errors import RunError
from rlsys.search.cassette import Cassette, CassetteFile, Header, RecordedCall
from rlsys.search.retrieval import SearchResult
from tests.support.jsonl import read_rows
from tests.support.virtual_time import virtually

from .scripted import EXTEND, RECORD, Script, found, tool, written


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_only_a_torn_last_line_is_lost(data: st.DataObject, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tape.jsonl"
    path.unlink(missing_ok=True)
    queries = ["Mali", "São Tomé", "Chad", "Niger"]
    file = CassetteFile(path, Header(3))
    for query in queries:
        file.append(RecordedCall(query, found(query), 1.0).line(with_passages=True))
    file.close()
    whole = path.read_bytes()
    ends = [number + 1 for number, byte in enumerate(whole) if byte == ord("\n")]
    cut = data.draw(st.integers(ends[0], len(whole)))
    # A line that lacks only its newline counts as whole.
    kept = queries[: sum(end - 1 <= cut for end in ends) - 1]
    path.write_bytes(whole[:cut])
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert Cassette.read(path).answers == {query: found(query) for query in kept}
    assert ("1 incomplete line" in caplog.text) == (cut not in ends and cut + 1 not in ends)

    file = CassetteFile(path, Header(3))
    file.append(RecordedCall("Togo", found("Togo"), 2.0).line(with_passages=True))
    file.close()
    assert Cassette.read(path).answers == {query: found(query) for query in [*kept, "Togo"]}


@virtually
async def test_a_cancelled_search_is_not_recorded_and_the_others_are(tmp_path: Path) -> None:
    async with tool(tmp_path / "tape.jsonl", RECORD, Script(takes_s=[1.0, 1.0, 3.0])) as recorder:
        first, second, third = (asyncio.create_task(recorder.search(query)) for query in ("Mali", "Chad", "Togo"))
        await asyncio.sleep(1.2)  # The first search asks for the health, the second waits for it.
        first.cancel()
        await second
        third.cancel()
        await asyncio.gather(first, third, return_exceptions=True)
    assert list(Cassette.read(tmp_path / "tape.jsonl").answers) == ["Chad"]


@pytest.mark.parametrize(
    ("close_s", "recorded"),
    [(0.7, None), (1.2, None), (1.8, ["Mali"]), (2.1, ["Mali", "Chad"])],
    ids=["before an answer", "while the health is asked", "between two answers", "after all"],
)
def test_calls_in_flight_at_close_are_answered_and_not_recorded(
    close_s: float, recorded: list[str] | None, tmp_path: Path
) -> None:
    path = tmp_path / "tape.jsonl"

    async def record() -> list[SearchResult]:
        recorder = tool(path, RECORD, Script(takes_s=[1.0, 2.0]))
        searches = [asyncio.create_task(recorder.search(query)) for query in ("Mali", "Chad")]
        await asyncio.sleep(close_s)
        await recorder.close()
        await recorder.close()
        return await asyncio.gather(*searches)

    assert run_virtually(record()) == [found("Mali"), found("Chad")]
    if recorded is None:
        assert not path.exists()
    else:
        assert list(Cassette.read(path).answers) == recorded


@virtually
async def test_a_full_disk_raises_a_run_error_and_keeps_the_cassette_whole(tmp_path: Path) -> None:
    path = written(tmp_path / "tape.jsonl", [1.0])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))
    try:
        for _ in range(2):  # a part of the first line fits on the disk, then nothing
            async with tool(path, EXTEND, Script()) as extender:
                with pytest.raises(RunError, match=r"tape\.jsonl"):
                    await extender.search("Chad")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert Cassette.read(path).answers == {"Mali": found("Mali")}


def test_an_append_waits_until_another_writer_has_finished_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writer has the lock and has written half a line; it writes the rest when the append asks for the lock."""
    path = written(tmp_path / "tape.jsonl", [1.0])
    line = RecordedCall("Chad", found("Chad"), 2.0).line(with_passages=True)
    rest = [line[20:]]
    asked: list[int] = []
    with path.open("ab", buffering=0) as other:
        other.write(line[:20])

        def flock(_: int, operation: int) -> None:
            asked.append(operation)
            other.write(rest.pop() if rest else b"")

        monkeypatch.setattr(fcntl, "flock", flock)
        file = CassetteFile(path, Header(3))
        file.append(RecordedCall("Togo", found("Togo"), 2.0).line(with_passages=True))
        file.close()
    assert asked == [fcntl.LOCK_EX, fcntl.LOCK_UN] * 2
    assert [row.get("query") for row in read_rows(path)] == [None, "Mali", "Chad", "Togo"]
