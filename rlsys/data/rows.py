"""Reading questions: Search-R1 rows from jsonl or parquet, every row checked.

Contract: `read_questions` gives each row a unique id (file stem and row number, since merged data sets
repeat their own `index`), or raises `UserError` naming the file, the line and the field.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlsys.data.question import Question
from rlsys.errors import UserError


def read_questions(path: str | Path, limit: int | None = None) -> list[Question]:
    """All questions of `path` in file order, at most `limit`."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{file} does not exist: give the path of a jsonl or parquet file of questions.")
    readers = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
    if file.suffix not in readers:
        raise UserError(f"{file} is neither .jsonl nor .parquet: convert it to one of them.")
    questions: list[Question] = []
    for line, row in readers[file.suffix](file):
        if limit is not None and len(questions) == limit:
            break
        questions.append(_question(file, line, row))
    if not questions:
        raise UserError(f"{file} holds no question: give a file with at least one row.")
    return questions


def _jsonl_rows(file: Path) -> Iterator[tuple[int, Any]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as problem:
                raise UserError(
                    f"{file}, line {number} is not JSON ({problem.msg}): mend the line."
                ) from problem
            except UnicodeDecodeError as problem:
                raise UserError(f"{file}, line {number} is not UTF-8: save the file as UTF-8.") from problem


def _parquet_rows(file: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        content = parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as problem:
        raise UserError(f"{file} is not a parquet file: convert it, or name it by what it is.") from problem
    rows = (row for batch in content.iter_batches() for row in batch.to_pylist())
    yield from enumerate(rows, start=1)


def _question(file: Path, line: int, row: Any) -> Question:
    where = f"{file}, line {line}"
    match row:
        case {"prompt": [{"content": str(prompt)}, *_]} if prompt:
            pass
        case Mapping():
            raise UserError(f'{where}: "prompt" must be [{{"role": "user", "content": TEXT}}].')
        case _:
            raise UserError(f"{where} is not an object: write one JSON object a line.")
    match row:
        case {"reward_model": {"ground_truth": {"target": str(target)}}}:
            targets = [target]
        case {"reward_model": {"ground_truth": {"target": [*targets]}}}:
            pass
        case _:
            targets = []
    if not targets or not all(isinstance(target, str) for target in targets):
        raise UserError(f'{where}: "reward_model.ground_truth.target" must be a list of accepted answers.')
    extra = row.get("extra_info") or {}
    if not isinstance(extra, Mapping):
        raise UserError(f'{where}: "extra_info" must be an object, or be left out.')
    return Question(
        uid=f"{file.stem}:{line}",
        prompt=prompt,
        answers=tuple(targets),
        data_source=str(row.get("data_source") or ""),
        # A parquet column holds a null for every row that lacks the field.
        extra={key: value for key, value in extra.items() if value is not None},
    )
