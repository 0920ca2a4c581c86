"""The page of answers as a browser's parser sees it: nothing on it is anyone else's markup, and every filter has its rule."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from rlsys.apps.evaluation.results import POLICY, render_page, summarise
from rlsys.data.question import Question
from rlsys.data.trajectory import Action
from rlsys.orchestrator.evaluation.heldout import Answered, Evaluation
from tests.apps.evaluation.answers import answered, asked, turn

EVIL = [
    "<script>alert(1)</script>",
    '"><img src=x onerror="alert(1)">',
    "</style><script>alert(2)</script>",
    "</title></head><body onload=alert(3)>",
    "<!-- <svg/onload=alert(4)> -->",
    "]]><iframe srcdoc='<b>'>",
    "&lt;b&gt;&#60;script&#62;",
    "\x1b[31m\u202eevil\u2066\x00\ud800",
    "javascript:alert(5) {{7*7}} ${7*7}",
]
ALLOWED = set(
    re.findall(
        r"\w+",
        "html head meta title style body input header nav div label main table caption thead tbody tr th td small article p "
        "strong span h1 h2 dl dt dd details summary pre",
    )
)


class Seen(HTMLParser):
    """Tags, attributes and the text outside of the style sheet."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, "every element is closed in order"

    def handle_data(self, data: str) -> None:
        if self._open[-1:] != ["style"]:
            self.text.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def page_of(*answers: Answered, shown: int = 20) -> str:
    evaluation = Evaluation(0, answers)
    return render_page(evaluation, summarise(evaluation), shown, seed=1)


def malicious(evil: str) -> Answered:
    """Somebody's text wherever it can be."""
    question = Question(evil, evil, (evil, "x"), evil, {"hops": evil}, evil)
    found = turn(Action.SEARCH, evil, evil, error=evil, text=evil)
    return answered(question, evil, 0, found)


def test_no_text_of_others_becomes_markup() -> None:
    tame = [answered(asked(1, "x", source="tame"), "x", 0, turn(Action.SEARCH, "q", "o", error="e"))]
    plain = Seen(page_of(*tame))
    for evil in EVIL:
        seen = Seen(page_of(malicious(evil)))
        assert [tag for tag, _ in seen.tags] == [tag for tag, _ in plain.tags], evil
        assert {tag for tag, _ in seen.tags} <= ALLOWED
        assert not [name for _, attributes in seen.tags for name in attributes if name.startswith("on")]
        assert not {"href", "src", "style"} & {name for _, attributes in seen.tags for name in attributes}
        shown = "".join(seen.text)
        assert "\x1b" not in shown
        assert "\u202e" not in shown
    policies = [one["content"] for one in plain.of("meta") if one.get("http-equiv") == "Content-Security-Policy"]
    assert policies == [POLICY]
    assert POLICY.startswith("default-src 'none'")
    assert "script-src" not in POLICY
    assert "<script>alert(1)</script>" in "".join(Seen(page_of(malicious(EVIL[0]))).text), "it is shown as text"


def test_the_page_is_of_the_answers() -> None:
    answers = [answered(asked(n, "x", source="nq"), "x" if n % 3 == 0 else "y") for n in range(30)]
    answers += [answered(asked(40, "x", source="own"), None)]
    page = page_of(*answers, shown=4)
    articles = [one["class"] for one in Seen(page).of("article")]
    assert sorted(map(str, articles)) == ["right set-0"] * 4 + ["wrong set-0"] * 4 + ["wrong set-1"]
    assert page_of(*answers, shown=4) == page
    assert "9 of 31" in "".join(Seen(page).text)
    assert {"NQ", "own"} <= set(Seen(page).text)
