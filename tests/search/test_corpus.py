from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.errors import UserError
from rlsys.search import corpus as corpus_module
from rlsys.search.corpus import Corpus


def test_rows_are_lines_in_any_order(corpus_path: Path, passages: list[dict[str, Any]]) -> None:
    corpus = Corpus.open(corpus_path)
    assert len(corpus) == len(passages)
    assert corpus.fetch([199, 0, 7, 7]) == [passages[row] for row in (199, 0, 7, 7)]
    assert [p for chunk in corpus.chunks(64) for p in chunk] == passages
    assert corpus.checksum == hashlib.sha256(corpus_path.read_bytes()).hexdigest()


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1), st.integers(1, 40), st.booleans()
)
def test_any_text_survives_whatever_the_scan_block(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], block: int, last_newline: bool
) -> None:
    rows = [{"id": row, "contents": text} for row, text in enumerate(texts)]
    path = tmp_path_factory.mktemp("any") / "corpus.jsonl"
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text(lines + "\n" * last_newline, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "_SCAN_BYTES", block)
        corpus = Corpus.open(path)
    assert corpus.fetch(range(len(corpus))) == rows


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("not json", "is not JSON"),
        ("", "is not JSON"),
        ('{"id": "1", "contents": "\\ud800"}', "is not JSON"),
        ('["1", "text"]', "is not an object"),
        ('{"id": "1"}', "`contents`"),
        ('{"id": "1", "contents": 5}', "`contents`"),
        ('{"contents": "text"}', "`id`"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"id": "0", "contents": "fine"}\n' + line + '\n{"id": "2", "contents": "fine"}\n')
    corpus = Corpus.open(path)
    assert [p["id"] for p in corpus.fetch([0, 2])] == ["0", "2"]
    with pytest.raises(UserError, match=f"line 2 .*{reason}"):
        corpus.fetch([1])


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a file"):
        Corpus.open(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UserError, match="is empty"):
        Corpus.open(tmp_path / "empty.jsonl")
