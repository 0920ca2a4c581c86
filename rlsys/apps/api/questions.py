"""Questions as the Python API takes them, to the files that a run reads.

Rows are Search-R1's, FlashRAG's or RLinf's (see `rlsys.data.question`), or just a question and its answers by one of their
usual names. A file whose rows a run can read as they are is used as it is. What has to be written goes to files that are
named by their content, so that the same questions are the same file, and a run that resumes finds it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlsys.apps.data.prepare import (
    ANSWER_FIELDS,
    QUESTION_FIELDS,
    apart,
    divide,
    json_line,
    prepare_file,
    search_r1_row,
    split,
)
from rlsys.data.question import Question, question_of, read_rows
from rlsys.errors import UserError
from rlsys.files import write_atomically

Data = str | Path | Sequence[Mapping[str, Any]] | Sequence[Question]
"""A file (jsonl, parquet, csv, tsv), rows, or questions."""
_TABLES = (".csv", ".tsv")


@dataclass(frozen=True, slots=True)
class Rows:
    """Questions that were read and checked."""

    name: str
    """For sentences and names of files."""
    rows: tuple[Mapping[str, Any], ...]
    """As a run reads them (see `rlsys.data.question`)."""
    texts: tuple[str, ...]
    """The question of each row."""
    file: Path | None
    """A file of these very rows; None where they have to be written."""

    def path(self, folder: Path) -> Path:
        """The file of them, which is written to `folder` if there is none."""
        return self.file or _write_rows(self.rows, folder, self.name)


@dataclass(frozen=True, slots=True)
class Files:
    """The files that a run reads. No question is in both."""

    train: Path
    """Questions to train on."""
    heldout: Path
    """Questions to evaluate on."""
    questions: int
    """Number of those to train on."""
    dropped: int = 0
    """Number of those given to train on that were held out too, and are not trained on."""


def training_files(train: Data, heldout: Data | None, count: int | None, seed: int, folder: Path) -> Files:
    """Files to train on and to evaluate on. Without `heldout`, `count` questions of `train` are (see `apps.data.prepare.split`).

    Raises UserError for what is no question, naming its place.
    """
    trained = read_data(train, "train_data")
    if heldout is None:
        kept, held = divide(trained.rows, split(trained.texts, count, seed, trained.name))
        path = _write_rows(kept, folder, f"{trained.name}-train")
        return Files(path, _write_rows(held, folder, f"{trained.name}-heldout"), len(kept))
    if count is not None:
        raise UserError(f"holdout={count} and eval_data both say what is held out: give one of them.")
    asked = read_data(heldout, "eval_data")
    kept, dropped = divide(trained.rows, apart(trained.texts, asked.texts, "train_data", "eval_data"))
    path = _write_rows(kept, folder, f"{trained.name}-train") if dropped else trained.path(folder)
    return Files(path, asked.path(folder), len(kept), len(dropped))


def read_data(data: Data, name: str) -> Rows:
    """Questions in any of their forms; `name` is the argument's, for sentences."""
    if isinstance(data, str | Path):
        return _read_file(Path(data))
    if not isinstance(data, Sequence):
        raise UserError(f"{name} is a {type(data).__name__}: give a path, a list of rows or a list of questions.")
    rows = [search_r1_row(one, one.extra) if isinstance(one, Question) else one for one in data]
    lines = [(line, _plain(row, f"{name}, line {line}")) for line, row in enumerate(rows, start=1)]
    return _checked(Path(name), lines, None)


def _write_rows(rows: Sequence[Mapping[str, Any]], folder: Path, name: str) -> Path:
    """Write rows to the file of `folder` that their content names."""
    text = "".join(json_line(row, name) for row in rows)
    path = folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    if not path.is_file():
        write_atomically(path, text)
    return path


def _read_file(path: Path) -> Rows:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise UserError(f"{path} {what}: give a jsonl, parquet, csv or tsv file of questions.")
    if path.suffix not in _TABLES:
        return _checked(path, list(read_rows(path)), path)
    with TemporaryDirectory() as folder:
        made = prepare_file(path, path.stem, "train", Path(folder) / "rows.jsonl").path
        return _checked(path, list(read_rows(made)), None)


def _checked(source: Path, lines: Sequence[tuple[int, Any]], file: Path | None) -> Rows:
    rows = [_native(row) for _, row in lines]
    questions = [question_of(source, line, row) for (line, _), row in zip(lines, rows, strict=True)]
    if not rows:
        raise UserError(f"{source} holds no question: give one at least.")
    as_read = all(row is before for row, (_, before) in zip(rows, lines, strict=True))
    texts = tuple(question.text or question.prompt for question in questions)
    return Rows(source.stem, tuple(rows), texts, file if as_read else None)


def _native(row: Any) -> Any:
    """A row that `data.question` reads: the very same one if it is, else one with the names that it knows."""
    if not isinstance(row, Mapping) or row.get("prompt") is not None:
        return row
    question, answers = (_first(row, names) for names in (QUESTION_FIELDS, ANSWER_FIELDS))
    if question is None or answers is None or (question, answers) == ("question", "golden_answers"):
        return row
    rest = {key: value for key, value in row.items() if key not in (question, answers)}
    return {**rest, "question": row[question], "golden_answers": row[answers]}


def _plain(value: Any, where: str) -> Any:
    """`value` in the types of JSON; scalars and arrays of numpy are numbers, texts and lists of them."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, where) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, where) for inner in value]
    raise UserError(f"{where} holds a {type(value).__name__}, which JSON cannot: leave it out, or write it as text.")


def _first(row: Mapping[str, Any], names: Sequence[str]) -> str | None:
    return next((name for name in names if row.get(name) is not None), None)
