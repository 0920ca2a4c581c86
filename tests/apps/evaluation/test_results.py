"""Files and page of an evaluation; nobody else's markup gets onto the page."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

from rlsys.apps.evaluation.results import (
    ANSWERS,
    PAGE,
    PARTIAL,
    POLICY,
    RESULTS,
    noting,
    render_page,
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


EVIL = [
    "<script>alert(1)</script>",
    '"><img src=x onerror="alert(1)">',
    "</style><script>alert(2)</script>",
    "</title></head><body onload=alert(3)>",
    "<!-- <svg/onload=alert(4)> -->",
    "&lt;b&gt;&#60;script&#62;",
    "\x1b[31m\u202eevil\u2066\x00\ud800",
]


def page_of(*answers: Answered, shown: int = 20) -> str:
    evaluation = Evaluation(0, answers)
    return render_page(evaluation, summarise(evaluation), shown, seed=1)


def with_text(text: str) -> Answered:
    """An answer with `text` in every place that somebody else fills."""
    found = turn(Action.SEARCH, text, text, error=text, text=text)
    return answered(Question(text, text, (text, "x"), text, {"hops": text}, text), text, 0, found)


def test_no_text_of_others_becomes_markup() -> None:
    tame = page_of(with_text("tame"))
    assert f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">' in tame
    assert POLICY.startswith("default-src 'none'")
    assert "script-src" not in POLICY
    tags = re.findall(r"<[^>]*>", tame)
    for evil in EVIL:
        page = page_of(with_text(evil))
        assert re.findall(r"<[^>]*>", page) == tags
        assert page.count("<") == len(tags)
        assert not {"\x1b", "\u202e", "\ud800"} & set(page)
        if evil.isprintable():
            assert evil in unescape(page), "it is shown as text"


def test_the_page_is_of_the_answers() -> None:
    answers = [answered(asked(n, "x", source="nq"), "x" if n % 3 == 0 else "y") for n in range(30)]
    answers += [answered(asked(40, "x", source="own"), None)]
    page = page_of(*answers, shown=4)
    articles = sorted(re.findall(r'<article class="([^"]+)"', page))
    assert articles == ["right set-0"] * 4 + ["wrong set-0"] * 4 + ["wrong set-1"]
    assert page_of(*answers, shown=4) == page
    assert "9 of 31" in page
