"""Tests of a watched run: the application, rebuilding of its model, and figures for Prometheus."""

import asyncio
import gzip
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rlsys.observe.faults import FAULTS
from rlsys.observe.run_folder import open_run
from rlsys.report import watch
from rlsys.report.run_model import QUIET_S, Phase, RunLiveness
from rlsys.report.watch import REST, LiveRun, create_app, exposition
from tests.support.damage import DAMAGES
from tests.support.growing_run import EVIL, add_evaluation, add_step, write_run, write_status
from tests.support.made_run import add_changes, add_faults

LOADS = 40
"""Larger than the number of threads of a process."""


def client_of(run: LiveRun) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=create_app(run, frozenset({"localhost"})))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=600)


def test_concurrent_requests_share_one_build_and_do_not_block_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run")
    add_step(folder, 1)
    write_status(folder)
    run = LiveRun(folder)
    begun, go_on, data = threading.Semaphore(0), threading.Event(), run.data

    def slow() -> bytes:
        begun.release()
        assert go_on.wait(300)
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
                    assert (await asyncio.wait_for(client.get(path), 300)).status_code == 200
            finally:
                go_on.set()
            answers = await asyncio.gather(*loads[1:])
            assert [one.status_code for one in answers] == [200] * (LOADS - 1) + [404] * LOADS
            assert answers[0].json()["runs"][0]["steps"] == [1]
        assert not begun.acquire(blocking=False), "there must be one build"

    asyncio.run(ask())


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application on the host localhost, which watches a run after its first step."""
    folder = write_run(tmp_path / "run")
    add_step(folder, 1)
    add_evaluation(folder, 0, 0.5)
    write_status(folder)
    async with client_of(LiveRun(folder)) as opened:
        yield opened


async def test_other_host_names_and_posts_are_refused(client: httpx.AsyncClient) -> None:
    for path in ("", "data.json", "status.json", "metrics", "events", "trajectories/0"):
        assert (await client.get(f"/{path}", headers={"Host": "evil.example"})).status_code == 421, path
        assert (await client.post(f"/{path}")).status_code == 405, path


async def test_page_may_load_data_only_from_its_own_server(client: httpx.AsyncClient) -> None:
    answer = await client.get("/")
    assert "connect-src &#x27;self&#x27;" in answer.text
    assert 'id="model"' not in answer.text
    secure = {"x-content-type-options": "nosniff", "x-frame-options": "DENY", "cache-control": "no-store"}
    assert {name: answer.headers[name] for name in secure} == secure


async def test_lone_surrogates_and_a_vanished_folder_are_answered(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    half = json.loads('"half \\ud83d"')
    write_status(folder, ended=f"failed: {half}", em=float("nan"))
    async with client_of(LiveRun(folder)) as client:
        found = (await client.get("/status.json")).json()
        assert (found["ended"], found["em"]) == (f"failed: {half}", None)
        for path in ("data.json", "metrics", ""):
            assert (await client.get(f"/{path}")).status_code == 200
        folder.rename(tmp_path / "elsewhere")
        assert (await client.get("/metrics")).status_code == 404


async def test_data_chunks_status_and_metrics_are_served(client: httpx.AsyncClient) -> None:
    (found,) = (await client.get("/data.json")).json()["runs"]
    assert (found["name"], found["steps"], found["status"]["step"]) == ("run", [1], 1)
    (part,) = (await client.get(f"/trajectories/{found['evaluations'][0]['first_chunk']}")).json()
    assert part["answer"] == EVIL
    unknown = {"trajectories/99": 404, "trajectories/x": 422, "config.yaml": 404, "..%2f..%2fetc%2fpasswd": 404}
    assert {path: (await client.get(f"/{path}")).status_code for path in unknown} == unknown
    assert (await client.get("/status.json")).json()["states"]["rollout"]["text"] == "generates 3 groups"
    assert 'rlsys_group_at_work{group="rollout"} 1.0' in (await client.get("/metrics")).text


class Stepping:
    """A run that makes its first step just after its status has been read for the first time."""

    def __init__(self) -> None:
        self.step = 0

    def known(self) -> int:
        return self.step

    version = known

    def status(self) -> dict[str, int]:
        read, self.step = {"step": self.step}, 1
        return read


async def test_status_of_a_change_comes_before_the_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "POLL_S", 0.0)
    events = watch._events(Stepping(), asyncio.Event())  # type: ignore[arg-type]
    assert [(await anext(events)).event for _ in range(3)] == ["status", "status", "change"]


class Clock:
    """A clock that advances by a second per call."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def shown(run: LiveRun) -> dict[str, Any]:
    """Return the only run of the model that the page shows."""
    (found,) = json.loads(gzip.decompress(run.data()))["runs"]
    return found


def test_model_is_rebuilt_only_after_a_rest_in_proportion_to_its_build_time(tmp_path: Path) -> None:
    clock = Clock()
    folder = write_run(tmp_path / "run")
    run = LiveRun(folder, clock)
    assert shown(run)["steps"] == []
    add_step(folder, 1)
    known = run.known()
    assert run.version() == known, "the model must rest before it is rebuilt"
    assert shown(run)["steps"] == []
    clock.now += REST * clock.now
    assert run.version() != known
    assert shown(run)["steps"] == [1]
    clock.now += 1000
    assert run.known() == run.version(), "nothing has changed"
    body = run.data()
    assert run.data() is body


def test_run_of_a_killed_process_is_shown_as_ended(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    write_status(folder, pid=2**22 + 1, at=time.time() - QUIET_S - 1)  # This pid is above the largest one of Linux.
    run = LiveRun(folder)
    ended = (run.status() or {})["ended"]
    assert ended.startswith("failed: ")
    assert shown(run)["status"]["ended"] == ended
    assert b'rlsys_run_phase{phase="gone"} 1.0' in run.metrics()


CHANGES: dict[str, Callable[[Path], object]] = {
    "step": lambda run: add_step(run, 1),
    "evaluation": lambda run: add_evaluation(run, 0, 0.5),
    "measured": lambda run: add_file(run / "eval-1/results.json", "{}"),
    "config": lambda run: add_file(run / "config.yaml", "name: another\n"),
    "summary": lambda run: add_file(run / "summary.json", "{}"),
    "end": lambda run: write_status(run, ended="failed: no disk"),
}


def add_file(path: Path, content: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_visible_change_makes_a_new_version(tmp_path: Path, change: Callable[[Path], object]) -> None:
    folder = write_run(tmp_path / "run")
    write_status(folder)
    run = LiveRun(folder, clock=lambda: 0.0)
    run.data()
    known = run.version()
    assert known == run.version()
    change(folder)
    assert run.version() != known


def test_status_change_or_partial_file_makes_no_new_version(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    later = time.time() + 3600  # An old status would be silent, which is another version.
    write_status(folder, at=later)
    run = LiveRun(folder, clock=lambda: 0.0)
    known = run.version()
    write_status(folder, at=later, states={})
    for name in ("evaluations/.step_000004.json.7.part", "trajectories/.step_000004.jsonl.gz.7.part"):
        add_file(folder / name, "{")
    assert run.version() == known
    assert (run.status() or {})["states"] == {}


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(run: Path, phase: Phase, now: float) -> Samples:
    text = exposition(open_run(run), RunLiveness(phase, ""), now).decode()
    return {
        (one.name, tuple(sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def of(found: Samples, name: str) -> dict[str, float]:
    """Return the samples of the metric `name` by the value of its only label."""
    return {labels[0][1]: value for (one, labels), value in found.items() if one == name}


def test_prometheus_figures_of_a_running_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    add_step(run, 1)
    add_step(run, 2, **{"idle/actor": 0.75})
    add_evaluation(run, 0, em=0.125)
    now = write_status(run, step=2)["at"]
    found = samples(run, Phase.running, now)
    assert found["rlsys_run_info", (("name", "own"), ("run", "run"))] == 1
    assert of(found, "rlsys_run_phase") == {phase: float(phase == "running") for phase in Phase}
    plain = {name.removeprefix("rlsys_run_"): value for (name, labels), value in found.items() if not labels}
    assert plain == {
        "step": 2,
        "steps": 9,
        "begun_timestamp_seconds": pytest.approx(now - 60),
        "status_timestamp_seconds": pytest.approx(now),
        "exact_match": 0.125,
        "evaluation_step": 0,
        "reward": 0.5,
        "tokens_per_second": 1234.5,
    }
    assert of(found, "rlsys_group_at_work") == {"rollout": 1, "actor": 0}
    waits = {labels: value for (name, labels), value in found.items() if name == "rlsys_group_wait_seconds"}
    assert waits == {(("cause", "log-probs and values"), ("group", "actor")): pytest.approx(30, abs=0.01)}
    assert of(found, "rlsys_group_idle_ratio") == {"actor": 0.75, "rollout": 0.5}
    assert of(found, "rlsys_engine_requests") == {"0": 40, "1": 41}
    assert of(found, "rlsys_engine_update_seconds") == {"0": 1.5}
    assert of(found, "rlsys_engine_tokens_per_s") == {"0": 700}
    figures = of(found, "rlsys_figure")
    assert figures["critic/score/mean"] == 0.5, "other figures keep the names of docs/metrics.md"
    assert not {"correction/ess", "idle/actor", "engine/0/requests"} & figures.keys(), (
        "figures that are null or have their own metric"
    )


def test_faults_are_counted_by_outcome_and_the_current_launch_shows_how_long_one_lasts(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    file = add_faults(folder, part="engine \ud83d")
    add_changes(folder)
    run = LiveRun(folder)
    assert any(FAULTS in name for name, *_ in run.version()[1]), "a fault renews the page"
    (unfinished,) = [fault for fault in open_run(folder).faults if fault.outcome is None]

    def figures(begun: float, phase: Phase) -> dict[str, dict[str, float]]:
        write_status(folder, begun=begun)
        text = exposition(open_run(folder), RunLiveness(phase, ""), unfinished.began_s + 5).decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        return {
            name: {"/".join(sorted(sample.labels.values())): sample.value for sample in families[name].samples}
            for name in ("rlsys_run_faults", "rlsys_fault_open_seconds", "rlsys_run_engine_changes")
        }

    counts = {"recovered": 1, "given_up": 1, "unfinished": 1}
    assert figures(0, Phase.running) == {
        "rlsys_run_faults": counts,
        "rlsys_fault_open_seconds": {"actor rank 0/unreachable": 5},
        "rlsys_run_engine_changes": {"joined": 1, "left": 1},
    }
    for begun, phase in ((0, Phase.finished), (unfinished.began_s + 1, Phase.running)):
        assert figures(begun, phase)["rlsys_fault_open_seconds"] == {}
    DAMAGES["cut"](file)
    assert figures(0, Phase.running)["rlsys_run_faults"] == dict.fromkeys(counts, 0)
