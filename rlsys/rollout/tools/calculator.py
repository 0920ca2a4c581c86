"""A calculator tool: exact arithmetic on the policy's text, without evaluating it as code.

Contract: an expression has numbers, + - * / // % ** and parentheses; `^`, `×`, `÷` and `−` work too. Decimal numbers
are exact: 0.1 + 0.2 is 0.3. Roots have the precision of a float. Limits on the length of an expression and on the size
of every intermediate number bound time and memory.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from decimal import Context, Decimal, InvalidOperation
from fractions import Fraction

from rlsys.rollout.tools.interface import ToolError

MAX_CHARS = 400
"""Maximum length of an expression; this also bounds the nesting."""
MAX_BITS = 1024
"""Maximum bits of a numerator and of a denominator: 308 decimal digits each."""
DIGITS = 12
"""Significant digits of a result that is not an integer."""
_TOO_LARGE = "a number is too large, or has too many digits"

_WRITTEN = str.maketrans({"^": "**", "×": "*", "÷": "/", "−": "-", "\n": " ", "\r": " ", "\t": " "})
_ALLOWED = re.compile(r"(?:[0-9.][eE][+-]?[0-9]|[0-9.+\-*/%() ])+")
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class Calculator:
    """Calculator tool; `rlsys.rollout.tools.interface.Tool` explains the attributes."""

    name = "calculator"
    tag = "calculator"
    timeout_s = 1.0
    description = "evaluate arithmetic with + - * / // % ** and parentheses"

    async def call(self, text: str) -> str:
        """Return the value of the expression `text`. Raises ToolError if the expression has no value."""
        return spelled(value_of(text))


def value_of(text: str) -> Fraction:
    """Return the exact value of an expression. Raises ToolError for other text, for x / 0 and beyond the limits."""
    expression = text.translate(_WRITTEN).strip()
    if len(expression) > MAX_CHARS:
        raise ToolError(f"the expression is longer than {MAX_CHARS} characters")
    if not _ALLOWED.fullmatch(expression):
        raise ToolError("only numbers, + - * / // % ** and parentheses can be used")
    try:
        return _value(ast.parse(expression, mode="eval").body, expression)
    except (SyntaxError, RecursionError, MemoryError):
        raise ToolError("the expression cannot be read") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None


def spelled(value: Fraction) -> str:
    """Write an integer in full, and any other number with `DIGITS` significant digits."""
    if value.denominator == 1:
        return str(value.numerator)
    rounded = Context(prec=DIGITS).divide(Decimal(value.numerator), Decimal(value.denominator))
    return f"{rounded.normalize():g}"


def _value(node: ast.expr, text: str) -> Fraction:
    """Evaluate `node`, which was parsed from `text`."""
    match node:
        case ast.Constant(value=int() | float()):
            return _as_written(text[node.col_offset : node.end_col_offset])
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, text)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, text)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left, text), _value(right, text))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _bounded(Fraction(_OPERATIONS[type(op)](_value(left, text), _value(right, text))))
    raise ToolError("the expression cannot be read")


def _as_written(literal: str) -> Fraction:
    """Return the decimal number as written, not the nearest binary float."""
    try:
        number = Decimal(literal)
    except InvalidOperation:  # The exponent exceeds all bounds.
        raise ToolError(_TOO_LARGE) from None
    # Check the exponent first: even a short exponent can stand for any number of digits.
    if number and abs(number.adjusted()) > MAX_BITS:
        raise ToolError(_TOO_LARGE)
    return _bounded(Fraction(number)) if number else Fraction(0)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    """Return `base` ** `exponent`; checks the size of the result before computing it."""
    if exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits > 1 and abs(exponent.numerator) * (bits - 1) > MAX_BITS:
            raise ToolError(_TOO_LARGE)
        # Raises ZeroDivisionError for a negative power of 0.
        return _bounded(Fraction(base**exponent.numerator))
    if base < 0:
        raise ToolError("a root of a negative number")
    try:
        return _as_written(repr(float(base) ** float(exponent)))
    except OverflowError:
        raise ToolError(_TOO_LARGE) from None


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ToolError(_TOO_LARGE)
    return value
