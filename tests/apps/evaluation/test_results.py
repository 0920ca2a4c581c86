"""Files, table and page of an evaluation; a browser's parser finds nobody else's markup on the page."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

from rich.console import Console

from rlsys.apps.evaluation.results import (
    ANSWERS,
    PAGE,
    PARTIAL,
    POLICY,
    RESULTS,
    noting,
    render_page,
    render_table,
    summarise,
    write_results,
)
from rlsys.data.question import Question
from rlsys.data.trajectory import Action
from rlsys.orchestrator.evaluation.heldout import Answered, Evaluation
from rlsys.orchestrator.evaluation.scores import wilson
from tests.support.answers import SEARCH, answered, asked, turn

EVALUATION = Evaluation(
    0,
    (
        answered(asked(1, "Nile", source="2wikimultihopqa", text="Which?", hops=1), "the Nile", 0, SEARCH),
        answered(asked(2, "Lyon", source="2wikimultihopqa", hops=2), None),
        answered(asked(3, "é", source="own[bold]"), "\ud800 é"),
    ),
)


def test_the_files_say_what_was_asked_and_answered(tmp_path: Path) -> None:
    with noting(tmp_path) as note:
        note(EVALUATION.answered[0])
        assert json.loads((tmp_path / PARTIAL).read_text())["uid"] == "q:1", "before the evaluation ends"
    write_results(EVALUATION, tmp_path, {"engine": "sglang"}, 3, seed=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [ANSWERS, RESULTS, PAGE]
    results = json.loads((tmp_path / RESULTS).read_text())
    assert results["settings"] == {"engine": "sglang"}
    assert results["versions"]["python"]
    assert list(results["sets"]) == ["2wikimultihopqa", "own[bold]"]
    em, expected = results["sets"]["2wikimultihopqa"]["em"], wilson(1, 2)
    assert em == {"mean": 0.5, "low": expected.low, "high": expected.high}
    assert results["average"]["em"]["mean"] == 0.25
    rows = [json.loads(line) for line in (tmp_path / ANSWERS).read_text().splitlines()]
    assert [row["em"] for row in rows] == [1.0, 0.0, 0.0]
    assert (rows[0]["uid"], rows[0]["question"], rows[0]["golden_answers"]) == ("q:1", "Which?", ["Nile"])
    assert (rows[0]["answer"], rows[0]["searches"], rows[0]["tokens"]) == ("the Nile", 1, 8)
    assert (rows[1]["answer"], rows[1]["finish"]) == (None, "turn_limit")
    assert rows[2]["answer"] == "? é"


def test_the_table_fits_80_columns_and_has_a_row_for_everything() -> None:
    out = StringIO()
    Console(file=out, width=80).print(render_table(summarise(EVALUATION)))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    sets = ["2WikiMultiHopQA", "1 hop", "2 hops", "own[bold]", "average"]
    assert [first for line in lines if (first := line[:16].strip()) in sets] == sets
    (row,) = [line.split() for line in lines if line.startswith("2Wiki")]
    assert row == ["2WikiMultiHopQA", "2", "50.0", "50.0", "50.0", "50.0", "0.50", "4"]


EVIL = [
    "<script>alert(1)</script>",
    '"><img src=x onerror="alert(1)">',
    "</style><script>alert(2)</script>",
    "</title></head><body onload=alert(3)>",
    "<!-- <svg/onload=alert(4)> -->",
    "&lt;b&gt;&#60;script&#62;",
    "\x1b[31m\u202eevil\u2066\x00\ud800",
]


class Seen(HTMLParser):
    """Tags, attributes and the text outside of the style sheet."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
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
            self.text += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")


def page_of(*answers: Answered, shown: int = 20) -> Seen:
    evaluation = Evaluation(0, answers)
    return Seen(render_page(evaluation, summarise(evaluation), shown, seed=1))


def with_text(text: str) -> Answered:
    """An answer with `text` in every place that somebody else fills."""
    found = turn(Action.SEARCH, text, text, error=text, text=text)
    return answered(Question(text, text, (text, "x"), text, {"hops": text}, text), text, 0, found)


def test_no_text_of_others_becomes_markup() -> None:
    plain = page_of(with_text("tame"))
    assert ("meta", {"http-equiv": "Content-Security-Policy", "content": POLICY}) in plain.tags
    assert POLICY.startswith("default-src 'none'")
    assert "script-src" not in POLICY
    assert not {"script", "iframe", "img", "svg", "a"} & {tag for tag, _ in plain.tags}
    for evil in EVIL:
        seen = page_of(with_text(evil))
        assert [(tag, attributes.keys()) for tag, attributes in seen.tags] == [
            (tag, attributes.keys()) for tag, attributes in plain.tags
        ], evil
        assert not {"\x1b", "\u202e"} & set(seen.text)
    assert EVIL[0] in page_of(with_text(EVIL[0])).text, "it is shown as text"


def test_the_page_is_of_the_answers() -> None:
    answers = [answered(asked(n, "x", source="nq"), "x" if n % 3 == 0 else "y") for n in range(30)]
    answers += [answered(asked(40, "x", source="own"), None)]
    page = page_of(*answers, shown=4)
    articles = sorted(str(given["class"]) for tag, given in page.tags if tag == "article")
    assert articles == ["right set-0"] * 4 + ["wrong set-0"] * 4 + ["wrong set-1"]
    assert page_of(*answers, shown=4).tags == page.tags
    assert "9 of 31" in page.text
