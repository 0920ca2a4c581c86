"""RLSYS_LOG sets what a process of rlsys logs to stderr."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

LOG = """
import logging
import rlsys
for level in (logging.DEBUG, logging.INFO, logging.WARNING):
    logging.getLogger("rlsys.observe.status").log(level, "one of %s", level)
    logging.getLogger("elsewhere").log(level, "of another library")
"""


@pytest.mark.parametrize(
    ("value", "levels"),
    [("debug", ["DEBUG", "INFO", "WARNING"]), ("INFO", ["INFO", "WARNING"])],
)
def test_messages_from_the_level_on_are_shown_with_time_level_and_name(value: str, levels: list[str]) -> None:
    lines = logged(value)
    line = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (\w+) rlsys\.observe\.status: one of \d+")
    assert [match[1] for text in lines if (match := line.fullmatch(text))] == levels
    assert [text for text in lines if not line.fullmatch(text)] == ["of another library"], "its warning, as ever"


def test_a_word_that_is_no_level_is_told_and_ignored() -> None:
    told, *as_ever = logged("loud")
    assert "RLSYS_LOG=loud" in told
    assert as_ever == ["one of 30", "of another library"]


def logged(value: str) -> list[str]:
    environment = os.environ | {"RLSYS_LOG": value}
    done = subprocess.run(
        [sys.executable, "-c", LOG], capture_output=True, text=True, timeout=600, check=True, env=environment
    )
    return done.stderr.splitlines()
