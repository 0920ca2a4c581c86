"""From bytes to text, in this process and in workers."""

from __future__ import annotations

import asyncio
import resource
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.search.web.extract import Page, clean, decode, extract
from rlsys.search.web.web_search import Fetched, Workers, passages
from tests.search.conftest import children_of
from tests.search.web.fake_web import HTML

ENDLESS = "<html><body><p " + " ".join(f"a{row}=1" for row in range(100_000)) + ">text</p></body></html>"
"""Attributes that libxml2 compares with each other: minutes of work."""


def read(html: str) -> Page:
    page = extract(html.encode(), "text/html", "utf-8")
    assert page is not None
    return page


def test_a_page_has_a_title_and_paragraphs_without_scripts_and_menus() -> None:
    page = read(HTML)
    assert page.title == "Old Towns"
    paragraphs = page.text.split("\n")
    assert len(paragraphs) == 3
    assert paragraphs[1].startswith("The lighthouse of Kalmar was built in 1852")
    assert page.contents == f'"Old Towns"\n{page.text}'
    menu = "<nav><a href='/'>Home</a></nav><script>alert('x')</script><article>"
    assert read(HTML.replace("<article>", menu)).text == page.text


@pytest.mark.parametrize(
    ("body", "charset", "text"),
    [
        ("größer".encode("latin-1"), None, "größer"),
        ("“x”".encode("cp1252"), "iso-8859-1", "“x”"),
        ("東京".encode("shift_jis"), "Shift_JIS", "東京"),
        ("東京".encode(), "no-such-charset", "東京"),
        (b"\xef\xbb\xbf" + "東京".encode(), "shift_jis", "東京"),
        ("\ufeff東京".encode("utf-16-le"), None, "東京"),
        (b"abc", "zlib_codec", "abc"),
        (b"a\xffc", "utf-8", "a�c"),
    ],
)
def test_charsets(body: bytes, charset: str | None, text: str) -> None:
    assert decode(body, charset) == text


@settings(max_examples=50)
@given(st.text(st.characters()))
def test_clean_text_has_no_controls_and_can_be_sent(text: str) -> None:
    cleaned = clean(text)
    assert not [c for c in cleaned if unicodedata.category(c) in ("Cc", "Cs") and c != "\n"]
    assert not set(cleaned) & set("\u202e\u2066")
    cleaned.encode("utf-8")
    assert clean(cleaned) == cleaned
    assert all(line.strip() == line != "" for line in cleaned.split("\n")) or cleaned == ""


async def test_a_worker_that_meets_a_hostile_page_ends_and_the_next_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERPER_API_KEY", "hidden-from-workers")
    workers = Workers(1, job_timeout_s=0.3, hidden={"SERPER_API_KEY"})
    good, endless = Fetched(HTML.encode(), "text/html", "utf-8"), Fetched(ENDLESS.encode(), "text/html", None)
    try:
        assert await workers.read(endless) is None
        workers._job_timeout_s = 300.0  # of those that are started from now on
        assert await workers.read(good) == extract(HTML.encode(), "text/html", "utf-8")
        (worker,) = children_of("rlsys.search.web.extract")
        assert "PATH" in worker.environ()
        assert "SERPER_API_KEY" not in worker.environ()
        assert worker.rlimit(resource.RLIMIT_AS) == (2 * 1024**3, 2 * 1024**3)
        assert worker.rlimit(resource.RLIMIT_CORE) == (0, 0)
        await workers.read(Fetched(b"<html><body>" + b"<div>" * 100_000 + b"text", "text/html", None))
        reading = asyncio.create_task(workers.read(endless))
        await asyncio.sleep(0)  # the worker has its page
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert not worker.is_running()
        assert await workers.read(good) is not None
    finally:
        await workers.close()


@settings(max_examples=50)
@given(st.lists(st.lists(st.sampled_from("abcde"), max_size=30).map(" ".join), max_size=8), st.integers(1, 20))
def test_passages_keep_every_word_in_order_within_their_length(paragraphs: list[str], words: int) -> None:
    text = "\n".join(paragraphs)
    found = passages(text, words)
    assert " ".join(found).split() == text.split()
    assert all(1 <= len(passage.split()) <= words for passage in found)
