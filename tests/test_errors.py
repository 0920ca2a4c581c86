"""Which error of a group is shown."""

from __future__ import annotations

from rlsys.errors import RunError, UserError, root_cause


def test_a_single_error_is_its_own_cause() -> None:
    error = ValueError("alone")
    assert root_cause(error) is error


def test_what_is_made_for_people_comes_before_what_is_not() -> None:
    wanted = RunError("actor rank 1 is gone")
    group = BaseExceptionGroup("stages", [KeyError("x"), ExceptionGroup("inner", [OSError(), wanted])])
    assert root_cause(group) is wanted


def test_of_several_the_first_is_shown() -> None:
    first, second = UserError("first"), RunError("second")
    assert root_cause(ExceptionGroup("both", [ExceptionGroup("inner", [first]), second])) is first


def test_without_one_for_people_the_first_of_all_is_shown() -> None:
    first = KeyError("first")
    assert root_cause(ExceptionGroup("all", [ExceptionGroup("inner", [first]), OSError()])) is first
