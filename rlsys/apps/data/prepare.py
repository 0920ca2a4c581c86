"""Makes files of questions ready to train and evaluate on: public sets, own files, several as one, and a part held out.

A prepared file is jsonl of Search-R1 rows, each with the raw question beside the prompt; it appears only when every row
is checked, with a record of its origin and SHA-256 in `<file>.json`. A row that cannot be used is a UserError with its
file and line. The same question (without regard to case and outer space) is never both trained on and held out; which
side it is on depends on the questions and the seed, not on their order. The same input gives the same bytes.
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
"""The public sets on the Hugging Face Hub; a set's split is `<name>/<split>.jsonl`."""
QUESTION_FIELDS = ("question", "query", "problem")
ANSWER_FIELDS = ("golden_answers", "answers", "answer", "solutions", "target")
HELD_OUT_SHARE, MOST_HELD_OUT = 0.1, 500
"""Held out unless a number is given: this share of the questions, and no more than so many."""
_TABLES = {".csv": ",", ".tsv": "\t"}
_MOST_SHOWN = 10


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """One of the seven public sets that search policies are compared on, as FlashRAG publishes them."""

    name: str
    title: str
    """Name as papers write it."""
    splits: tuple[str, ...]
    hops: str
    """Searches that an answer takes: one or several."""

    @property
    def evaluated(self) -> str:
        """The split that papers report: the first of these that the set has."""
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
"""In the order of the papers' tables."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A file that was made."""

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
    """Make `out` from a file of the set `name`: FlashRAG's, or one's own, which is jsonl, parquet, csv or tsv.

    `question` and `answers` name its fields; without them the usual names are tried. Answers are a list or one text.
    """
    fields = (question,) if question else QUESTION_FIELDS, (answers,) if answers else ANSWER_FIELDS

    def made(line: int, row: Any) -> Question:
        text, accepted = _question_and_answers(row, *fields, f"{source}, line {line}")
        uid, extra = f"{source.stem}:{line}", {"split": split}
        return Question(uid, prompt(text), accepted, data_source=name, extra=extra, text=text.strip())

    return _prepare([source], out, lambda: _checked(source, limit, made))


def merge(sources: Sequence[Path], out: Path, seed: int | None) -> Prepared:
    """Make `out` of all rows of prepared files, in their order or shuffled by `seed`; their index is unique in it."""

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
    """Raise UserError for a file that cannot be written, as it is called otherwise or is one of `sources`."""
    if out.suffix != ".jsonl":
        raise UserError(
            f"{out} is not a .jsonl file: questions are written as jsonl, so call it so.",
            code="unsupported",
            key=str(out),
        )
    for source in sources:
        if source.resolve() == out.resolve():
            raise UserError(
                f"{source} is read and cannot be written too: give another file.", code="conflict", key=str(source)
            )


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
    """A row as Search-R1 writes it, with the raw question, `more` columns and the `extra_info`."""
    return {
        "data_source": question.data_source,
        **({"question": question.text} if question.text else {}),
        "prompt": [{"role": "user", "content": question.prompt}],
        **more,
        "reward_model": {"style": "rule", "ground_truth": {"target": list(question.answers)}},
        "extra_info": dict(extra),
    }


def _checked(source: Path, limit: int | None, made: Callable[[int, Any], Question]) -> Iterator[Question]:
    """The first `limit` questions of raw rows, or all. Bad rows up to there are told at once, at the end."""
    bad: list[UserError] = []
    rows, found = _raw_rows(source), 0
    while found != limit:
        try:
            line, row = next(rows)
        except StopIteration:
            break
        except UserError as problem:  # Behind what is no row at all, nothing can be read.
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
        more = [f"and {len(bad) - _MOST_SHOWN} more rows."] if len(bad) > _MOST_SHOWN else []
        raise in_one(bad[:_MOST_SHOWN], *more)


def _question_and_answers(
    row: Any, questions: Sequence[str], answers: Sequence[str], where: str
) -> tuple[str, tuple[str, ...]]:
    """The texts of the first of the fields that `row` has. Raises UserError."""
    if not isinstance(row, Mapping):
        raise UserError(f"{where} is not an object: write one JSON object a line.", code="wrong_type", key=where)
    text, accepted = (
        next((row[name] for name in names if row.get(name) is not None), None) for names in (questions, answers)
    )
    if not isinstance(text, str) or not text.strip():
        names = " or ".join(f'"{field}"' for field in questions)
        raise UserError(
            f"{where} has no question: {names} must be a text that is not empty.", code="missing", key=where
        )
    accepted = [accepted] if isinstance(accepted, str) else accepted
    are_texts = isinstance(accepted, list) and all(isinstance(answer, str) and answer.strip() for answer in accepted)
    if not accepted or not are_texts:
        names = " or ".join(f'"{field}"' for field in answers)
        raise UserError(
            f"{where} has no answer: {names} must be a text or a list of texts, none of them empty.",
            code="missing",
            key=where,
        )
    return text, tuple(accepted)


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
            raise UserError(
                f"{source} is not UTF-8: save the file as UTF-8.", code="malformed", key=str(source)
            ) from problem
        except csv.Error as problem:
            kind = source.suffix[1:]
            raise UserError(
                f"{source}, line {table.line_num} is no {kind} ({problem}): mend it.", code="malformed", key=str(source)
            ) from problem


def split_file(
    source: Path, train: Path, heldout: Path, count: int | None = None, seed: int = 0, chosen: Path | None = None
) -> tuple[int, int]:
    """Write the rows of `source` to two jsonl files; returns how many rows each has. `count` is of `split`.

    Where the file `chosen` has the questions to hold out, `train` gets what is not among them. Raises UserError.
    """
    for out in (train, heldout):
        _require_other(out, source, *([] if chosen is None else [chosen]))
    if train.resolve() == heldout.resolve():
        raise UserError(f"{train} cannot hold both sides: give two files.", code="conflict", key=str(train))
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
    """The rows to train on, and those held out."""
    pairs = list(zip(rows, held_out, strict=True))
    return [row for row, out in pairs if not out], [row for row, out in pairs if out]


def apart(texts: Sequence[str], heldout: Sequence[str], name: str, heldout_name: str) -> list[bool]:
    """Marks the questions that are in `heldout` too. Raises UserError where all are, which leaves none to train on."""
    held = set(map(_key, heldout))
    both = [_key(text) in held for text in texts]
    if all(both):
        raise UserError(
            f"every question of {name} is held out by {heldout_name} too, and none is left to train on: give others.",
            code="empty",
            key=name,
        )
    return both


def json_line(row: Any, name: str) -> str:
    """The row as a line of jsonl. Raises UserError, which calls the questions `name`, for what JSON cannot hold."""
    try:
        return json.dumps(row, ensure_ascii=False) + "\n"
    except (TypeError, ValueError) as problem:
        sentence = f"{name}: a row holds what JSON cannot ({problem}): leave it out, or write it as text."
        raise UserError(sentence, code="wrong_type", key=name) from problem


def split(texts: Sequence[str], count: int | None, seed: int, name: str) -> list[bool]:
    """Marks the questions to hold out: `count` different ones, or a tenth and 500 at most; one at least on each side.

    Raises UserError, which calls the questions `name`, where `count` leaves a side without any.
    """
    different = sorted(set(map(_key, texts)), key=lambda key: hashlib.sha256(f"{seed}:{key}".encode()).digest())
    wanted = count if count is not None else min(MOST_HELD_OUT, max(1, round(HELD_OUT_SHARE * len(different))))
    if not 1 <= wanted < len(different):
        raise UserError(
            f"{name} has {len(different)} different questions, of which {wanted} cannot be held out with some left to train "
            "on: give more questions, another number, or a file of held-out questions.",
            code="out_of_range",
            key=name,
        )
    held = set(different[:wanted])
    return [_key(text) in held for text in texts]


def _read(file: Path) -> tuple[list[Any], list[str]]:
    """Rows, and the question of each."""
    found = list(read_rows(file))
    asked = [question_of(file, line, row) for line, row in found]
    if not found:
        raise UserError(f"{file} has no question: give a file with at least two.", code="empty", key=str(file))
    return [row for _, row in found], [question.text or question.prompt for question in asked]


def _key(text: str) -> str:
    return " ".join(text.split()).casefold()
