"""Prepares question files for training and evaluation: public sets, own files, merged files, and held-out splits.

A prepared file is jsonl of Search-R1 rows, each with the raw question next to the prompt. The file is written only
after every row is checked; its origin and SHA-256 are in `<file>.json`. An invalid row raises UserError with file and
line. The same question (ignoring case and white space) is never both trained on and held out. The side of a question
depends on the questions and the seed, not on the order of the questions. Output is deterministic.
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
from typing import Any, TypeVar

from rlsys.data.question import Question, Template, question_of, read_rows, search_prompt
from rlsys.errors import UserError, in_one
from rlsys.files import sha256_of, write_atomically

Row = TypeVar("Row")
REPOSITORY = "RUC-NLPIR/FlashRAG_datasets"
"""Data set repository of the public sets on the Hugging Face Hub; files are `<name>/<split>.jsonl`."""
QUESTION_FIELDS = ("question", "query", "problem")
ANSWER_FIELDS = ("golden_answers", "answers", "answer", "solutions", "target")
HELD_OUT_SHARE, MAX_HELD_OUT = 0.1, 500
"""Default size of the held-out side: the share `HELD_OUT_SHARE` of the questions, at most `MAX_HELD_OUT` questions."""
_TABLES = {".csv": ",", ".tsv": "\t"}
_MAX_SHOWN = 10


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """One of the seven public sets on which search policies are compared, in FlashRAG's version."""

    name: str
    title: str
    """Name in papers."""
    splits: tuple[str, ...]
    hops: str
    """Searches needed for an answer: "one" or "several"."""

    @property
    def evaluated(self) -> str:
        """Split that papers report: test, else dev, else train."""
        return next(split for split in ("test", "dev", "train") if split in self.splits)


_SETS = (
    QuestionSet("nq", "NQ", ("train", "dev", "test"), "one"),
    QuestionSet("triviaqa", "TriviaQA", ("train", "dev", "test"), "one"),
    QuestionSet("popqa", "PopQA", ("test",), "one"),
    QuestionSet("hotpotqa", "HotpotQA", ("train", "dev"), "several"),
    QuestionSet("2wikimultihopqa", "2WikiMultiHopQA", ("train", "dev"), "several"),
    QuestionSet("musique", "MuSiQue", ("train", "dev"), "several"),
    QuestionSet("bamboogle", "Bamboogle", ("test",), "several"),
)
SETS = {known.name: known for known in _SETS}
"""Public sets by name, in the order of the papers' tables."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prepared file."""

    path: Path
    rows: int
    sha256: str


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
    """Prepare the file `source` (jsonl, parquet, csv or tsv) of the set `name`, and write it to `out`.

    `question` and `answers`: names of the fields in `source`; by default the usual names are tried. Answers are a list
    or one string.
    """
    fields = (question,) if question else QUESTION_FIELDS, (answers,) if answers else ANSWER_FIELDS

    def made(line: int, row: Any) -> Question:
        text, accepted = _question_and_answers(row, *fields, f"{source}, line {line}")
        uid, extra = f"{source.stem}:{line}", {"split": split}
        return Question(uid, prompt(text), accepted, data_source=name, extra=extra, text=text.strip())

    return _prepare([source], out, lambda: _checked(source, limit, made))


def merge(sources: Sequence[Path], out: Path, seed: int | None) -> Prepared:
    """Merge prepared files into `out`, in order or shuffled with `seed`; rows get new indices."""

    def rows() -> Iterator[Question]:
        found = [question_of(file, line, row) for file in sources for line, row in read_rows(file)]
        if seed is not None:
            random.Random(seed).shuffle(found)
        yield from found

    return _prepare(sources, out, rows)


def _prepare(sources: Sequence[Path], out: Path, questions: Callable[[], Iterable[Question]]) -> Prepared:
    _require_other(out, *sources)
    for source in sources:
        if not source.is_file():
            raise UserError(f"{source} does not exist: give a file of questions.", code="not_found", key=str(source))
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        rows, sha256 = _write(partial, questions())
        if not rows:
            raise UserError(
                f"{', '.join(map(str, sources))} has no question: give a file with at least one row.",
                code="empty",
                key=str(sources[0]),
            )
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    origin = [{"file": str(source), "sha256": sha256_of(source)} for source in sources]
    record = {"rows": rows, "sha256": sha256, "from": origin}
    write_atomically(out.with_name(f"{out.name}.json"), json.dumps(record, indent=2) + "\n")
    return Prepared(out, rows, sha256)


def _require_other(out: Path, *sources: Path) -> None:
    """Raise UserError unless `out` is a .jsonl file and none of `sources`."""
    if out.suffix != ".jsonl":
        raise UserError(
            f"{out} does not end in .jsonl: questions are written as jsonl, so rename it.",
            code="unsupported",
            key=str(out),
        )
    for source in sources:
        if source.resolve() == out.resolve():
            raise UserError(f"{source} is also the output: give another output file.", code="conflict", key=str(source))


def _write(path: Path, questions: Iterable[Question]) -> tuple[int, str]:
    digest, rows = hashlib.sha256(), 0
    with path.open("wb") as file:
        for question in questions:
            row = search_r1_row(question, {**question.extra, "index": rows}, ability="fact-reasoning")
            line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
            digest.update(line)
            file.write(line)
            rows += 1
        file.flush()
        os.fsync(file.fileno())
    return rows, digest.hexdigest()


def search_r1_row(question: Question, extra: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return a row in Search-R1's format, with the raw question, `more` columns and `extra_info`."""
    return {
        "data_source": question.data_source,
        **({"question": question.text} if question.text else {}),
        "prompt": [{"role": "user", "content": question.prompt}],
        **more,
        "reward_model": {"style": "rule", "ground_truth": {"target": list(question.answers)}},
        "extra_info": dict(extra),
    }


def _checked(source: Path, limit: int | None, made: Callable[[int, Any], Question]) -> Iterator[Question]:
    """Yield the first `limit` questions (None: all) of a file; then raise one UserError listing the invalid rows."""
    bad: list[UserError] = []
    rows, found = _raw_rows(source), 0
    while found != limit:
        try:
            line, row = next(rows)
        except StopIteration:
            break
        except UserError as problem:  # The file cannot be read beyond this line.
            bad.append(problem)
            break
        try:
            question = made(line, row)
        except UserError as problem:
            bad.append(problem)
            continue
        found += 1
        yield question
    if bad:
        more = [f"and {len(bad) - _MAX_SHOWN} more rows."] if len(bad) > _MAX_SHOWN else []
        raise in_one(bad[:_MAX_SHOWN], *more)


def _question_and_answers(
    row: Any, questions: Sequence[str], answers: Sequence[str], where: str
) -> tuple[str, tuple[str, ...]]:
    """Return question and answers from the first fields that `row` has. Raises UserError."""
    if not isinstance(row, Mapping):
        raise UserError(f"{where} is not an object: write one JSON object per line.", code="wrong_type", key=where)
    text, accepted = (
        next((row[name] for name in names if row.get(name) is not None), None) for names in (questions, answers)
    )
    if not isinstance(text, str) or not text.strip():
        names = " or ".join(f'"{field}"' for field in questions)
        raise UserError(
            f"{where} has no question: {names} must be a string that is not empty.", code="missing", key=where
        )
    accepted = [accepted] if isinstance(accepted, str) else accepted
    are_texts = isinstance(accepted, list) and all(isinstance(answer, str) and answer.strip() for answer in accepted)
    if not accepted or not are_texts:
        names = " or ".join(f'"{field}"' for field in answers)
        raise UserError(
            f"{where} has no answer: {names} must be a string or a list of strings, none of them empty.",
            code="missing",
            key=where,
        )
    return text, tuple(accepted)


def _raw_rows(source: Path) -> Iterator[tuple[int, Any]]:
    """Yield line number and row; rows of csv and tsv files are mappings with the keys of the header."""
    if source.suffix not in _TABLES:
        yield from read_rows(source)
        return
    with source.open(encoding="utf-8-sig", newline="") as file:
        try:
            table = csv.DictReader(file, delimiter=_TABLES[source.suffix])
            for row in table:
                yield table.line_num, row
        except UnicodeDecodeError as problem:
            raise UserError(
                f"{source} is not UTF-8: save the file as UTF-8.", code="malformed", key=str(source)
            ) from problem
        except csv.Error as problem:
            kind = source.suffix[1:]
            raise UserError(
                f"{source}, line {table.line_num} is not valid {kind} ({problem}): repair it.",
                code="malformed",
                key=str(source),
            ) from problem


def split_file(
    source: Path, train: Path, heldout: Path, count: int | None = None, seed: int = 0, chosen: Path | None = None
) -> tuple[int, int]:
    """Split the rows of `source` into the files `train` and `heldout`; return the number of rows of each.

    Holds out `count` questions (see `split`), or the questions of the file `chosen`. Raises UserError.
    """
    for out in (train, heldout):
        _require_other(out, source, *([] if chosen is None else [chosen]))
    if train.resolve() == heldout.resolve():
        raise UserError(
            f"--train and --heldout are the same file, {train}: give two files.", code="conflict", key=str(train)
        )
    rows, texts = _read(source)
    if chosen is None:
        trained, held = divide(rows, split(texts, count, seed, str(source)))
    else:
        held, wanted = _read(chosen)
        trained, _ = divide(rows, apart(texts, wanted, str(source), str(chosen)))
    for out, kept in ((train, trained), (heldout, held)):
        write_atomically(out, "".join(json_line(row, str(source)) for row in kept))
    return len(trained), len(held)


def divide(rows: Sequence[Row], held_out: Sequence[bool]) -> tuple[list[Row], list[Row]]:
    pairs = list(zip(rows, held_out, strict=True))
    return [row for row, out in pairs if not out], [row for row, out in pairs if out]


def apart(texts: Sequence[str], heldout: Sequence[str], name: str, heldout_name: str) -> list[bool]:
    """Return a mask of the `texts` that are also in `heldout`. Raises UserError if no text is left to train on."""
    held = set(map(_key, heldout))
    both = [_key(text) in held for text in texts]
    if all(both):
        raise UserError(
            f"every question of {name} is also in {heldout_name}, so none is left to train on: give other questions.",
            code="empty",
            key=name,
        )
    return both


def json_line(row: Any, name: str) -> str:
    """Return the row as a line of jsonl. Raises UserError, with `name` as the source, for a value that JSON cannot
    represent."""
    try:
        return json.dumps(row, ensure_ascii=False) + "\n"
    except (TypeError, ValueError) as problem:
        sentence = (
            f"{name}: a row holds a value that JSON cannot represent ({problem}): remove it, or write it as text."
        )
        raise UserError(sentence, code="wrong_type", key=name) from problem


def split(texts: Sequence[str], count: int | None, seed: int, name: str) -> list[bool]:
    """Return a mask of the questions to hold out: `count` distinct ones; None holds out a tenth, at most 500.

    Raises UserError, with `name` as the source, if a side would be empty.
    """
    different = sorted(set(map(_key, texts)), key=lambda key: hashlib.sha256(f"{seed}:{key}".encode()).digest())
    wanted = count if count is not None else min(MAX_HELD_OUT, max(1, round(HELD_OUT_SHARE * len(different))))
    if not 1 <= wanted < len(different):
        raise UserError(
            f"{name} has {len(different)} distinct questions, so holding out {wanted} would leave one of the two files empty: give "
            "more questions, another number, or a file of held-out questions.",
            code="out_of_range",
            key=name,
        )
    held = set(different[:wanted])
    return [_key(text) in held for text in texts]


def _read(file: Path) -> tuple[list[Any], list[str]]:
    """Return the rows of a file and the question of each."""
    found = list(read_rows(file))
    asked = [question_of(file, line, row) for line, row in found]
    if not found:
        raise UserError(f"{file} has no question: give a file with at least two.", code="empty", key=str(file))
    return [row for _, row in found], [question.text or question.prompt for question in asked]


def _key(text: str) -> str:
    return " ".join(text.split()).casefold()
