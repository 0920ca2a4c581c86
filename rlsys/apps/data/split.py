"""Questions to train on, and questions to hold out.

Contract: the same question (its text, without regard to case and outer space) is never on both sides; which side one is on
depends on the questions and the seed, not on their order. Rows keep their order and their content.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlsys.data.rows import question_of, read_rows
from rlsys.errors import UserError
from rlsys.files import write_atomically

SHARE, MOST = 0.1, 500
"""Held out unless a number is given: this share of the questions, and no more than so many."""


def split_file(
    source: Path, train: Path, heldout: Path, count: int | None = None, seed: int = 0, chosen: Path | None = None
) -> tuple[int, int]:
    """Write the rows of `source` to two jsonl files; returns how many rows each has. `count` is of `split`.

    Where the file `chosen` has the questions to hold out, `train` gets what of `source` is not among them.
    Raises UserError for a row that is no question, and as `split` and `apart` do.
    """
    for out in (train, heldout):
        if out.suffix != ".jsonl":
            raise UserError(f"{out} is not a .jsonl file: questions are written as jsonl, so call it so.")
        for read in (source, chosen):
            if read is not None and out.resolve() == read.resolve():
                raise UserError(f"{read} is read and cannot be written too: give another file.")
    if train.resolve() == heldout.resolve():
        raise UserError(f"{train} cannot hold both sides: give two files.")
    rows, texts = _read(source)
    if chosen is None:
        sides = split(texts, count, seed, str(source))
        held = [row for row, side in zip(rows, sides, strict=True) if side]
    else:
        held, wanted = _read(chosen)
        sides = apart(texts, wanted, str(source), str(chosen))
    trained = [row for row, side in zip(rows, sides, strict=True) if not side]
    for out, kept in ((train, trained), (heldout, held)):
        write_atomically(out, "".join(json_line(row, str(source)) for row in kept))
    return len(trained), len(held)


def apart(texts: Sequence[str], heldout: Sequence[str], name: str, heldout_name: str) -> list[bool]:
    """Whether each question is one of `heldout` too. Raises UserError where all are, which leaves none to train on."""
    held = set(map(_key, heldout))
    both = [_key(text) in held for text in texts]
    if all(both):
        raise UserError(
            f"every question of {name} is held out by {heldout_name} too, and none is left to train on: give others."
        )
    return both


def json_line(row: Any, name: str) -> str:
    """The row as a line of jsonl. Raises UserError, which calls the questions `name`, for what JSON cannot hold."""
    try:
        return json.dumps(row, ensure_ascii=False) + "\n"
    except (TypeError, ValueError) as problem:
        raise UserError(
            f"{name}: a row holds what JSON cannot ({problem}): leave it out, or write it as text."
        ) from problem


def split(texts: Sequence[str], count: int | None, seed: int, name: str) -> list[bool]:
    """Whether each question is held out: `count` different ones, or a tenth and 500 at most; one at least on each side.

    Raises UserError, which calls the questions `name`, where `count` leaves a side without any.
    """
    different = sorted(
        {_key(text) for text in texts}, key=lambda key: hashlib.sha256(f"{seed}:{key}".encode()).digest()
    )
    wanted = count if count is not None else min(MOST, max(1, round(SHARE * len(different))))
    if not 1 <= wanted < len(different):
        raise UserError(
            f"{name} has {len(different)} different questions, of which {wanted} cannot be held out with some left to train "
            "on: give more questions, another number, or a file of held-out questions."
        )
    held = set(different[:wanted])
    return [_key(text) in held for text in texts]


def _read(file: Path) -> tuple[list[Any], list[str]]:
    """Rows, and the question of each."""
    found = list(read_rows(file))
    asked = [question_of(file, line, row) for line, row in found]
    if not found:
        raise UserError(f"{file} has no question: give a file with at least two.")
    return [row for _, row in found], [question.text or question.prompt for question in asked]


def _key(text: str) -> str:
    return " ".join(text.split()).casefold()
