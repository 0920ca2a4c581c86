"""Checks docstrings, comments, documents and identifiers against simple rules of style.

    python -m bench.prose [--show opens-dangling] [--under rlsys/search]
    python -m bench.prose --sample 30 --seed 1        # random docstrings for a reader, with the names they document

The command prints counts by room and rule, with the share of docstrings that open with "Of" or "What", and writes
outputs/bench/prose.json. Identifiers are checked for retired words only. The rules see only the form of a sentence; a
reader must judge whether it is clear.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import random
import re
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

PROJECT = Path(__file__).resolve().parents[1]
RESULT = Path("outputs/bench/prose.json")
FOLDERS = ("rlsys", "examples", "toolkits", "bench", "scripts", "tests", "docs")
LONGEST_SENTENCE = 35
"""Maximum number of words in a sentence."""
WORST_OPENINGS = ("Of ", "What ")
"""Openings whose share of all docstrings is shown."""
QUESTIONS = {"What", "How", "Which", "Whether", "Who", "Whose", "Why"}
DANGLING = {
    "Of",
    "That",
    "With",
    "As",
    "By",
    "In",
    "To",
    "At",
    "From",
    "So",
    "Where",
    "When",
    "Those",
    "Its",
    "And",
    "But",
}
PERSONS = re.compile(r"\b(lie[sd]? to|lying|comforts?|bereaved|bury|buried|content with|believes?|knows? nothing)\b")
STILTED = re.compile(
    r"\b(so many|go(es)? on|under way|(is|are) (said|told)|(is|are) (that|those) of|as (it is|they are))\b"
)
"""Stilted phrases. Plainer words are: N, continue, in flight, state, the same as."""
RETIRED = {
    "ledger": "scheduler",
    "bereaved": "on_engine_death",
    "last_words": "last_error",
    "under_way": "in_flight",
    "last words": "last error",
    "parcel": "bucket handle",
    "bite": "score batch",
    "stranger": "anyone without the token",
    "dooms": "marks unschedulable",
    "dealer": "batch sharder",
    "residence": "offload manager",
    "tenant": "resident",
    "takes turns": "colocated",
    "take turns": "colocated",
    "collocated": "colocated",
    "doomed": "unschedulable",
    "shelf": "version buckets",
    "shelves": "version buckets",
    "tether": "parent watch",
    "offspring": "child processes",
}
"""Retired word -> the field's word for the same thing."""


@dataclass(frozen=True)
class Prose:
    """A docstring, a comment, a paragraph or an identifier, and its place."""

    room: str
    kind: str
    """`module`, `class`, `function`, `attribute`, `comment`, `paragraph` or `identifier`."""
    place: str
    name: str
    """Identifier that a docstring belongs to."""
    text: str

    @property
    def is_docstring(self) -> bool:
        return self.kind not in ("comment", "paragraph", "identifier")


def sentences(text: str) -> list[str]:
    """Return the sentences of a text, without indented commands and inline code."""
    prose = re.sub(r"^ {4}.*$", ".", inspect.cleandoc(text), flags=re.MULTILINE)
    return re.split(r"(?<=[.:;?!])\s+", re.sub(r"`[^`]*`", "code", " ".join(prose.split())))


def first_word(prose: Prose) -> str:
    return prose.text.split(maxsplit=1)[0].rstrip(",:") if prose.is_docstring else ""


def has_retired_word(prose: Prose) -> bool:
    """True for a retired word in a text, or between the underscores of an identifier."""
    return any(re.search(rf"(?<![a-z]){word}(?![a-z])", prose.text.lower()) for word in RETIRED)


RULES: dict[str, Callable[[Prose], bool]] = {
    "opens-with-question": lambda prose: first_word(prose) in QUESTIONS,
    "opens-dangling": lambda prose: first_word(prose) in DANGLING,
    "long-sentence": lambda prose: any(len(one.split()) > LONGEST_SENTENCE for one in sentences(prose.text)),
    "person": lambda prose: prose.kind != "identifier" and bool(PERSONS.search(prose.text)),
    "stilted": lambda prose: prose.kind != "identifier" and bool(STILTED.search(prose.text)),
    "retired-word": has_retired_word,
}


def percent_of_worst_openings(found: Sequence[Prose]) -> float:
    """Return the percentage of docstrings that open with one of `WORST_OPENINGS`; 0 without docstrings."""
    written = [prose.text for prose in found if prose.is_docstring]
    return 100 * sum(text.startswith(WORST_OPENINGS) for text in written) / max(1, len(written))


def docstrings(tree: ast.AST) -> Iterator[tuple[str, int, str, str]]:
    """Yield kind, line, name and text of each docstring, including those of attributes."""
    kinds = {ast.Module: "module", ast.ClassDef: "class", ast.FunctionDef: "function", ast.AsyncFunctionDef: "function"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if text := ast.get_docstring(node):
                yield kinds[type(node)], getattr(node, "lineno", 1), getattr(node, "name", ""), text
            for before, after in zip(node.body, node.body[1:], strict=False):
                match before, after:
                    case (ast.Assign() | ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str(text)))):
                        yield "attribute", after.lineno, ast.unparse(before).split("=")[0].strip(), text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each comment, except comments for tools."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#!?\s*(noqa|type:|fmt:|ruff:|!|pragma)", token.string):
            yield token.start[0], token.string.lstrip("# ")


def identifiers(tree: ast.AST) -> dict[str, int]:
    """Return names of definitions, arguments, variables and attributes -> a line of each."""
    return {
        name: getattr(node, "lineno", 1)
        for node in ast.walk(tree)
        for field in ("id", "attr", "arg", "name")
        if isinstance(name := getattr(node, field, None), str)
    }


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each paragraph of a document, without code, tables and headings."""
    inside, line = False, 1
    for block in re.split(r"(\n\s*\n)", text):
        inside ^= block.count("```") % 2 == 1
        if not (inside or "```" in block or block.startswith(("    ", "|", "#", "!", "<")) or not block.strip()):
            yield line, block.strip()
        line += block.count("\n")


def read(folder: str) -> Iterator[Prose]:
    """Yield all prose of a folder."""
    for file in sorted((PROJECT / folder).rglob("*.py")):
        parts, name, source = file.relative_to(PROJECT).parts, str(file.relative_to(PROJECT)), file.read_text()
        room = "/".join(parts[:2]) if parts[0] in ("rlsys", "tests") and len(parts) > 2 else parts[0]
        tree = ast.parse(source)
        for kind, line, owner, text in docstrings(tree):
            yield Prose(room, kind, f"{name}:{line}", owner, text)
        for line, text in comments(source):
            yield Prose(room, "comment", f"{name}:{line}", "", text)
        for text, line in identifiers(tree).items():
            yield Prose(room, "identifier", f"{name}:{line}", text, text)
    documents = [*(PROJECT / folder).rglob("*.md"), *(PROJECT.glob("*.md") if folder == "docs" else ())]
    for file in sorted(documents):
        for line, text in paragraphs(file.read_text()):
            yield Prose(folder, "paragraph", f"{file.relative_to(PROJECT)}:{line}", "", text)


def main(
    show: Annotated[
        list[str] | None, typer.Option(help=f"Rule whose violations are listed: {', '.join(RULES)}.")
    ] = None,
    under: Annotated[str, typer.Option(help="Path prefix of the files to check.")] = "",
    sample: Annotated[int, typer.Option(help="Print this many random docstrings instead of counts.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the sample.")] = 0,
) -> None:
    """Count violations of the rules, or print random docstrings for a reader."""
    console = Console(width=150, soft_wrap=True)
    found = [prose for folder in FOLDERS for prose in read(folder) if prose.place.startswith(under)]
    if sample:
        written = [prose for prose in found if prose.is_docstring]
        for prose in random.Random(seed).sample(written, min(sample, len(written))):
            console.print(
                f"{prose.place} {prose.kind} {prose.name}\n    {' '.join(prose.text.split())}\n", markup=False
            )
        return
    broken = [(rule, prose) for prose in found for rule, breaks in RULES.items() if breaks(prose)]
    for rule, prose in broken:
        if rule in (show or ()):
            console.print(f"{prose.place} {prose.name}: {' '.join(prose.text.split())[:200]}", markup=False)
    pieces = Counter(prose.room for prose in found if prose.kind != "identifier")
    counts = Counter((prose.room, rule) for rule, prose in broken)
    table = Table("room", "pieces", *RULES, "Of/What %")
    shares = {}
    for room, number in sorted(pieces.items()):
        shares[room] = percent_of_worst_openings([prose for prose in found if prose.room == room])
        table.add_row(room, str(number), *(str(counts[room, rule]) for rule in RULES), f"{shares[room]:.1f}")
    totals = (str(sum(counts[room, rule] for room in pieces)) for rule in RULES)
    shares["all"] = percent_of_worst_openings(found)
    table.add_row("all", str(sum(pieces.values())), *totals, f"{shares['all']:.1f}")
    console.print(table)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    rows = [asdict(prose) | {"rule": rule} for rule, prose in broken]
    result = {"pieces": pieces, "percent_of_or_what": shares, "broken": rows}
    RESULT.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    typer.run(main)
