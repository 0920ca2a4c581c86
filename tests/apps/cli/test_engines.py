"""Tests of `rlsys engines`: what it asks the driver of a run and prints, and mistakes found before or by the driver."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlsys.apps.cli.main import app
from rlsys.errors import Code, RunError, UserError
from rlsys.observe.requests import REQUESTS, Inbox, Request
from rlsys.observe.status import FINISHED
from tests.support.growing_run import write_run, write_status
from tests.support.refusals import refused
from tests.support.request_driver import driver


def engines(*words: object) -> str:
    """Return the output of an `rlsys engines` command, or raise its error."""
    done = CliRunner().invoke(app, ["engines", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Folder of a run that is active in this process."""
    folder = write_run(tmp_path / "run")
    write_status(folder)
    return folder


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (("join",), ("join", None, None)),
        (("join", 3), ("join", 3, None)),
        (("leave",), ("leave", None, None)),
        (("leave", 1, "--limit", 2.5), ("leave", 1, 2.5)),
        (("leave", 0, "--now"), ("leave", 0, 0.0)),
    ],
)
def test_a_command_waits_until_the_driver_has_done_it(words: tuple[object, ...], asked: object, run: Path) -> None:
    inbox, taken = Inbox(run), []

    def carry_out(request: Request) -> None:
        taken.append((request.action, request.engine, request.limit_s))
        inbox.end(request, "engine 2 joined\x1b[2J")

    with driver(inbox, carry_out):
        assert engines(*words, "--run", run) == "engine 2 joined\\x1b[2J\n"
    assert taken == [asked]


@pytest.mark.parametrize(
    ("words", "code", "key"),
    [
        (("leave", "--now", "--limit", 3), "conflict", "--now"),
        (("leave", "--limit", -1), "out_of_range", "--limit"),
        (("leave", "--limit", "nan"), "out_of_range", "--limit"),
        (("leave", "--limit", "inf"), "out_of_range", "--limit"),
        (("join", 2**40), "out_of_range", "ENGINE"),
    ],
)
def test_a_mistake_is_found_before_the_driver_is_asked(
    words: tuple[object, ...], code: Code, key: str, run: Path
) -> None:
    Inbox(run)
    with refused(code, key):
        engines(*words, "--run", run)
    assert list((run / REQUESTS).iterdir()) == []


def test_only_a_run_that_is_active_and_takes_requests_is_asked(run: Path, tmp_path: Path) -> None:
    with refused("not_found", tmp_path / "none"):
        engines("join", "--run", tmp_path / "none")
    with refused("malformed", tmp_path):
        engines("list", "--run", tmp_path)
    with refused("unsupported", run):
        engines("join", "--run", run)
    Inbox(run)
    write_status(run, ended=FINISHED)
    with refused("conflict", run):
        engines("join", "--run", run)


def test_a_refusal_and_a_failure_of_the_driver_end_the_command(run: Path) -> None:
    inbox = Inbox(run)
    errors = [UserError("engine 9 is none.", code="unknown", key="ENGINE"), RunError("engine 1 has died.")]
    with driver(inbox, lambda request: inbox.refuse(request.name, errors.pop(0))):
        with refused("unknown", "ENGINE"):
            engines("leave", 9, "--run", run)
        with pytest.raises(RunError, match="engine 1 has died"):
            engines("leave", 1, "--run", run)


def test_the_engines_are_listed_as_a_table_or_as_json(run: Path) -> None:
    inbox = Inbox(run)
    rows = [{"engine": 0, "state": "serving", "version": 7, "groups": 3}]
    rows += [{"engine": 12, "state": "starting", "version": None, "groups": 0}]
    with driver(inbox, lambda request: inbox.end(request, "2 engines.", rows)):
        assert json.loads(engines("list", "--run", run, "--json")) == rows
        shown = engines("list", "--run", run)
    words = [re.findall(r"[\w-]+", line) for line in shown.splitlines()]
    assert ["0", "serving", "7", "3"] in words
    assert ["12", "starting", "-", "0"] in words
