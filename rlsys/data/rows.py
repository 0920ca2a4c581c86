"""Reading questions from jsonl or parquet, every row checked.

A row is Search-R1's (a prompt, and answers in `reward_model`), RLinf's (a prompt, and `solutions`) or FlashRAG's (a raw
`question`, which gets Search-R1's prompt, and `golden_answers`).

Contract: `read_questions` gives each row a unique id (file stem and row number, since merged data sets
repeat their own `index`), or raises `UserError` naming the file, the line and the field.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from rlsys.data.question import Question
from rlsys.data.template import search_prompt
from rlsys.errors import UserError


def read_questions(path: str | Path, limit: int | None = None) -> list[Question]:
    """All questions of `path` in file order, at most `limit`."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{file} does not exist: give the path of a jsonl or parquet file of questions.")
    questions = [question_of(file, line, row) for line, row in islice(read_rows(file), limit)]
    if not questions:
        raise UserError(f"{file} holds no question: give a file with at least one row.")
    return questions


def read_rows(file: Path) -> Iterator[tuple[int, Any]]:
    """Line number, counted from 1, and content of each row of a jsonl or parquet file, as it stands there."""
    readers = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
    if file.suffix not in readers:
        raise UserError(f"{file} is neither .jsonl nor .parquet: convert it to one of them.")
    return readers[file.suffix](file)


def _jsonl_rows(file: Path) -> Iterator[tuple[int, Any]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as problem:
                raise UserError(f"{file}, line {number} is not JSON ({problem.msg}): mend the line.") from problem
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


def question_of(file: Path, line: int, row: Any) -> Question:
    """The question of one row, whichever of the three kinds it is. Raises UserError naming `file`, `line` and field."""
    where = f"{file}, line {line}"
    if not isinstance(row, Mapping):
        raise UserError(f"{where} is not an object: write one JSON object a line.")
    extra = row.get("extra_info") or {}
    if not isinstance(extra, Mapping):
        raise UserError(f'{where}: "extra_info" must be an object, or be left out.')
    try:
        json.dumps(extra)
    except (TypeError, ValueError) as problem:
        raise UserError(
            f'{where}: "extra_info" holds what JSON cannot ({problem}): leave it out, or write it as text.'
        ) from problem
    text = _raw_text(row, extra)
    prompt, field, answers = _prompt_and_answers(row, text, where)
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not answers or not all(isinstance(one, str) for one in answers):
        raise UserError(f'{where}: "{field}" must be a list of accepted answers.')
    return Question(
        uid=f"{file.stem}:{line}",
        prompt=prompt,
        answers=tuple(answers),
        data_source=str(row.get("data_source") or ""),
        # A parquet column holds a null for every row that lacks the field.
        extra={key: value for key, value in extra.items() if value is not None},
        text=text,
    )


def _prompt_and_answers(row: Mapping[str, Any], text: str, where: str) -> tuple[str, str, Any]:
    """The prompt, and what should be the answers with the name of their field."""
    if row.get("prompt") is not None:
        prompt = _prompt_text(row["prompt"])
        if not prompt:
            raise UserError(
                f'{where}: "prompt" must be a text, or one message of the user, [{{"role": "user", "content": TEXT}}].'
            )
        if row.get("solutions") is not None:
            return prompt, "solutions", row["solutions"]
        match row:
            case {"reward_model": {"ground_truth": {"target": target}}}:
                return prompt, "reward_model.ground_truth.target", target
        return prompt, "reward_model.ground_truth.target", None
    if row.get("golden_answers") is not None and text.strip():
        return search_prompt(text), "golden_answers", row["golden_answers"]
    raise UserError(
        f'{where} is no question: give "prompt" and "reward_model" (Search-R1), "prompt" and "solutions" (RLinf), or '
        '"question" and "golden_answers" (FlashRAG).'
    )


def _prompt_text(prompt: Any) -> str:
    """What the user asks. Empty for other messages beside that: the policy would not be given them."""
    match prompt:
        case str(text) | [{"role": "user", "content": str(text)}]:
            return text
    return ""


def _raw_text(row: Mapping[str, Any], extra: Mapping[str, Any]) -> str:
    """The question without a template, where the row has it."""
    found = row.get("question") or extra.get("question")
    return found if isinstance(found, str) else ""
