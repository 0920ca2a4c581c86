"""Tests of the page store: pages are found by any spelling of their URL."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.search import corpus as corpus_module
from rlsys.search.corpus import PageStore
from tests.support.refusals import refused

WIKI = "https://en.wikipedia.org/wiki"


def page(url: str, contents: str = "text") -> dict[str, Any]:
    return {"url": url, "contents": contents, "title": "T"}


def write(path: Path, pages: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in pages), encoding="utf-8")
    return path


def found(store: PageStore, *urls: str) -> list[str | None]:
    return [None if item is None else item["contents"] for item in store.find(urls)]


@settings(max_examples=40)
@given(
    stored=st.lists(st.tuples(st.sampled_from("abcdefgh"), st.text(max_size=5)), min_size=1, max_size=20),
    asked=st.lists(st.sampled_from("abcdefghxyz"), max_size=20),
    collide=st.booleans(),
)
def test_the_store_finds_what_a_dict_filled_in_file_order_finds(
    tmp_path_factory: pytest.TempPathFactory, stored: list[tuple[str, str]], asked: list[str], collide: bool
) -> None:
    """All hashes are equal if `collide` is true."""
    pages = [page(f"{WIKI}/{name}", text) for name, text in stored]
    reference = {item["url"]: item for item in pages}
    path = write(tmp_path_factory.mktemp("pages") / "pages.jsonl", pages)
    with pytest.MonkeyPatch.context() as patch:
        if collide:
            patch.setattr(corpus_module, "_hashes", lambda keys: np.full(len(keys), 7, dtype=np.uint64))
        store = PageStore(path)
        assert len(store) == len(pages)
        urls = [f"{WIKI}/{name}" for name in asked]
        assert store.find(urls) == [reference.get(url) for url in urls]


SAO_PAULO = "https://en.wikipedia.org/w/S%C3%A3o_Paulo?x=1"
CPP = "https://en.wikipedia.org/w/index.php?title=C%2B%2B"
PARIS = f"{WIKI}/Paris"
STORED = [SAO_PAULO, CPP, PARIS, "doc 17", "http://[broken"]


@pytest.mark.parametrize(
    ("asked", "stored"),
    [
        ("http://en.wikipedia.org/w/São_Paulo?x=1", SAO_PAULO),
        ("HTTPS://EN.Wikipedia.org:443/w/S%c3%a3o_Paulo?x=1", SAO_PAULO),
        ("https://user:secret@en.wikipedia.org/w/S%C3%A3o%5FPaulo/?x=1#History", SAO_PAULO),
        (" https://en.wikipedia.org/a/../w/São_Paulo?x=1\n", SAO_PAULO),
        ("https://en.wikipedia.org/w/index.php/C%2B%2B", CPP),
        (" doc 17 ", "doc 17"),
        ("http://[broken", "http://[broken"),
        (f"{PARIS}?x=1", None),
        (f"{WIKI}/paris", None),
        ("https://en.wikipedia.org:8080/wiki/Paris", None),
        (f"{PARIS}%2FTexas", None),
        ("http://host:port/", None),
        ("\ud800", None),
    ],
)
def test_a_page_is_found_by_any_spelling_of_its_url_and_by_no_other(
    asked: str, stored: str | None, tmp_path: Path
) -> None:
    store = PageStore(write(tmp_path / "pages.jsonl", [page(url, url) for url in STORED]))
    assert found(store, asked) == [stored]


def test_exact_urls_are_preferred_and_the_last_page_of_a_url_counts(tmp_path: Path) -> None:
    stored = [page(f"{WIKI}/A", "first"), page(f"{WIKI}/A", "last"), page(f"{WIKI}/A/", "slash")]
    store = PageStore(write(tmp_path / "pages.jsonl", stored))
    assert found(store, f"{WIKI}/A", f"{WIKI}/A/", f"{WIKI}/A#x") == ["last", "slash", "slash"]


@pytest.mark.parametrize("bad", ['{"contents": "text"}', '{"url": 5, "contents": "text"}', '{"url": "u"}', "x"])
def test_a_bad_page_is_named_when_the_file_is_opened(tmp_path: Path, bad: str) -> None:
    path = write(tmp_path / "pages.jsonl", [page("u")])
    path.write_text(path.read_text() + bad + "\n")
    with refused("malformed", path) as error:
        PageStore(path)
    assert "line 2 " in str(error.value)
