"""The application: many who ask share one build, and what is damaged or gone is answered."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from rlsys.report.watch import LiveRun, create_app
from tests.report.watch.folder import add_step, write_run, write_status

LOADS = 40
"""More than a process has threads for."""


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
        transport = httpx.ASGITransport(app=create_app(run, frozenset({"localhost"})))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
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


def test_a_name_and_an_end_that_are_no_text_and_a_folder_that_goes_away_are_answered(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    half = json.loads('"half \\ud83d"')
    write_status(folder, ended=f"failed: {half}", em=float("nan"))
    with TestClient(create_app(LiveRun(folder), frozenset({"localhost"})), base_url="http://localhost") as client:
        found = client.get("/status.json").json()
        assert (found["ended"], found["em"]) == (f"failed: {half}", None)
        assert [client.get(f"/{path}").status_code for path in ("data.json", "metrics", "")] == [200] * 3
        folder.rename(tmp_path / "elsewhere")
        answer = client.get("/data.json")
        assert (answer.status_code, str(folder) in answer.text) == (404, True)
