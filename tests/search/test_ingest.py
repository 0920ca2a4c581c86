"""Tests of ingestion: files to text, Markdown and HTML, and where texts are cut."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from rlsys.errors import Code
from rlsys.search.corpus import Corpus
from rlsys.search.ingest import (
    Chunking,
    CutQuality,
    Fields,
    Section,
    Summary,
    chunk_text,
    cut,
    find_words,
    ingest,
    sections,
)
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


def test_a_folder_of_mixed_files_is_read_and_skipped_files_are_reported(tmp_path: Path) -> None:
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
        ("e.pdf", "unknown type .pdf"),
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


def test_passages_of_a_long_document_are_numbered_and_keep_its_title(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"id": 5, "contents": f'"Name"\n{LONG}', "source": "mine"}])
    passages, summary = run(tmp_path, source, chunking=Chunking(size=52))
    assert [passage["id"] for passage in passages] == ["5#1", "5#2", "5#3"]
    assert all(passage["contents"].startswith('"Name"\nSentence') for passage in passages)
    assert " ".join(passage["contents"].split("\n")[1] for passage in passages) == LONG
    assert {passage["source"] for passage in passages} == {"mine"}
    assert (summary.words, summary.longest) == (150, 50)


def test_fields_can_be_named_and_duplicates_dropped(tmp_path: Path) -> None:
    row = {"text": "no", "abstract": "yes", "name": "A\nb", "key": "k"}
    source = write(tmp_path / "in.jsonl", [row, row | {"key": "l"}, row | {"key": "m", "name": "C"}])
    fields = Fields(text="abstract", title="name", id="key")
    assert len(run(tmp_path, source, fields=fields)[0]) == 3
    passages, summary = run(tmp_path, source, fields=fields, drop_duplicates=True)
    made = {"text": "no", "source": "in.jsonl"}
    assert passages == [{"id": "k", "contents": '"A b"\nyes', **made}, {"id": "m", "contents": '"C"\nyes', **made}]
    assert summary.duplicates == 1


def test_chunks_are_measured_in_tokens_of_the_encoder(tmp_path: Path) -> None:
    text = "Unbelievably internationalised tokenisation! Ünïcode café, naïve 3.14159 and hyper-parameters. " * 8
    source = write(tmp_path / "in.txt", text)
    passages, _ = run(tmp_path, source, chunking=Chunking(size=40, tokenizer="minilm"))
    tokenizer = minilm_tokenizer()
    bodies = [passage["contents"].partition("\n")[2] for passage in passages]
    counts = [len(tokenizer.tokenize(body)) for body in bodies]
    assert max(counts) <= 40
    assert sum(counts) == len(tokenizer.tokenize(text))
    assert min(counts[:-1]) > 40 - len(tokenizer.tokenize(text)) // 8, "each chunk holds as many sentences as fit"


@pytest.mark.parametrize(
    ("name", "content", "code", "place"),
    [
        ("a.txt", b"caf\xe9 and more", "malformed", "byte 3"),
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
def test_bad_files_are_refused_with_the_position(
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
    before = same.read_bytes()
    with refused("not_found", none):
        ingest([none], out)
    none.mkdir()
    with refused("empty", none):
        ingest([none], out)
    with refused("conflict", same):
        ingest([same], same)
    assert same.read_bytes() == before
    with refused("unknown", "name"):
        ingest([same], out, fields=Fields(title="name"))
    assert not out.exists()
    with refused("out_of_range", "overlap"):
        Chunking(size=5, overlap=5)


def test_a_document_whose_passages_would_fill_the_disk_is_refused(tmp_path: Path) -> None:
    """Each passage repeats the title and the other fields."""
    words = "word " * 1000
    for name in ("title", "other"):
        source = write(tmp_path / "a.jsonl", [{"text": words, name: "x" * 100_000}])
        with refused("out_of_range", "a.jsonl"):
            run(tmp_path, source, chunking=Chunking(size=1))
    write(source, [{"text": words, "title": "x" * 100, "other": "x" * 1000}])
    assert len(run(tmp_path, source, chunking=Chunking(size=1))[0]) == 1000


# ---- Markdown


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "intro\n# Guide\na\n## Install\nb\n### Linux\nc\n## Use\nd\n# Other\ne",
            ["name", "Guide", "Guide > Install", "Guide > Install > Linux", "Guide > Use", "Other"],
        ),
        (
            "---\ntitle: My Guide\ntags: [a]\n---\nhello\n# My Guide\nmore\n## Sub\nrest",
            ["My Guide", "My Guide", "My Guide > Sub"],
        ),
        ("---\nname: &name My Guide\ntitle: *name\n---\nhello", ["My Guide"]),
        ("---\ntitle: null\nid: &id [*id]\n---\nhello\n# Guide\nmore", ["name", "Guide"]),
        ("---\ntitle: 2024-13-45\n---\nhello", ["2024-13-45"]),
    ],
    ids=["path", "front matter", "alias", "null", "no date"],
)
def test_headings_become_a_path_of_titles(source: str, expected: list[str]) -> None:
    assert [section.title for section in sections(source, "name")] == expected


@pytest.mark.parametrize(
    ("front_matter", "title"),
    [
        ("a: 1\ntitle: >\n  two\n  lines\nb: {title: not this}", "two lines"),
        ("title: " + "1" * 5000, "1" * 200),
        ("a: " + "[" * 300 + "]" * 300 + "\ntitle: deep", "deep"),
    ],
    ids=["folded", "long", "deep"],
)
def test_a_title_of_front_matter_is_one_line_of_at_most_200_characters(front_matter: str, title: str) -> None:
    assert list(sections(f"---\n{front_matter}\n---\ntext", "name")) == [Section(title, "text")]


@pytest.mark.parametrize(
    "front_matter",
    [
        'title: "\\UFFFFFFFF"',
        'title: "\\ud800"',
        f"%YAML {'1' * 5000}.1\n--- \ntitle: x",
        "title: x\n" + "a: b\n" * 10_000,
    ],
    ids=["no character", "a surrogate", "a version", "long"],
)
def test_invalid_front_matter_is_kept_as_text(front_matter: str) -> None:
    found = list(sections(f"---\n{front_matter}\n---\n\nlast", "name"))
    assert found[-1].text.endswith("last")
    assert front_matter.split()[0] in "".join(section.title + section.text for section in found)


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("<p title='a > b' class=\"c > d\">x</p>", "x"),
        ("<!-- a <b> -->x<!---->y<!--->z<?php a ?>1<!DOCTYPE html>2<![CDATA[ > ]]>3", "xyz123"),
        ("<p>1 < 2 <3 &lt; &amp; &#65;</p>", "1 < 2 <3 < & A"),
        ("<p>a <!-- never closed <b>c</b>", "a <!-- never closed c"),
        ("<p>a <b x='never closed> c</b> d", "a  c d"),
        ("<p>&#" + "1" * 5000, "&#" + "1" * 5000),
    ],
    ids=["quotes", "hidden", "entities", "open comment", "open quote", "digits"],
)
def test_invisible_parts_of_html_are_removed(html: str, text: str) -> None:
    (section,) = sections(f"<div>\n{html}\n</div>", "name")
    assert section.text == text


READS_EACH = """
import resource, sys
from rlsys.search.ingest import sections
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
for source in sys.stdin.read().split(chr(0)):
    print(sum(1 for _ in sections(source, "name")))
"""
"""Program that parses the documents of its input within 60 s of CPU time; those of the test take about 3 s."""


def test_hostile_documents_are_parsed_in_bounded_time_and_memory() -> None:
    size = 200_000
    repeated = ("<!--", "<!-- a\n", "<?", "<script ", "</p", '<p a="', "<p a='<p b=\"", '<p a="="', "<!A", "<")
    attacks = [f"<div>{part * (size // len(part))}" for part in repeated]
    aliases = "\n".join(f"b{at}: &b{at} [{', '.join([f'*b{at - 1}'] * 9)}]" for at in range(1, 9))
    attacks += [
        f"---\nb0: &b0 [x]\n{aliases}\ntitle: *b8\n---\nx",
        f"---\ntitle: {'[' * size}\n---\nx",
        f"---\ntitle: {'[' * 15_000}{']' * 15_000}\n---\nx",
        f"---\n{'- ' * 15_000}x\n---\nx",
        f"# {'a' * size}\n" + "## b\nx\n" * (size // 8),
    ]
    command = [sys.executable, "-c", READS_EACH]
    child = subprocess.run(command, input="\0".join(attacks), capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    assert len(child.stdout.split()) == len(attacks)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "See [the *docs*](http://a.b), ![a map](m.png), `x = 1` and <b>bold</b> &amp; more.\n\n<p>raw</p>",
            "See the docs, a map, x = 1 and bold & more.\n\nraw",
        ),
        ("Do:\n\n- one\n- two\n  1. deep\n\n3. three\n4. four", "Do:\n\n- one\n- two\n1. deep\n\n3. three\n4. four"),
        ("before\n\n| a | b |\n|---|---|\n| 1 | **2** |\n\nafter", "before\n\na | b\n1 | 2\n\nafter"),
        (f"# {'word ' * 50}\n\ntext", f"{'word ' * 49}word\n\ntext"),
    ],
    ids=["words", "lists", "tables", "a heading too long to be repeated"],
)
def test_markup_is_removed_and_list_items_and_rows_stay_on_their_lines(source: str, text: str) -> None:
    assert list(sections(source, "name")) == [Section("name", text)]


def test_code_is_kept_and_marked() -> None:
    (section,) = sections("Run:\n\n```sh\n# no heading\n\n  pip\n```\n\nthen\n\n    indented\n", "name")
    assert section.text == "Run:\n\n# no heading\n\n  pip\n\nthen\n\nindented"
    assert [section.text[begin:end] for begin, end in section.code] == ["# no heading\n\n  pip", "indented"]


# ---- chunks

LETTERS = st.text(st.sampled_from("abC.,!?)\"'1-éß中。かダ#"), min_size=1, max_size=6)
GAPS = st.sampled_from([" ", " ", "\n", "\n\n", " \n \n", "\t", "\u00a0"])
TEXTS = st.lists(st.tuples(LETTERS, GAPS), max_size=60).map(lambda parts: "".join(a + b for a, b in parts))


def sizes(data: st.DataObject) -> tuple[int, int]:
    size = data.draw(st.integers(1, 12))
    return size, data.draw(st.integers(0, size - 1))


@given(TEXTS, st.data())
def test_chunks_are_bounded_slices_and_words_cover_the_text(text: str, data: st.DataObject) -> None:
    size, overlap = sizes(data)
    assert "".join(text[word.start : word.end] for word in find_words(text)) == "".join(text.split())
    position = 0
    for chunk in chunk_text(text, size=size, overlap=overlap):
        assert chunk == chunk.strip() != ""
        assert 1 <= len(find_words(chunk)) <= size
        position = text.index(chunk, position)


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(CutQuality)), max_size=40), st.data())
def test_costs_and_overlaps_are_bounded(places: list[tuple[int, CutQuality]], data: st.DataObject) -> None:
    size, overlap = sizes(data)
    costs, cuts = [cost for cost, _ in places], [place for _, place in places]
    chunks = cut(costs, cuts, size=size, overlap=overlap)
    assert [word for chunk in chunks for word in range(chunk.fresh, chunk.end)] == list(range(len(costs)))
    for chunk in chunks:
        assert sum(costs[chunk.first : chunk.end]) <= size or chunk.end - chunk.first == 1
        assert sum(costs[chunk.first : chunk.fresh]) <= overlap
    assert all(earlier.first < later.first for earlier, later in pairwise(chunks))


def test_cuts_prefer_paragraphs_then_sentences_then_words() -> None:
    first, last = "One two three. Four five six.", "Seven eight nine ten eleven."
    text = f"{first}\n\n{last}"
    assert chunk_text(text, size=8) == [first, last]
    assert chunk_text(text, size=4) == ["One two three.", "Four five six.", "Seven eight nine ten", "eleven."]


def test_overlap_starts_at_a_sentence_if_one_is_in_reach() -> None:
    text = "A b c d. E f. G h i j. K l."
    assert chunk_text(text, size=6, overlap=3) == ["A b c d. E f.", "E f. G h i j.", "h i j. K l."]
    assert chunk_text("a b c d e f g h i", size=4, overlap=2) == ["a b c d", "c d e f", "e f g h", "g h i"]


def test_code_stays_whole_if_it_fits_and_is_cut_at_lines_otherwise() -> None:
    code = "a = 1\n\nb = 2"
    text = f"Some words. More of them.\n\n{code}\n\nAnd then."
    begin = text.index(code)
    chunks = chunk_text(text, size=9, code=[(begin, begin + len(code))])
    assert chunks == ["Some words. More of them.", f"{code}\n\nAnd then."]
    assert chunk_text(code, size=4, code=[(0, len(code))]) == ["a = 1", "b = 2"]
    assert chunk_text("a.b C. D\ne", size=3, code=[(0, 10)]) == ["a.b C. D", "e"], "no sentences in code"


def test_a_name_that_is_no_utf8_is_written_with_escapes(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    named = Path(os.fsdecode(os.fsencode(docs) + b"/caf\xe9.txt"))
    named.write_text("An old archive.")
    passages, _ = run(tmp_path, docs)
    assert [(one["id"], one["source"]) for one in passages] == [("caf\\xe9.txt", "caf\\xe9.txt")]
    assert "An old archive." in passages[0]["contents"]
