"""Tests of `bench.chaos`: its judgement of runs, and that it finds whatever outlives a launch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray._private import services

from bench.chaos.__main__ import settings_of
from bench.chaos.faults import STAGES, Fault, Kind, plan
from bench.chaos.findings import (
    ENDED,
    UNCLEAR,
    continued,
    lost,
    still_open,
    temporary,
    verdict,
)
from bench.chaos.launch import HOME, isolated, others
from bench.chaos.proxy import SLOWER, Proxy
from rlsys.config.compose import load_config
from rlsys.data.prompt_source import PromptSource, SourceState
from rlsys.data.question import Question
from rlsys.orchestrator.validate import find_problems
from rlsys.orchestrator.worker_groups import holdings
from tests.support.paths import PROJECT
from tests.support.serving import served

UIDS = [f"q:{number}" for number in range(40)]
SEED, STEPS, GROUPS = 3, 4, 5


def test_rlsys_reports_every_stage_in_the_words_that_the_faults_wait_for() -> None:
    code = "".join(path.read_text() for path in (PROJECT / "rlsys").rglob("*.py"))
    for name, (text, _) in STAGES.items():
        assert re.search(rf'(show|stage)\(f?"{text.partition(": ")[2]}\b', code), name


def fault(process: str, kind: Kind = Kind.kill) -> Fault:
    return Fault(0, kind, process, "transfer", 0, 0.0, "0")


DIED = "rollout rank 1 died before it could finish load_bucket."
WORKER_TRACE = "The last lines of rollout-1.log:\n    Traceback (most recent call last):\n    ValueError: 1"
TRACE = "Traceback (most recent call last):\n  File x\nRayError: rollout rank 1"


@pytest.mark.parametrize(
    ("process", "code", "printed", "ended", "outcome"),
    [
        pytest.param("engine", 1, f"{DIED}\n", f"failed: {DIED}", ENDED, id="one sentence"),
        pytest.param(
            "engine", 1, f"{DIED}\n{WORKER_TRACE}", f"failed: {DIED} The last lines of x", ENDED, id="log tail"
        ),
        pytest.param("engine", 2, f"{DIED} [unreachable]\n", None, ENDED, id="before there is a status"),
        pytest.param("actor", 1, f"{DIED}\n", f"failed: {DIED}", UNCLEAR, id="names another part"),
        pytest.param("engine", 1, f"{TRACE}\n", f"failed: {DIED}", UNCLEAR, id="traceback"),
        pytest.param("engine", -11, f"{DIED}\n", None, UNCLEAR, id="the driver crashed"),
        pytest.param("driver", -9, "", None, ENDED, id="the driver was killed"),
        pytest.param("engine", 1, "", None, UNCLEAR, id="silence"),
    ],
)
def test_an_end_is_clear_if_one_sentence_names_the_part(
    process: str, code: int, printed: str, ended: str | None, outcome: str
) -> None:
    log = "2026-01-01 12:00:00,000 INFO rlsys.observe.status: rollout: ends\n"
    assert verdict(fault(process), code, log + printed, ended)[0] == outcome


def test_an_end_may_name_the_head_of_ray_that_was_stopped_before() -> None:
    died = "Ray's process gcs_server does not answer, so the run was stopped."
    ends = {
        (kind, process): verdict(fault("engine"), 1, f"{died}\n", None, [fault(process, kind)])[0]
        for kind in (Kind.kill, Kind.stop)
        for process in ("gcs", "raylet")
    }
    assert [one for one, outcome in ends.items() if outcome == ENDED] == [(Kind.stop, "gcs")]


class Complete:
    """Folder of a complete run, whose prompts come from a real source."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        source = PromptSource([Question(uid, "?", ("!",)) for uid in UIDS], SEED)
        ends = ["trained"] * GROUPS
        self.rows: list[dict[str, Any]] = []
        for step in range(1, STEPS + 1):
            for end in [*ends, "no_spread"] if step == 2 else ends:
                self.rows.append({"step": step, "group": len(self.rows), "uid": source.next().uid, "end": end})
        self.state = source.state()

    def found(self) -> list[str]:
        (self.folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        steps = "".join(json.dumps({"step": step}) + "\n" for step in range(1, STEPS + 1))
        (self.folder / "metrics.jsonl").write_text(steps)
        return lost(self.folder, UIDS, SEED, self.state, STEPS, GROUPS)


@pytest.fixture
def complete(tmp_path: Path) -> Complete:
    return Complete(tmp_path)


def test_a_complete_run_has_lost_nothing(complete: Complete) -> None:
    assert complete.found() == []


def test_a_group_that_was_lost_and_tried_again_is_not_lost(complete: Complete) -> None:
    again = complete.rows[-1]
    complete.rows.append(again | {"group": len(complete.rows)})
    complete.rows[-2] = again | {"end": "lost"}
    assert complete.found() == []


def test_a_prompt_that_waits_in_the_checkpoint_is_not_lost(complete: Complete) -> None:
    waiting = complete.rows.pop(GROUPS + 5)
    for number, row in enumerate(complete.rows):
        row["group"] = number
    assert complete.found()
    complete.state = SourceState(complete.state.position, (Question(waiting["uid"], "?", ("!",)),))
    assert complete.found() == []


HARMS: dict[str, Callable[[Complete], object]] = {
    "a row is missing": lambda run: run.rows.pop(3),
    "the last row is missing": lambda run: run.rows.pop(),
    "a row is there twice": lambda run: run.rows.append(run.rows[3]),
    "a prompt is trained twice": lambda run: run.rows.append(run.rows[3] | {"group": len(run.rows)}),
    "a prompt is lost": lambda run: run.rows[8].update(end="lost"),
    "a prompt comes from nowhere": lambda run: run.rows[8].update(uid="q:99"),
    "a step has a group of another": lambda run: run.rows[0].update(step=2),
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS.keys())
def test_each_harm_to_a_run_is_found(harm: Callable[[Complete], object], complete: Complete) -> None:
    harm(complete)
    assert complete.found()


def test_what_was_as_it_must_be_still_counts_on_another_commit() -> None:
    harms: list[dict[str, Any]] = [{}, {"lost": ["a prompt"]}, {"left_over": ["a file"]}, {"em": 0.3}, {"em": None}]
    fine = {"setup": "plain", "commit": "old", "lost": [], "left_over": [], "em": 0.75}
    rows = [
        {"number": number, "commit": "old", "outcome": "recovered", "left_over": []} for number in range(len(harms))
    ]
    rows.append({"number": 9, "commit": "old", "outcome": "hung", "left_over": []})
    ends = [fine | harm | {"faults": [number]} for number, harm in enumerate(harms)]
    found = {"rows": rows, "ends": [*ends, fine | {"faults": [9]}], "em_without_faults": {"plain": 0.75}}
    assert [row["number"] for row in continued(found, "new", questions=32)["rows"]] == [0, 4]
    assert [row["number"] for row in continued(found, "old", questions=32)["rows"]] == [0, 1, 2, 3, 4, 9]


def test_faults_of_a_driver_that_died_are_not_open_any_more() -> None:
    def row(event: str, fault: int) -> dict[str, Any]:
        return {"event": event, "fault": fault}

    rows = [row("began", 1), row("began", 2), row("recovered", 1)]
    assert still_open(rows) == 1
    rows.append(row("began", 1))
    assert still_open(rows) == 1
    rows.append(row("recovered", 1))
    assert still_open(rows) == 0


def test_unfinished_files_of_a_run_are_found(tmp_path: Path) -> None:
    for name in (".status.json.17.part", "checkpoints/.global_step_3.partial/actor/x", "status.json", ".lock"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert temporary(tmp_path) == ["file .status.json.17.part", "file checkpoints/.global_step_3.partial"]


@pytest.mark.parametrize("setup", ["plain", "proxy", "ppo"])
def test_each_setup_is_a_valid_run_with_the_processes_that_its_faults_strike(setup: str) -> None:
    words = settings_of(setup, 40, 60.0, 120.0)
    config = load_config(words[1], [*words[2:], *(["search.url=http://127.0.0.1:1"] if setup == "proxy" else [])])
    wrong = [problem for problem in find_problems(config) if problem.code != "not_found"]
    assert wrong == [], "a campaign prepares the data"
    held = holdings(config)
    assert len(held["rollout"]) == 2, "one engine goes on while the other is struck"
    struck = {one.process for one in plan(1, 200) if one.setup == setup} & {"inference", "actor", "critic"}
    assert struck <= held.keys()
    assert all(len(held[name]) == 1 for name in struck), "`launch._is` looks for rank 0"
    assert (config.search.url is None) == (setup != "proxy"), "else rlsys would not start a server to strike"
    assert config.resume == "auto"


def test_the_processes_of_ray_have_the_names_by_which_faults_find_them() -> None:
    assert {Path(services.GCS_SERVER_EXECUTABLE).name, Path(services.RAYLET_EXECUTABLE).name} == {
        "gcs_server",
        "raylet",
    }


@pytest.fixture
def upstream() -> Iterator[str]:
    """A server that answers every POST with its own body."""
    with served(lambda body: body) as server:
        yield server.url


@pytest.fixture
def proxy(upstream: str) -> Proxy:
    return Proxy(upstream)


def test_proxy_passes_refuses_and_garbles_replies(proxy: Proxy) -> None:
    body = json.dumps({"queries": ["who?"] * 20}).encode()

    def reply() -> bytes:
        return httpx.post(f"{proxy.url}/retrieve", content=body, trust_env=False, timeout=600).content

    assert reply() == body
    proxy.mode = Kind.garble
    assert all(reply() != body for _ in range(10))
    proxy.mode = Kind.refuse
    with pytest.raises(httpx.TransportError):
        reply()
    proxy.heal()
    assert reply() == body


def test_proxy_delays_a_reply_by_a_multiple_of_its_time(upstream: str) -> None:
    waits: list[float] = []

    async def wait(seconds: float) -> None:
        waits.append(seconds)

    slow = Proxy(upstream, clock=count().__next__, wait=wait)
    for kind in (None, Kind.slow):
        slow.mode = kind
        assert httpx.post(f"{slow.url}/retrieve", content=b"{}", trust_env=False, timeout=600).content == b"{}"
    assert waits == [SLOWER - 1], "a reply that took one unit of the clock"


def test_processes_are_looked_for_only_in_namespaces_of_a_campaign() -> None:
    """Elsewhere, a campaign would kill the processes of others."""
    with pytest.raises(RuntimeError):
        others()


LEAVES = """
import socket, subprocess, sys
from pathlib import Path
from bench.chaos.launch import SHARED, TMP, left_over
listens = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", listens], stdout=subprocess.PIPE, text=True)
spared = subprocess.Popen(["sleep", "600"])
port = child.stdout.readline().strip()
(SHARED / "segment").touch()
(TMP / "socket").mkdir()
found = left_over([spared.pid], [TMP, SHARED], 0.0)
assert len(found) == 3, found
assert f"listens on [{port}]" in found[0] and found[1:] == [f"file {TMP / 'socket'}", f"file {SHARED / 'segment'}"], found
assert child.poll() is not None and spared.poll() is None
assert left_over([spared.pid], [TMP, SHARED], 0.0) == []
"""


def test_whatever_outlives_a_launch_is_found_and_removed() -> None:
    if subprocess.run(isolated(["true"]), capture_output=True, check=False).returncode:
        pytest.skip("this machine does not allow namespaces of processes")
    environment = os.environ | {"RLSYS_CHAOS": str(HOME)}
    command = isolated([sys.executable, "-c", LEAVES])
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
