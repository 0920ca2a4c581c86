"""Errors that are shown to people and cross processes, and the messages that RLSYS_LOG asks for."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys

import pytest

from rlsys.errors import RunError, UserError, root_cause

WANTED, OTHER, FIRST = RunError("actor rank 1 is gone"), UserError("second", code="missing", key="a"), KeyError("x")
LOG = """
import logging
import rlsys
for level in (logging.DEBUG, logging.INFO, logging.WARNING):
    logging.getLogger("rlsys.observe.status").log(level, "one of %s", level)
    logging.getLogger("elsewhere").log(level, "of another library")
"""
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (\w+) rlsys\.observe\.status: one of \d+")


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        pytest.param(FIRST, FIRST, id="alone"),
        pytest.param(
            BaseExceptionGroup("stages", [FIRST, ExceptionGroup("inner", [OSError(), WANTED])]), WANTED, id="for people"
        ),
        pytest.param(
            ExceptionGroup("both", [ExceptionGroup("inner", [WANTED]), OTHER]), WANTED, id="the first of several"
        ),
        pytest.param(ExceptionGroup("all", [ExceptionGroup("inner", [FIRST]), OSError()]), FIRST, id="none for people"),
    ],
)
def test_the_first_error_that_is_made_for_people_is_shown(error: BaseException, shown: BaseException) -> None:
    assert root_cause(error) is shown


def test_an_error_keeps_its_code_and_key_on_its_way_to_another_process() -> None:
    arrived = pickle.loads(pickle.dumps(OTHER))
    assert (type(arrived), str(arrived), arrived.code, arrived.key) == (UserError, "second", "missing", "a")


def logged(value: str) -> list[str]:
    environment = os.environ | {"RLSYS_LOG": value}
    command = [sys.executable, "-c", LOG]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stderr.splitlines()


def test_messages_from_the_level_on_are_shown_with_time_level_and_name() -> None:
    lines = logged("INFO")
    assert [match[1] for text in lines if (match := LINE.fullmatch(text))] == ["INFO", "WARNING"]
    assert [text for text in lines if not LINE.fullmatch(text)] == ["of another library"], "its warning, as ever"
    told, *as_ever = logged("loud")
    assert "RLSYS_LOG=loud" in told, "a word that is no level"
    assert as_ever == ["one of 30", "of another library"]
