"""Files of questions made ready to train and evaluate on: public sets, own files, and several as one.

Contract: a prepared file is jsonl of Search-R1 rows, each with the raw question beside the prompt; it appears under its
name only when every row is checked, with a record of where it comes from and of its SHA-256 in `<file>.json`. A row that
cannot be used is a UserError with its file and line; nothing is left out in silence. The same input gives the same bytes.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsys.data.question import Question, question_of, read_rows
from rlsys.data.template import Template, search_prompt
from rlsys.errors import UserError
from rlsys.files import sha256_of, write_atomically

QUESTION_FIELDS = ("question", "query", "problem")
ANSWER_FIELDS = ("golden_answers", "answers", "answer", "solutions", "target")
_TABLES = {".csv": ",", ".tsv": "\t"}
_MOST_SAID = 10


@dataclass(frozen=True, slots=True)
class Prepared:
    """A file that was made."""

    path: Path
    rows: int
    sha256: str


@dataclass(frozen=True, slots=True)
class _Fields:
    """Names that are tried, in order."""

    question: Sequence[str]
    answers: Sequence[str]


@dataclass(frozen=True, slots=True)
class _Made:
    """What questions are made of."""

    source: Path
    name: str
    split: str
    fields: _Fields
    prompt: Template


def prepare_file(
    source: Path,
    name: str,
    split: str,
    out: Path,
    limit: int | None = None,
    *,
    question: str | None = None,
    answers: str | None = None,
    prompt: Template = search_prompt,
) -> Prepared:
    """Make `out` from a file of the set `name`: FlashRAG's, or one's own, which is jsonl, parquet, csv or tsv.

    `question` and `answers` name its fields; without them the usual names are tried. Answers are a list or one text.
    """
    fields = _Fields((question,) if question else QUESTION_FIELDS, (answers,) if answers else ANSWER_FIELDS)
    made = _Made(source, name, split, fields, prompt)
    return _prepare([source], out, lambda: _asked(made, limit))


def merge(sources: Sequence[Path], out: Path, seed: int | None) -> Prepared:
    """Make `out` of all rows of prepared files, in their order or shuffled by `seed`; their index is unique in it."""

    def rows() -> Iterator[Question]:
        found = [question_of(file, line, row) for file in sources for line, row in read_rows(file)]
        if seed is not None:
            random.Random(seed).shuffle(found)
        yield from found

    return _prepare(sources, out, rows)


def _prepare(sources: Sequence[Path], out: Path, questions: Callable[[], Iterable[Question]]) -> Prepared:
    if out.suffix != ".jsonl":
        raise UserError(f"{out} is not a .jsonl file: questions are written as jsonl, so call it so.")
    if any(source.resolve() == out.resolve() for source in sources):
        raise UserError(f"{out} is read and cannot be written too: give another file.")
    for source in sources:
        if not source.is_file():
            raise UserError(f"{source} does not exist: give a file of questions.")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        rows, sha256 = _write(partial, questions())
        if not rows:
            raise UserError(f"{', '.join(map(str, sources))} has no question: give a file with at least one row.")
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    origin = [{"file": str(source), "sha256": sha256_of(source)} for source in sources]
    record = {"rows": rows, "sha256": sha256, "from": origin}
    write_atomically(out.with_name(f"{out.name}.json"), json.dumps(record, indent=2) + "\n")
    return Prepared(out, rows, sha256)


def _write(path: Path, questions: Iterable[Question]) -> tuple[int, str]:
    digest, rows = hashlib.sha256(), 0
    with path.open("wb") as file:
        for question in questions:
            line = (json.dumps(_row(question, rows), ensure_ascii=False) + "\n").encode()
            digest.update(line)
            file.write(line)
            rows += 1
        file.flush()
        os.fsync(file.fileno())
    return rows, digest.hexdigest()


def _row(question: Question, index: int) -> dict[str, Any]:
    """As Search-R1 writes it, with the raw question."""
    return {
        "data_source": question.data_source,
        **({"question": question.text} if question.text else {}),
        "prompt": [{"role": "user", "content": question.prompt}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": list(question.answers)}},
        "extra_info": {**question.extra, "index": index},
    }


def _asked(made: _Made, limit: int | None) -> Iterator[Question]:
    """The first `limit` questions of raw rows, or all. Bad rows up to there are told at once, at the end."""
    bad: list[str] = []
    rows, found = _raw_rows(made.source), 0
    while found != limit:
        try:
            line, row = next(rows)
        except StopIteration:
            break
        except UserError as problem:  # Behind what is no row at all, nothing can be read.
            bad.append(str(problem))
            break
        try:
            question = _question(made, line, row)
        except UserError as problem:
            bad.append(str(problem))
            continue
        found += 1
        yield question
    if bad:
        more = f"\nand {len(bad) - _MOST_SAID} more rows" if len(bad) > _MOST_SAID else ""
        raise UserError("\n".join(bad[:_MOST_SAID]) + more)


def _question(made: _Made, line: int, row: Any) -> Question:
    where = f"{made.source}, line {line}"
    if not isinstance(row, Mapping):
        raise UserError(f"{where} is not an object: write one JSON object a line.")
    text = _field(row, made.fields.question)
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where} has no question: {_named(made.fields.question)} must be a text that is not empty.")
    answers = _field(row, made.fields.answers)
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not answers or not all(isinstance(one, str) and one.strip() for one in answers):
        raise UserError(
            f"{where} has no answer: {_named(made.fields.answers)} must be a text or a list of texts, none of them empty."
        )
    return Question(
        uid=f"{made.source.stem}:{line}",
        prompt=made.prompt(text),
        answers=tuple(answers),
        data_source=made.name,
        extra={"split": made.split},
        text=text.strip(),
    )


def _field(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _named(fields: Sequence[str]) -> str:
    return " or ".join(f'"{field}"' for field in fields)


def _raw_rows(source: Path) -> Iterator[tuple[int, Any]]:
    """Rows of jsonl and parquet as they are, of csv and tsv by their header."""
    if source.suffix not in _TABLES:
        yield from read_rows(source)
        return
    with source.open(encoding="utf-8-sig", newline="") as file:
        try:
            table = csv.DictReader(file, delimiter=_TABLES[source.suffix])
            for row in table:
                yield table.line_num, row
        except UnicodeDecodeError as problem:
            raise UserError(f"{source} is not UTF-8: save the file as UTF-8.") from problem
        except csv.Error as problem:
            raise UserError(
                f"{source}, line {table.line_num} is no {source.suffix[1:]} ({problem}): mend it."
            ) from problem
