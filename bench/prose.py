"""Reads the project's prose by simple rules: docstrings, comments, and documents.

    python -m bench.prose [--show opening] [--under rlsys/search]
    python -m bench.prose --sample 30 --seed 1        # docstrings for a reader, with their code's names

Prints counts by room and rule, and writes outputs/bench/prose.json. The rules see form alone; whether a sentence is clear at
the first reading takes a reader.
"""

from __future__ import annotations

import ast
import io
import json
import random
import re
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
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
"""Words."""
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
PERSONS = re.compile(
    r"\b(lie[sd]? to|lying|comforts?|bereaved|last words|bury|buried|content with|believes?|knows? nothing)\b"
)
RETIRED = {
    "ledger": "scheduler",
    "bereaved": "on_engine_death",
    "last_words": "last_error",
    "under_way": "in_flight",
    "parcel": "bucket handle",
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
"""Word that is no longer used -> the field's word for the same thing."""


@dataclass(frozen=True)
class Prose:
    """A docstring, a comment or a paragraph, and its place."""

    room: str
    kind: str
    """`module`, `class`, `function`, `attribute`, `comment` or `paragraph`."""
    place: str
    name: str
    """Identifier that a docstring belongs to."""
    text: str


def sentences(text: str) -> list[str]:
    """Sentences of a text, without inline code."""
    return re.split(r"(?<=[.:;?!])\s+", re.sub(r"`[^`]*`", "code", " ".join(text.split())))


def first_word(prose: Prose) -> str:
    return prose.text.split(maxsplit=1)[0].rstrip(",:") if prose.kind not in ("comment", "paragraph") else ""


RULES: dict[str, Callable[[Prose], bool]] = {
    "opens-with-question": lambda prose: first_word(prose) in QUESTIONS,
    "opens-dangling": lambda prose: first_word(prose) in DANGLING,
    "long-sentence": lambda prose: any(len(one.split()) > LONGEST_SENTENCE for one in sentences(prose.text)),
    "person": lambda prose: bool(PERSONS.search(prose.text)),
    "retired-word": lambda prose: any(re.search(rf"\b{word}\b", prose.text, re.I) for word in RETIRED),
}


def docstrings(tree: ast.AST) -> Iterator[tuple[str, int, str, str]]:
    """Kind, line, name and text of each docstring, those of attributes included."""
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
    """Line and text of each comment, but those for tools."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#!?\s*(noqa|type:|fmt:|ruff:|!|pragma)", token.string):
            yield token.start[0], token.string.lstrip("# ")


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of each paragraph of a document: no code, tables or headings."""
    inside, line = False, 1
    for block in re.split(r"(\n\s*\n)", text):
        inside ^= block.count("```") % 2 == 1
        if not (inside or "```" in block or block.startswith(("    ", "|", "#", "!", "<")) or not block.strip()):
            yield line, block.strip()
        line += block.count("\n")


def read(folder: str) -> Iterator[Prose]:
    """All prose of a folder."""
    for file in sorted((PROJECT / folder).rglob("*.py")):
        parts, name, source = file.relative_to(PROJECT).parts, str(file.relative_to(PROJECT)), file.read_text()
        room = "/".join(parts[:2]) if parts[0] in ("rlsys", "tests") and len(parts) > 2 else parts[0]
        for kind, line, owner, text in docstrings(ast.parse(source)):
            yield Prose(room, kind, f"{name}:{line}", owner, text)
        for line, text in comments(source):
            yield Prose(room, "comment", f"{name}:{line}", "", text)
    documents = [*(PROJECT / folder).rglob("*.md"), *(PROJECT.glob("*.md") if folder == "docs" else ())]
    for file in sorted(documents):
        for line, text in paragraphs(file.read_text()):
            yield Prose(folder, "paragraph", f"{file.relative_to(PROJECT)}:{line}", "", text)


def main(
    show: Annotated[list[str] | None, typer.Option(help=f"Rules whose places are listed: {', '.join(RULES)}.")] = None,
    under: Annotated[str, typer.Option(help="Beginning of the places that count.")] = "",
    sample: Annotated[int, typer.Option(help="Docstrings to draw at random; nothing is counted then.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the sample.")] = 0,
) -> None:
    """Count what breaks the rules, or draw docstrings to be read."""
    console = Console(width=150, soft_wrap=True)
    found = [prose for folder in FOLDERS for prose in read(folder) if prose.place.startswith(under)]
    if sample:
        written = [prose for prose in found if prose.kind not in ("comment", "paragraph")]
        for prose in random.Random(seed).sample(written, min(sample, len(written))):
            console.print(
                f"{prose.place} {prose.kind} {prose.name}\n    {' '.join(prose.text.split())}\n", markup=False
            )
        return
    broken = [(rule, prose) for prose in found for rule, breaks in RULES.items() if breaks(prose)]
    for rule, prose in broken:
        if rule in (show or ()):
            console.print(f"{prose.place} {prose.name}: {' '.join(prose.text.split())[:200]}", markup=False)
    pieces, counts = Counter(prose.room for prose in found), Counter((prose.room, rule) for rule, prose in broken)
    table = Table("room", "pieces", *RULES)
    for room, number in sorted(pieces.items()):
        table.add_row(room, str(number), *(str(counts[room, rule]) for rule in RULES))
    table.add_row("all", str(len(found)), *(str(sum(counts[room, rule] for room in pieces)) for rule in RULES))
    console.print(table)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    rows = [asdict(prose) | {"rule": rule} for rule, prose in broken]
    RESULT.write_text(json.dumps({"pieces": pieces, "broken": rows}, indent=1))


if __name__ == "__main__":
    typer.run(main)
