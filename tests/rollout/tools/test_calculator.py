"""The calculator against Python's own arithmetic, and against text that is none."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.rollout.tools.calculator import DIGITS, MOST_CHARS, Calculator, spelled, value_of
from rlsys.rollout.tools.interface import ToolError

SMALL = st.recursive(
    st.integers(0, 99).map(lambda number: (str(number), Fraction(number)))
    | st.tuples(st.integers(0, 99), st.integers(0, 99)).map(
        lambda parts: (f"{parts[0]}.{parts[1]:02d}", Fraction(parts[0] * 100 + parts[1], 100))
    ),
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(
        lambda parts: (
            f"({parts[0][0]} {parts[1]} {parts[2][0]})",
            {"+": Fraction.__add__, "-": Fraction.__sub__, "*": Fraction.__mul__}[parts[1]](parts[0][1], parts[2][1]),
        )
    ),
    max_leaves=8,
)


@given(SMALL)
def test_sums_and_products_are_exact(made: tuple[str, Fraction]) -> None:
    text, expected = made
    assert value_of(text) == expected


@given(st.decimals("-1e30", "1e30", places=12), st.integers(-(10**40), 10**40))
def test_every_digit_counts(number: Decimal, other: int) -> None:
    assert value_of(f"({number:f}) - ({other})") == Fraction(number) - other


@given(st.integers(-50, 50), st.integers(-50, 50).filter(bool), st.sampled_from(["//", "%", "/"]))
def test_divisions_are_those_of_python(left: int, right: int, sign: str) -> None:
    expected = Fraction(left, right) if sign == "/" else {"//": left // right, "%": left % right}[sign]
    assert value_of(f"({left}) {sign} ({right})") == expected


@given(st.fractions().filter(lambda one: one.denominator > 1))
def test_a_result_is_rounded_to_its_digits(value: Fraction) -> None:
    assert abs(Fraction(spelled(value)) - value) <= abs(value) * Fraction(1, 2 * 10 ** (DIGITS - 1))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0.1 + 0.2", "0.3"),
        ("-7 // 2", "-4"),
        ("2 ^ 10", "1024"),
        ("2 ** -2", "0.25"),
        ("-2 ** 2", "-4"),
        ("6 × 7 ÷ 2 − 1", "20"),
        ("1e3", "1000"),
        ("1 / 3", "0.333333333333"),
        ("2 ** 0.5", "1.41421356237"),
        ("4 ** 0.5", "2"),
        ("(((1)))", "1"),
        ("123456789 * 1000.5", "123518517394.5"),
        ("10 ** 300", "1" + "0" * 300),
        ("1 ** (10 ** 300)", "1"),
        ("0e99999999999999999", "0"),
        (" (1 +\n\t2)\r\n* 3 ", "9"),
    ],
)
async def test_what_it_says(text: str, said: str) -> None:
    found = await Calculator().call(text)
    assert found == said or math.isclose(float(found), float(said), rel_tol=1e-11)
    assert len(found) <= len(said)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("0 ** -0.5", "division by zero"),
        ("5 % 0", "division by zero"),
        ("9 ** 9 ** 9 ** 9", "too large"),
        ("2 ** (2 ** 1000)", "too large"),
        ("1e999", "too large"),
        ("1e999999999", "too large"),
        ("1e-999999999", "too many digits"),
        ("1e99999999999999999999", "too large"),
        ("9" * 350, "too large"),
        ("(10 ** 300) ** 1.5", "too large"),
        ("(-8) ** (1 / 3)", "root of a negative number"),
        ("__import__('os').system('true')", "only numbers"),
        ("abs(1)", "only numbers"),
        ("1j", "only numbers"),
        ("1 if 1 else 2", "only numbers"),
        ("", "only numbers"),
        ("٣ + ٤", "only numbers"),
        ("5(3)", "cannot be read"),
        ("1 +", "cannot be read"),
        ("50%", "cannot be read"),
        ("()", "cannot be read"),
        ("0777", "cannot be read"),
        ("(" * 300 + "1" + ")" * 50, "cannot be read"),
        ("1" + " " * MOST_CHARS + "+ 1", "longer than 400"),
    ],
)
def test_what_it_does_not_say(text: str, why: str) -> None:
    with pytest.raises(ToolError, match=why):
        value_of(text)


@given(st.text("0123456789.+-*/%() eE^\n\t", max_size=40))
def test_any_text_has_a_value_or_a_reason(text: str) -> None:
    try:
        found = spelled(value_of(text))
    except ToolError:
        return
    assert len(found) < 400


def test_depth_is_bounded_by_length() -> None:
    assert value_of("-" * (MOST_CHARS - 1) + "1") == -1
