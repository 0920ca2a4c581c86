"""Tests of cassettes: replay gives the recorded results and latencies, extension records what is missing."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlsys.apps.planner.virtual_time import now, run_virtually
from rlsys.config.schema import CassetteMode
from rlsys.errors import Code
from rlsys.search.cassette import Cassette, drawn_rank
from rlsys.search.retrieval import Failure, Passage, SearchResult
from tests.support.jsonl import read_rows
from tests.support.refusals import refused
from tests.support.virtual_time import virtually

from .scripted import EXTEND, RECORD, REPLAY, Script, found, tool, written

QUERIES = st.sampled_from(["Mali", " Mali\n", "Chad", 'a "quoted"\nline', "São Tomé", "\ud800 half", "", " "])
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
PASSAGES = st.lists(st.builds(Passage, TEXT, TEXT, st.floats(allow_nan=False, allow_infinity=False)), max_size=3)
RESULTS = st.one_of(
    st.builds(SearchResult, PASSAGES.map(tuple)),
    st.builds(SearchResult, error=st.just("no answer"), failure=st.sampled_from([None, *Failure])),
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asks=st.lists(st.tuples(QUERIES, RESULTS), max_size=12))
def test_replay_gives_the_first_success_of_a_query_else_its_first_failure(
    asks: list[tuple[str, SearchResult]], tmp_path: Path
) -> None:
    path = tmp_path / "tape.jsonl"
    path.unlink(missing_ok=True)
    answers: dict[str, SearchResult] = {}

    async def record() -> None:
        script = Script()
        recorder = tool(path, RECORD, script)
        for query, result in asks:
            sent = query.replace("\ud800", "?").strip()
            script.results = {sent: result}
            assert await recorder.search(query) == result
            worked_before = sent in answers and not answers[sent].error
            if not worked_before and (sent not in answers or not result.error):
                answers[sent] = result
        await recorder.close()

    async def play() -> None:
        player = tool(path, REPLAY)
        for query, _ in asks:
            assert await player.search(query) == answers[query.replace("\ud800", "?").strip()]

    run_virtually(record())
    if path.exists():
        run_virtually(play())


# ---- latencies


@pytest.mark.parametrize("scale", [0.0, 2.5])
def test_replayed_calls_take_the_recorded_times(scale: float, tmp_path: Path) -> None:
    latencies = [0.25, 4.0, 0.5, 0.5, 1.0, 2.0]
    path = written(tmp_path / "tape.jsonl", latencies)

    async def play() -> list[float]:
        async with tool(path, REPLAY, scale=scale) as player:

            async def timed() -> float:
                started = now()
                assert await player.search("Mali") == found("Mali")
                return now() - started

            asks = [timed() for _ in range(12)]
            took = await asyncio.gather(*asks)
            assert now() == pytest.approx(scale * max(latencies)), "calls are replayed concurrently"
            return took

    assert [Cassette.read(path).quantile_s(share) for share in (0.1, 0.5, 0.9, 1.0)] == [0.25, 0.5, 4.0, 4.0]
    took = run_virtually(play())
    assert sorted(took) == pytest.approx(sorted(scale * latency for latency in latencies * 2))
    written(path, reversed(latencies))
    assert run_virtually(play()) == took, "latencies depend neither on the run nor on the order of the lines"


def test_first_draws_of_many_queries_are_uniform() -> None:
    """A fair share of 5,000 draws of 10 ranks is 500, with a standard deviation of 21."""
    drawn = Counter(drawn_rank(f"query {number}", 0, 10) for number in range(5_000))
    assert set(drawn) == set(range(10))
    assert all(abs(count - 500) < 5 * 21 for count in drawn.values())


@virtually
async def test_a_miss_takes_the_servers_time_once_and_is_recorded_with_it(tmp_path: Path) -> None:
    path, took = written(tmp_path / "tape.jsonl", [4.0]), []
    async with tool(path, EXTEND, Script(takes_s=[32.0])) as extender:
        for query in ("Mali", "Chad", "Chad", "Chad"):
            started = now()
            await extender.search(query)
            took.append(now() - started)
    assert took[:2] == [4.0, 32.5], "the first miss also asks for the server's health"
    assert sorted(took[2:]) == [4.0, 32.0]
    assert read_rows(path)[-1]["latency_s"] == 32.0


# ---- the modes


@virtually
async def test_a_query_that_was_not_recorded_is_a_failed_search(tmp_path: Path) -> None:
    async with tool(written(tmp_path / "tape.jsonl", [1.0]), REPLAY) as player:
        result = await player.search("Chad </search>")
        assert result.passages == ()
        assert result.failure is Failure.not_recorded
        assert "'Chad </search>'" in result.error
        assert len((await player.search("x" * 9000)).error) < 200
        assert player.counts.misses == 2


@virtually
async def test_extending_keeps_successes_and_repeats_failed_queries(tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    failed = SearchResult(error="no answer")
    async with tool(path, RECORD, Script({"Mali": failed})) as recorder:
        assert await recorder.search("Mali") == failed
    script = Script({"Chad": failed})
    async with tool(path, EXTEND, script) as extender:
        for query, result in (("Mali", found("Mali")), ("Chad", failed), ("Chad", failed), ("Mali", found("Mali"))):
            assert await extender.search(query) == result
    assert (script.asked, script.closed) == (["Mali", "Chad", "Chad"], True)
    cassette = Cassette.read(path)
    assert cassette.answers == {"Mali": found("Mali")}
    assert (len(cassette.latencies_s), cassette.errors) == (2, 1)


# ---- refusals

HEADER = b'{"rlsys_cassette": 1, "topk": 3, "server": {}}\n'


@pytest.mark.parametrize(
    ("content", "mode", "code"),
    [
        (None, REPLAY, "not_found"),
        (b"", REPLAY, "malformed"),
        (b'{"query": "Mali"}\n', EXTEND, "malformed"),
        (HEADER.replace(b"1", b"2", 1), REPLAY, "malformed"),
        (HEADER.replace(b"3", b"5"), REPLAY, "mismatch"),
        (HEADER, RECORD, "exists"),
        (HEADER + b'{"query": "M"}\n', REPLAY, "malformed"),
        (HEADER + b'{"query": "M", "latency_s": -1}\n', REPLAY, "malformed"),
        (HEADER + b'{"query": "M", "latency_s": 1, "error": "no", "failure": "tired"}\n', REPLAY, "malformed"),
    ],
)
def test_an_unusable_file_is_refused_and_left_unchanged(
    content: bytes | None, mode: CassetteMode, code: Code, tmp_path: Path
) -> None:
    path = tmp_path / "tape.jsonl"
    if content is not None:
        path.write_bytes(content)
    with refused(code, "search.topk" if code == "mismatch" else path) as error:
        tool(path, mode, None if mode is REPLAY else Script())
    assert str(path) in str(error.value)
    assert content is None or path.read_bytes() == content


def test_an_older_cassette_is_extended_only_from_a_server_of_the_same_index(tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    header = b'{"rlsys_cassette": 1, "topk": 3, "server": {"passages": 7, "encoder": "e", "dimension": 2}}\n'
    path.write_bytes(header + b'{"query": "Mali", "latency_s": 0.5, "error": "no answer from there"}\n')

    async def ask(query: str, mode: CassetteMode, server: Script | None = None) -> SearchResult:
        async with tool(path, mode, server) as asked:
            return await asked.search(query)

    assert run_virtually(ask("Mali", REPLAY)) == SearchResult(error="no answer from there")
    serves = {"kind": "dense", "passages": 7, "encoder": "e", "corpus_sha256": "c", "queries": 9}
    with refused("mismatch", path):
        run_virtually(ask("Mali", EXTEND, Script(serves=serves | {"passages": 8})))
    assert len(read_rows(path)) == 2
    for query, server in (("Mali", Script(serves=serves)), ("Chad", Script(serves=None))):
        assert run_virtually(ask(query, EXTEND, server)) == run_virtually(ask(query, REPLAY)) == found(query)
