"""Records the scripted policy's searches and their latencies under a rollout's load onto a cassette.

    python -m bench.record_searches [--out outputs/bench/searches.jsonl] [--in-flight 64]

Run it from the project's root after `make demo`, which makes the world. The scripted policy answers the training and
the held-out questions of the tiny world with a run's search server, with as many questions in flight as an engine has
episodes. The cassette holds each search with its latency as an episode sees it: with queueing, batching and the
server's cache.

A complete cassette of this index is kept and nothing is recorded. An interrupted recording starts again.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from examples.searchr1.tiny.oracle import answer
from rlsys.apps.cli.main import run_command
from rlsys.apps.cli.search import cassette as show
from rlsys.config.schema import CassetteConfig, CassetteMode, SearchConfig
from rlsys.data.question import Question, read_questions
from rlsys.errors import RunError, UserError
from rlsys.rollout.tools.search_tool import open_tool
from rlsys.search.cassette import Cassette, CassetteTool
from rlsys.search.index.dense import Manifest
from rlsys.search.retrieval import differences
from rlsys.search.server_process import SearchServer

WORLD = Path("data/tiny_world")
INDEX = WORLD / "index"
OUT = Path("outputs/bench/searches.jsonl")
TOPK = 3
IN_FLIGHT = 64
START_TIMEOUT_S = 180.0


def main() -> None:
    """Record unless the cassette is complete, and show its contents."""
    parser = argparse.ArgumentParser(description="Record the searches of the scripted policy.")
    parser.add_argument("--out", type=Path, default=OUT, help="cassette to write")
    parser.add_argument("--in-flight", type=int, default=IN_FLIGHT, help="questions in flight")
    given = parser.parse_args()
    show(record_searches(Path(given.out), int(given.in_flight)))


def record_searches(path: Path = OUT, in_flight: int = IN_FLIGHT) -> Path:
    """Record unless the cassette at `path` is complete. Returns `path`."""
    console = Console()
    questions = [*read_questions(str(WORLD / "train.jsonl")), *read_questions(str(WORLD / "heldout.jsonl"))]
    if asyncio.run(is_recorded(path, questions)):
        console.print(f"The searches are already recorded: {path}", highlight=False, soft_wrap=True)
    else:
        console.print(f"Recording searches: {path}", highlight=False, soft_wrap=True)
        record(path, questions, in_flight)
    return path


async def is_recorded(path: Path, questions: Sequence[Question]) -> bool:
    """True if the cassette at `path` comes from this index and holds every search of the scripted policy."""
    try:
        header = Cassette.read(path).header
        player = open_tool(_search(path, CassetteMode.replay))
    except UserError:
        return False
    made = Manifest.read(INDEX)
    here = {"passages": made.rows, "corpus_sha256": made.corpus_sha256, "encoder": made.encoder}
    if not header.server or differences(header.server, here | {"faiss_type": made.faiss_type}):
        return False
    assert isinstance(player, CassetteTool)
    await _walk(questions, player, in_flight=len(questions))
    return player.counts.misses == 0


def record(path: Path, questions: Sequence[Question], in_flight: int) -> None:
    """Record a cassette and move it to `path` when it is complete."""
    part = path.with_name(f".{path.name}.recording")
    part.unlink(missing_ok=True)
    with (
        TemporaryDirectory() as logs,
        SearchServer(INDEX, Path(logs) / "search.log", topk=TOPK, threads=1) as server,
    ):
        server.wait_healthy(START_TIMEOUT_S)
        asyncio.run(_record(questions, _search(part, CassetteMode.record, server.url), in_flight))
    part.replace(path)


async def _record(questions: Sequence[Question], search: SearchConfig, in_flight: int) -> None:
    recorder = open_tool(search)
    assert isinstance(recorder, CassetteTool)
    async with recorder:
        failed = await _walk(questions, recorder, in_flight)
    if failed:
        raise RunError(f"{len(failed)} searches failed; the first error: {failed[0]}")


async def _walk(questions: Sequence[Question], tool: CassetteTool, in_flight: int) -> list[str]:
    """Answer `questions` with the scripted policy. Returns the errors of its searches."""
    gate = asyncio.Semaphore(in_flight)
    errors: list[str] = []

    async def retrieve(query: str) -> list[str]:
        result = await tool.search(query)
        if result.error:
            errors.append(result.error)
        return [passage.contents for passage in result.passages]

    async def walk(question: Question) -> None:
        async with gate:
            await answer(question, retrieve)

    await asyncio.gather(*map(walk, questions))
    return errors


def _search(path: Path, mode: CassetteMode, url: str | None = None) -> SearchConfig:
    return SearchConfig(url=url, topk=TOPK, cassette=CassetteConfig(str(path), mode, latency_scale=0.0))


if __name__ == "__main__":
    run_command(main)
