"""Tests of the calculator: values of expressions, and text that is no expression."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.rollout.tools.calculator import MAX_CHARS, Calculator, spelled, value_of
from rlsys.rollout.tools.interface import ToolError


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0.1 + 0.2", "0.3"),
        ("2 / 3", "0.666666666667"),
        ("2 ^ 10", "1024"),
        ("-2 ** 2", "-4"),
        ("-7 // 2", "-4"),
        ("-7 % 2", "1"),
        ("6 × 7 ÷ 2 − 1", "20"),
        ("2 ** 0.5", "1.41421356237"),
        ("10 ** 300", "1" + "0" * 300),
        ("0e99999999999999999", "0"),
        (" (1 +\n\t2)\r\n* 3 ", "9"),
        ("-" * (MAX_CHARS - 1) + "1", "-1"),
    ],
)
async def test_expression_has_its_value(text: str, said: str) -> None:
    found = await Calculator().call(text)
    assert found == said or math.isclose(float(found), float(said), rel_tol=1e-11)
    assert len(found) <= len(said)


@pytest.mark.parametrize(
    "text",
    [
        "1 / 0",
        "0 ** -0.5",
        "9 ** 9 ** 9 ** 9",
        "1e99999999999999999999",
        "9" * 350,
        "__import__('os').system('true')",
        "",
        "٣ + ٤",
        "(" * 300 + "1" + ")" * 50,
        "1" + " " * MAX_CHARS + "+ 1",
    ],
)
def test_other_text_is_a_tool_error(text: str) -> None:
    with pytest.raises(ToolError):
        value_of(text)


@settings(max_examples=50)
@given(st.text("0123456789.+-*/%() eE^\n\t", max_size=40))
def test_random_text_has_a_short_value_or_a_tool_error(text: str) -> None:
    try:
        found = spelled(value_of(text))
    except ToolError:
        return
    assert len(found) < 400
