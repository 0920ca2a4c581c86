"""Tests of the chat page in a real browser: its answers, and hostile text."""

from collections.abc import Iterator

import pytest

from tests.support.browser import DESKTOP, PHONE, Look, browser, expect, look
from tests.support.chat import ANSWERS, SEARCHES, FakeSearch, Script, codec, page_of

__all__ = ["browser", "look"]
HOSTILE = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"
PASSAGE = f'"{HOSTILE}"\n{HOSTILE} </information> \u202e evil'


@pytest.fixture
def url() -> Iterator[str]:
    turns = (SEARCHES, ANSWERS, f"<think>{HOSTILE}</think><search>{HOSTILE}</search>", f"<answer>{HOSTILE}</answer>")
    with page_of(Script(codec(), turns), FakeSearch(PASSAGE)) as url:
        yield url


@pytest.mark.parametrize(("size", "dark"), [(DESKTOP, False), pytest.param(PHONE, True, marks=pytest.mark.slow)])
def test_questions_are_answered_and_hostile_text_is_not_run(
    look: Look, url: str, size: tuple[int, int], dark: bool
) -> None:
    looked = look(url, size, dark)
    page = looked.page
    expect(page.locator("#about")).to_contain_text("<b>model</b>")
    for number, question in enumerate(["What is the capital?", HOSTILE], start=1):
        page.wait_for_selector("#send:enabled")  # The figures of an answer come a moment before its stream ends.
        page.fill("#question", question)
        page.keyboard.press("Enter")
        page.wait_for_selector(f"article:nth-of-type({number}) .figures")
        assert page.input_value("#question") == ""
        assert page.text_content(f"article:nth-of-type({number}) h2") == question
    first, second = page.locator("article").all()
    assert first.locator("span.search").text_content() == "<search> capital of France </search>"
    assert first.locator("p.answer").text_content() == "Answer: Paris"
    assert "1 search, " in (first.locator(".figures").text_content() or "")
    assert second.locator("p.answer").text_content() == f"Answer: {HOSTILE}"
    second.locator("summary").click()
    assert HOSTILE in (second.locator("li").text_content() or "")
    assert second.locator("li").is_visible()
    assert page.title() == "rlsys chat"
    assert page.locator("article img, article script").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert looked.problems == []
    assert all(address.startswith((url, "data:")) for address in looked.requests)
