"""Tests of the form of every message that rlsys gives a user about a mistake."""

import ast
from collections.abc import Iterator
from typing import get_args

from rlsys.errors import Code
from tests.support.paths import PROJECT

SOURCES = sorted(file for room in ("rlsys", "examples", "scripts", "bench") for file in (PROJECT / room).rglob("*.py"))
HOLE = "\0"
"""Placeholder for values that are filled in when the error is raised."""


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Yield (file and line, call) of each call of UserError or of one of its subclasses."""
    for file in SOURCES:
        text = file.read_text()
        if "UserError" not in text:
            continue
        tree = ast.parse(text)
        made = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef) and any("UserError" in ast.unparse(base) for base in node.bases)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and name_of(node.func) in {"UserError", *made}:
                yield f"{file.relative_to(PROJECT)}:{node.lineno}", node


def name_of(function: ast.expr) -> str:
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def text_of(node: ast.expr) -> str:
    """Return the message with a hole for each value; empty if the message is built elsewhere."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part) if isinstance(part, ast.Constant) else HOLE for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return (text_of(left) or HOLE) + (text_of(right) or HOLE)
    return ""


def problems_of(sentence: str) -> Iterator[str]:
    """Yield the formal faults of a sentence."""
    if not sentence.endswith((".", HOLE)):
        yield "ends without a period"
    if "\n" in sentence:
        yield "is more than a line"
    if "!" in sentence or "please" in sentence.lower():
        yield "pleads"
    if "  " in sentence:
        yield "has two spaces"
    if len(sentence.split()) < 3 and HOLE not in sentence:
        yield "says too little"


def test_every_message_is_one_sentence_with_a_code_and_a_key() -> None:
    found = list(calls())
    assert len(found) > 300, "all calls are found"
    faults = []
    for place, call in found:
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        if None not in given and not {"code", "key"} <= given.keys() and call.args:
            faults.append(f"{place}: has no code or no key")
        code = given.get("code")
        if isinstance(code, ast.Constant) and code.value not in get_args(Code):
            faults.append(f"{place}: has the unknown code {code.value}")
        sentence = text_of(call.args[0]) if call.args else ""
        faults += [f"{place}: {problem}: {sentence}" for problem in problems_of(sentence) if sentence]
    assert faults == []
