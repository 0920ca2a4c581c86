"""Files to passages: every kind of source, ids, what is passed over, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from rlsys.errors import Code
from rlsys.search.corpus import Corpus
from rlsys.search.ingest import Chunking, Fields, Summary, ingest
from tests.search.tiny_encoders import minilm_tokenizer
from tests.support.refusals import refused

LONG = " ".join(f"Sentence number {number} is here." for number in range(30))


def run(tmp_path: Path, *sources: Path, **options: Any) -> tuple[list[dict[str, Any]], Summary]:
    out = tmp_path / "out put" / "corpus.jsonl"
    summary = ingest(sources, out, **options)
    assert "part" not in "".join(path.name for path in out.parent.iterdir())
    corpus = Corpus.open(out)
    assert len(corpus) == summary.passages
    return corpus.fetch(range(len(corpus))), summary


def write(path: Path, content: str | bytes | list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, list):
        content = "".join(json.dumps(row) + "\n" for row in content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_folder_of_everything(tmp_path: Path) -> None:
    docs = tmp_path / "my docs"
    write(docs / "b" / "guide.md", "# Guide\nHello there.\n\n## Install\nRun it.")
    write(docs / "a.txt", "\ufeffPlain\r\nwords.")
    write(docs / "c.jsonl", [{"id": 7, "title": "Seven", "text": "A row.", "url": "u"}, {"text": " "}])
    parquet.write_table(pa.table({"body": ["From parquet."], "n": [3]}), docs / "d.parquet")
    write(docs / "e.pdf", b"%PDF")
    write(docs / "empty.md", "")
    write(docs / "only headings.md", "# One\n\n## Two\n")
    write(docs / ".git" / "config.txt", "hidden")
    passages, summary = run(tmp_path, docs)
    assert passages == [
        {"id": "a.txt", "contents": '"a"\nPlain\nwords.', "source": "a.txt"},
        {"id": "b/guide.md#1", "contents": '"Guide"\nHello there.', "source": "b/guide.md"},
        {"id": "b/guide.md#2", "contents": '"Guide > Install"\nRun it.', "source": "b/guide.md"},
        {"id": 7, "contents": '"Seven"\nA row.', "url": "u", "source": "c.jsonl"},
        {"id": "d.parquet:1", "contents": '""\nFrom parquet.', "n": 3, "source": "d.parquet"},
    ]
    assert {(entry.name, entry.reason) for entry in summary.skipped} == {
        (".git", "hidden"),
        ("c.jsonl line 2", "empty text"),
        ("e.pdf", "unknown kind .pdf"),
        ("empty.md", "empty"),
        ("only headings.md", "no text below its headings"),
    }
    assert (summary.documents, summary.passages, summary.longest) == (4, 5, 2)
    assert "1: e.pdf" in dict(summary.rows()).values()
    inside = docs / "corpus.jsonl"
    for told in (False, True):
        again = ingest([docs], inside)
        assert inside.read_bytes() == (tmp_path / "out put" / "corpus.jsonl").read_bytes()
        assert ("the output" in {entry.reason for entry in again.skipped}) == told


def test_long_documents_are_numbered_and_keep_their_title(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"id": 5, "contents": f'"Name"\n{LONG}', "source": "mine"}])
    passages, summary = run(tmp_path, source, chunking=Chunking(size=52))
    assert [passage["id"] for passage in passages] == ["5#1", "5#2", "5#3"]
    assert all(passage["contents"].startswith('"Name"\nSentence') for passage in passages)
    assert " ".join(passage["contents"].split("\n")[1] for passage in passages) == LONG
    assert {passage["source"] for passage in passages} == {"mine"}
    assert (summary.words, summary.longest) == (150, 50)


def test_named_fields_are_taken_and_duplicates_dropped_when_asked(tmp_path: Path) -> None:
    row = {"text": "no", "abstract": "yes", "name": "A\nb", "key": "k"}
    source = write(tmp_path / "in.jsonl", [row, row | {"key": "l"}, row | {"key": "m", "name": "C"}])
    fields = Fields(text="abstract", title="name", id="key")
    assert len(run(tmp_path, source, fields=fields)[0]) == 3
    passages, summary = run(tmp_path, source, fields=fields, drop_duplicates=True)
    made = {"text": "no", "source": "in.jsonl"}
    assert passages == [{"id": "k", "contents": '"A b"\nyes', **made}, {"id": "m", "contents": '"C"\nyes', **made}]
    assert summary.duplicates == 1


def test_tokens_are_those_of_the_encoder(tmp_path: Path) -> None:
    text = "Unbelievably internationalised tokenisation! Ünïcode café, naïve 3.14159 and hyper-parameters. " * 8
    source = write(tmp_path / "in.txt", text)
    passages, _ = run(tmp_path, source, chunking=Chunking(size=40, tokenizer="minilm"))
    tokenizer = minilm_tokenizer()
    bodies = [passage["contents"].partition("\n")[2] for passage in passages]
    counts = [len(tokenizer.tokenize(body)) for body in bodies]
    assert max(counts) <= 40
    assert sum(counts) == len(tokenizer.tokenize(text))
    assert min(counts[:-1]) > 40 - len(tokenizer.tokenize(text)) // 8, "a chunk holds as many sentences as fit"


@pytest.mark.parametrize(
    ("name", "content", "code", "place"),
    [
        ("a.txt", b"caf\xe9 and more", "malformed", "byte 3"),
        ("a.txt", b"ab\0cd", "malformed", "byte 2"),
        ("a.jsonl", b'{"text": "a"}\n\n{bad\n', "malformed", "line 3"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}', "malformed", "line 2"),
        ("a.jsonl", b'{"words": "a", "id": 1}\n', "missing", "words, id"),
        ("a.jsonl", b'{"text": ["a"]}\n', "wrong_type", "'text'"),
        ("a.jsonl", b'{"text": "a", "id": 1}\n{"text": "b", "id": "1"}\n', "conflict", "line 2"),
        ("a.parquet", b"PAR1 not", "malformed", ""),
        ("a.jsonl", b"", "empty", ""),
        ("a.pdf", b"%PDF", "unsupported", ""),
    ],
)
def test_bad_files_are_refused_with_the_place(
    tmp_path: Path, name: str, content: bytes, code: Code, place: str
) -> None:
    out = write(tmp_path / "out" / "corpus.jsonl", "before")
    source = write(tmp_path / "in" / name, content)
    with refused(code, "1" if code == "conflict" else source) as caught:
        ingest([source], out)
    assert place in str(caught.value)
    assert [path.read_text() for path in out.parent.iterdir()] == ["before"]


def test_bad_sources_and_settings_are_refused(tmp_path: Path) -> None:
    out, none, same = tmp_path / "out.jsonl", tmp_path / "none", write(tmp_path / "same.jsonl", [{"text": "a"}])
    with refused("not_found", none):
        ingest([none], out)
    none.mkdir()
    with refused("empty", none):
        ingest([none], out)
    with refused("conflict", same):
        ingest([same], same)
    with refused("unknown", "name"):
        ingest([same], out, fields=Fields(title="name"))
    parquet.write_table(pa.table({"text": ["a"], "raw": [b"\xff"]}), tmp_path / "bytes.parquet")
    with refused("unsupported", "bytes.parquet"):
        ingest([tmp_path / "bytes.parquet"], out)
    assert not out.exists()
    with refused("out_of_range", "overlap"):
        Chunking(size=5, overlap=5)


def test_a_document_whose_passages_would_fill_the_disk_is_refused(tmp_path: Path) -> None:
    """Every passage repeats the title and the other fields."""
    words = "word " * 1000
    for name in ("title", "other"):
        source = write(tmp_path / "a.jsonl", [{"text": words, name: "x" * 100_000}])
        with refused("out_of_range", "a.jsonl"):
            run(tmp_path, source, chunking=Chunking(size=1))
    write(source, [{"text": words, "title": "x" * 100, "other": "x" * 1000}])
    assert len(run(tmp_path, source, chunking=Chunking(size=1))[0]) == 1000
