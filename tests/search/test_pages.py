from __future__ import annotations

import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.errors import UserError
from rlsys.search import corpus as corpus_module
from rlsys.search.corpus import PageStore, page_key

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
def test_it_answers_as_a_dict_filled_in_file_order(
    tmp_path_factory: pytest.TempPathFactory, stored: list[tuple[str, str]], asked: list[str], collide: bool
) -> None:
    """Also where all hashes collide."""
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


@pytest.mark.parametrize(
    "url",
    [
        "http://en.wikipedia.org/w/São_Paulo?x=1",
        "HTTPS://EN.Wikipedia.org:443/w/S%c3%a3o_Paulo?x=1",
        "https://user:secret@en.wikipedia.org/w/S%C3%A3o%5FPaulo/?x=1#History",
        " https://en.wikipedia.org/a/../w/São_Paulo?x=1\n",
    ],
)
def test_spellings_of_one_page_find_it(tmp_path: Path, url: str) -> None:
    stored = "https://en.wikipedia.org/w/S%C3%A3o_Paulo?x=1"
    store = PageStore(write(tmp_path / "pages.jsonl", [page(stored), page(f"{WIKI}/other")]))
    assert store.find([url]) == [page(stored)]


@pytest.mark.parametrize(
    "url",
    [
        f"{WIKI}/Paris?x=1",
        f"{WIKI}/paris",
        "https://en.wikipedia.org:8080/wiki/Paris",
        f"{WIKI}/Paris%2FTexas",
        "ftp://en.wikipedia.org/wiki/Paris",
        "http://[broken",
        "http://host:port/",
        "",
        "\ud800",
    ],
)
def test_no_other_url_finds_it(tmp_path: Path, url: str) -> None:
    assert PageStore(write(tmp_path / "pages.jsonl", [page(f"{WIKI}/Paris")])).find([url]) == [None]


@pytest.mark.parametrize("url", ["doc 17", "http://[broken", "urn:isbn:0451450523"])
def test_a_url_that_is_no_web_address_is_compared_as_it_is(tmp_path: Path, url: str) -> None:
    store = PageStore(write(tmp_path / "pages.jsonl", [page(url)]))
    assert found(store, url, f" {url} ", url.upper()) == ["text", "text", None]


def test_mediawiki_paths_are_titles(tmp_path: Path) -> None:
    stored = page("https://en.wikipedia.org/w/index.php?title=C%2B%2B")
    store = PageStore(write(tmp_path / "pages.jsonl", [stored]))
    assert store.find(["https://en.wikipedia.org/w/index.php/C%2B%2B"]) == [stored]


def test_the_exact_url_goes_before_an_equal_one_and_the_last_page_before_earlier_ones(tmp_path: Path) -> None:
    stored = [page(f"{WIKI}/A", "first"), page(f"{WIKI}/A", "last"), page(f"{WIKI}/A/", "slash")]
    store = PageStore(write(tmp_path / "pages.jsonl", stored))
    assert found(store, f"{WIKI}/A", f"{WIKI}/A/", f"{WIKI}/A#x") == ["last", "slash", "slash"]


def test_the_key_of_a_key_of_a_url_is_stable() -> None:
    key = page_key("http://Example.org/a%7Eb/?q=%e9")
    assert key == "example.org/a~b?q=%E9"
    assert page_key(f"http://{key}") == key


@pytest.mark.parametrize("bad", ['{"contents": "text"}', '{"url": 5, "contents": "text"}', '{"url": "u"}', "x"])
def test_a_bad_page_is_named_when_the_file_is_opened(tmp_path: Path, bad: str) -> None:
    path = write(tmp_path / "pages.jsonl", [page("u")])
    path.write_text(path.read_text() + bad + "\n")
    with pytest.raises(UserError, match=r"pages\.jsonl line 2 "):
        PageStore(path)


def test_urls_are_read_once_and_again_when_the_file_changes_or_the_sidecar_is_damaged(tmp_path: Path) -> None:
    path = write(tmp_path / "pages.jsonl", [page(f"{WIKI}/{number}") for number in range(1000)])
    sidecar = tmp_path / "pages.jsonl.urls"

    def reads() -> list[bool]:
        """Whether the file was read through, and parsed."""
        makers = [
            patch.object(corpus_module, name, wraps=getattr(corpus_module, name))
            for name in ("_write_offsets", "_write_urls")
        ]
        with makers[0] as scanned, makers[1] as parsed:
            store = PageStore(path)
        count = len(path.read_text().splitlines())
        assert found(store, f"{WIKI}/{count - 1}", f"{WIKI}/{count}") == ["text", None]
        return [scanned.called, parsed.called]

    assert reads() == [True, True]
    assert reads() == [False, False]
    whole = sidecar.read_bytes()
    sidecar.write_bytes(whole[:-8])
    assert reads() == [False, True]
    assert sidecar.read_bytes() == whole
    with path.open("a") as file:
        file.write(json.dumps(page(f"{WIKI}/1000")) + "\n")
    assert reads() == [True, True]


def test_threads_share_a_store(tmp_path: Path) -> None:
    pages = [page(f"{WIKI}/{number}", str(number)) for number in range(500)]
    store = PageStore(write(tmp_path / "pages.jsonl", pages))
    draws = [random.Random(seed).choices(range(700), k=50) for seed in range(40)]
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda draw: found(store, *(f"{WIKI}/{number}" for number in draw)), draws)
        for draw, answer in zip(draws, answers, strict=True):
            assert answer == [str(number) if number < 500 else None for number in draw]
