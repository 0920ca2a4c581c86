"""The application: many who ask share one build, and what is damaged or gone is answered."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from rlsys.report.watch import LiveRun, create_app
from tests.support.growing_run import EVIL, add_evaluation, add_step, write_run, write_status

LOADS = 40
"""More than a process has threads for."""


def client_of(run: LiveRun) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=create_app(run, frozenset({"localhost"})))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60)


def test_many_who_ask_for_the_page_share_one_build_and_leave_the_rest_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run")
    add_step(folder, 1)
    write_status(folder)
    run = LiveRun(folder)
    begun, go_on, data = threading.Semaphore(0), threading.Event(), run.data

    def slow() -> bytes:
        begun.release()
        assert go_on.wait(60)
        return data()

    monkeypatch.setattr(run, "data", slow)

    async def ask() -> None:
        async with client_of(run) as client:
            loads = [asyncio.create_task(client.get("/data.json")) for _ in range(LOADS)]
            loads += [asyncio.create_task(client.get("/trajectories/999")) for _ in range(LOADS)]
            await asyncio.to_thread(begun.acquire)
            loads[0].cancel()
            try:
                for path in ("/metrics", "/status.json"):
                    assert (await asyncio.wait_for(client.get(path), 30)).status_code == 200
            finally:
                go_on.set()
            answers = await asyncio.gather(*loads[1:])
            assert [one.status_code for one in answers] == [200] * (LOADS - 1) + [404] * LOADS
            assert answers[0].json()["runs"][0]["steps"] == [1]
        assert not begun.acquire(blocking=False), "one build was enough"

    asyncio.run(ask())


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application that watches a run after its first step and is called localhost."""
    folder = write_run(tmp_path / "run")
    add_step(folder, 1)
    add_evaluation(folder, 0, 0.5)
    write_status(folder)
    async with client_of(LiveRun(folder)) as opened:
        yield opened


async def test_another_name_is_refused_and_nothing_can_be_sent(client: httpx.AsyncClient) -> None:
    for path in ("", "data.json", "status.json", "metrics", "events", "trajectories/0"):
        assert (await client.get(f"/{path}", headers={"Host": "evil.example"})).status_code == 421, path
        assert (await client.post(f"/{path}")).status_code == 405, path


async def test_the_page_asks_for_its_data_and_may_ask_nobody_else(client: httpx.AsyncClient) -> None:
    answer = await client.get("/")
    assert "text/html" in answer.headers["content-type"]
    assert "connect-src &#x27;self&#x27;" in answer.text
    assert 'id="model"' not in answer.text
    secure = {"x-content-type-options": "nosniff", "x-frame-options": "DENY", "cache-control": "no-store"}
    assert {name: answer.headers[name] for name in secure} == secure


async def test_data_parts_and_figures(client: httpx.AsyncClient) -> None:
    (found,) = (await client.get("/data.json")).json()["runs"]
    assert (found["name"], found["steps"], found["status"]["step"]) == ("run", [1], 1)
    (part,) = (await client.get(f"/trajectories/{found['evaluations'][0]['first_chunk']}")).json()
    assert part["answer"] == EVIL
    assert (await client.get("/status.json")).json()["states"]["rollout"]["text"] == "generates 3 groups"
    assert 'rlsys_group_at_work{group="rollout"} 1.0' in (await client.get("/metrics")).text


async def test_unknown_paths_are_not_found(client: httpx.AsyncClient) -> None:
    paths = {"trajectories/99": 404, "trajectories/x": 422, "config.yaml": 404, "..%2f..%2fetc%2fpasswd": 404}
    assert {path: (await client.get(f"/{path}")).status_code for path in paths} == paths


async def test_a_name_and_an_end_that_are_no_text_and_a_folder_that_goes_away_are_answered(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    half = json.loads('"half \\ud83d"')
    write_status(folder, ended=f"failed: {half}", em=float("nan"))
    async with client_of(LiveRun(folder)) as client:
        found = (await client.get("/status.json")).json()
        assert (found["ended"], found["em"]) == (f"failed: {half}", None)
        for path in ("data.json", "metrics", ""):
            assert (await client.get(f"/{path}")).status_code == 200
        folder.rename(tmp_path / "elsewhere")
        answer = await client.get("/metrics")  # The model is good for a while yet.
        assert (answer.status_code, str(folder) in answer.text) == (404, True)
