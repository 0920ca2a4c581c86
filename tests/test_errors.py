"""The error of a group that is shown, and errors that cross processes."""

from __future__ import annotations

import pickle

import pytest

from rlsys.errors import RunError, UserError, root_cause

WANTED, OTHER, FIRST = RunError("actor rank 1 is gone"), UserError("second", code="missing", key="a"), KeyError("x")


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (FIRST, FIRST),
        (BaseExceptionGroup("stages", [FIRST, ExceptionGroup("inner", [OSError(), WANTED])]), WANTED),
        (ExceptionGroup("both", [ExceptionGroup("inner", [WANTED]), OTHER]), WANTED),
        (ExceptionGroup("all", [ExceptionGroup("inner", [FIRST]), OSError()]), FIRST),
    ],
    ids=["alone", "for people", "the first of several", "none for people"],
)
def test_the_first_error_that_is_made_for_people_is_shown(error: BaseException, shown: BaseException) -> None:
    assert root_cause(error) is shown


def test_an_error_keeps_its_code_and_key_on_its_way_to_another_process() -> None:
    arrived = pickle.loads(pickle.dumps(OTHER))
    assert (type(arrived), str(arrived), arrived.code, arrived.key) == (UserError, "second", "missing", "a")
