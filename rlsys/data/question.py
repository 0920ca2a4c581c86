"""A question as the pipeline sees it, and how it is read from jsonl or parquet, every row checked.

A row is Search-R1's (a prompt, and answers in `reward_model`), RLinf's (a prompt, and `solutions`) or FlashRAG's (a raw
`question`, which gets Search-R1's prompt, and `golden_answers`). Each gets a unique id (file stem and row number, since
merged data sets repeat their own `index`), or a `UserError` names the file, the line and the field.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rlsys.data.template import search_prompt
from rlsys.errors import UserError


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt. `uid` is unique over all files of a run, so that groups never collide."""

    uid: str
    prompt: str
    """What the policy is given, template applied, before tokenisation."""
    answers: tuple[str, ...]
    data_source: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The row's `extra_info`: `hops` (1 or 2) where the data set has it, among others."""
    text: str = ""
    """The question itself, without a template; empty where the row does not have it."""


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
    raw = row.get("question") or extra.get("question")
    text = raw if isinstance(raw, str) else ""
    prompt, source, answers = _prompt_and_answers(row, text, where)
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise UserError(f'{where}: "{source}" must be a list of accepted answers.')
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
    match row:
        case {"prompt": str(prompt) | [{"role": "user", "content": str(prompt)}]} if prompt:
            if row.get("solutions") is not None:
                return prompt, "solutions", row["solutions"]
            match row:
                case {"reward_model": {"ground_truth": {"target": target}}}:
                    return prompt, "reward_model.ground_truth.target", target
            return prompt, "reward_model.ground_truth.target", None
        case {"prompt": prompt} if prompt is not None:
            # Other messages beside the user's would be lost on the policy.
            raise UserError(
                f'{where}: "prompt" must be a text, or one message of the user, [{{"role": "user", "content": TEXT}}].'
            )
        case {"golden_answers": answers} if answers is not None and text.strip():
            return search_prompt(text), "golden_answers", answers
    raise UserError(
        f'{where} is no question: give "prompt" and "reward_model" (Search-R1), "prompt" and "solutions" (RLinf), or '
        '"question" and "golden_answers" (FlashRAG).'
    )
