"""Reads the commands that the documents show, as a reader would type them.

A command is a line of an indented or fenced block that begins with a program; a backslash at its end continues it, and
a trailing comment is not part of it. Commands within a sentence (`rlsys ...`) are marked as such.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import PROJECT

PAGES = [
    PROJECT / "README.md",
    PROJECT / "CONTRIBUTING.md",
    *sorted((PROJECT / "docs").rglob("*.md")),
    *sorted((PROJECT / "examples").rglob("*.md")),
    *sorted((PROJECT / "launch").rglob("*.md")),
]
_PROGRAMS = "rlsys|make|python|bash|sh|sbatch|kubectl|hf|docker|curl|pip|mkdocs|\\./scripts/\\S+|\\."
_COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:{_PROGRAMS}) \S|echo .*\| rlsys ")
_INDENT = "    "
_INLINE = re.compile(r"`(rlsys [^`]+|python -m [^`]+|bash [^`]+)`")


def commands(page: Path) -> Iterator[tuple[str, bool]]:
    """Yield each command of `page` as one line, in order, and True if it is in a block, False if in a sentence."""
    text = re.sub(r"\s*\\\n\s*", " ", page.read_text(encoding="utf-8"))
    for line in _block_lines(text):
        bare = re.sub(r"\s{2,}#.*$", "", line.strip())
        if _COMMAND.match(bare):
            yield bare, True
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for match in _INLINE.finditer(outside):
        yield " ".join(match[1].split()), False


def fenced_blocks(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def _block_lines(text: str) -> Iterator[str]:
    fenced = False
    before = ""
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or (line.startswith(_INDENT) and (not before.strip() or before.startswith(_INDENT))):
            yield line
        before = line
