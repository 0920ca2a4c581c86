"""A page of right and wrong answers, in one file that needs nothing else.

Everything on it that a model, a page of the web or a data set has written is untrusted. It gets there as text of a tree that
the serialiser escapes, never as markup, and after control characters and marks that reorder text are spelled out. Filters
are radio buttons that the style sheet reads: the page has no script at all, and its policy allows none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from xml.etree import ElementTree as Tree

from rlsys.apps.evaluation.page_style import STYLE, filter_rules
from rlsys.apps.evaluation.sets import title_of
from rlsys.apps.evaluation.summary import SetFigures, overall
from rlsys.data.trajectory import Turn
from rlsys.observe.samples import visible
from rlsys.orchestrator.evaluation.evaluate import Answered, Evaluation
from rlsys.orchestrator.evaluation.intervals import Estimate

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
EVERY, RIGHT, WRONG = "all", "right", "wrong"


def render_page(evaluation: Evaluation, sets: Sequence[SetFigures], shown: int, seed: int) -> str:
    """The page, with at most `shown` right and as many wrong answers of each of `sets`, drawn with `seed`."""
    parts = list(evaluation.by_source.values())
    picked = [(number, one) for number, part in enumerate(parts) for one in _pick(part.answered, shown, Random(seed))]
    verdicts = {f"is-{name}": name for name in (EVERY, RIGHT, WRONG)}
    names = {"of-all": "all sets"} | {f"of-{number}": title_of(one.name) for number, one in enumerate(sets)}
    page = Tree.Element("html", {"lang": "en"})
    page.append(_head(len(sets)))
    body = _add(page, "body")
    for group, choices in (("verdict", verdicts), ("set", names)):
        for identity in choices:
            first = {"checked": "checked"} if identity == next(iter(choices)) else {}
            _add(body, "input", type="radio", name=group, id=identity, **first)
    header = _add(body, "header")
    _add(header, "h1", "Answers")
    _add(
        header,
        "p",
        f"{len(picked)} of {len(evaluation.answered)}: at most {shown} right and {shown} wrong ones of each set, drawn at "
        "random. Answers and passages are shown as they came.",
    )
    nav = _add(body, "nav")
    for label, choices in (("Verdict", verdicts), ("Set", names)):
        row = _add(nav, "div", role="group", **{"aria-label": label})
        for identity, name in choices.items():
            _add(row, "label", name, **{"for": identity})
    main = _add(body, "main")
    main.append(_figures(sets))
    for number, one in picked:
        main.append(_article(number, one))
    _add(main, "p", "None of the answers shown is of this kind.", **{"class": "none"})
    return f"<!doctype html>\n{Tree.tostring(page, encoding='unicode', method='html')}\n"


def _pick(answered: Sequence[Answered], most: int, draws: Random) -> Iterable[Answered]:
    """At most so many right and as many wrong answers, in their order."""
    picked: set[int] = set()
    for right in (True, False):
        places = [place for place, one in enumerate(answered) if (one.em == 1) is right]
        picked |= set(draws.sample(places, min(most, len(places))))
    return [answered[place] for place in sorted(picked)]


def _head(sets: int) -> Tree.Element:
    head = Tree.Element("head")
    _add(head, "meta", charset="utf-8")
    _add(head, "meta", **{"http-equiv": "Content-Security-Policy", "content": POLICY})
    _add(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    _add(head, "title", "Answers of an evaluation")
    _add(head, "style").text = STYLE + filter_rules(sets)  # No text of others: what is in here is not escaped.
    return head


def _figures(sets: Sequence[SetFigures]) -> Tree.Element:
    """The table of all sets."""
    box = Tree.Element("div", {"class": "figures"})
    table = _add(box, "table")
    _add(table, "caption", "In percent, with 95 % intervals.")
    row = _add(_add(table, "thead"), "tr")
    for name in ("", "questions", "EM", "F1", "sub-EM", "finished", "searches", "tokens"):
        _add(row, "th", name, scope="col")
    body = _add(table, "tbody")
    for one in (*sets, *overall(sets)):
        row = _add(body, "tr")
        _add(row, "th", title_of(one.name), scope="row")
        _add(row, "td", str(one.questions))
        for share in (one.em, one.f1, one.sub_em, one.finished):
            _share(row, share)
        _add(row, "td", f"{one.searches:.2f}")
        _add(row, "td", f"{one.tokens:.0f}")
    return box


def _share(row: Tree.Element, share: Estimate) -> None:
    cell = _add(row, "td", f"{share.mean * 100:.1f}")
    _add(cell, "small", f"{share.low * 100:.1f}-{share.high * 100:.1f}")


def _article(number: int, one: Answered) -> Tree.Element:
    """One answer and, folded, how it came about."""
    question, trajectory = one.question, one.trajectory
    verdict = RIGHT if one.em == 1 else WRONG
    article = Tree.Element("article", {"class": f"{verdict} set-{number}"})
    meta = _add(article, "p", **{"class": "meta"})
    _add(meta, "strong", verdict)
    facts = [
        question.uid,
        f"answer {trajectory.sample + 1}",
        f"{trajectory.searches} searches",
        f"{one.tokens} tokens",
    ]
    _add(
        meta,
        "span",
        " · ".join([title_of(question.data_source), *facts, f"ended by {trajectory.finish.value}"]),
    )
    _add(article, "h2", question.text or question.prompt.strip())
    pairs = _add(article, "dl")
    for term, text in (
        ("answered", "nothing" if trajectory.answer is None else trajectory.answer),
        ("accepted", "\n".join(question.answers)),
        ("F1", f"{one.scores.f1:.2f}"),
    ):
        _add(pairs, "dt", term)
        _add(pairs, "dd", text)
    details = _add(article, "details")
    _add(details, "summary", f"the episode, {len(trajectory.turns)} turns")
    _block(details, "prompt", question.prompt)
    for turn in trajectory.turns:
        _turn(details, turn)
    return article


def _turn(details: Tree.Element, turn: Turn) -> None:
    _block(details, "model", turn.text)
    if turn.search_error:
        _block(details, "error", turn.search_error)
    if turn.observation:
        _block(details, "environment", turn.observation)


def _block(parent: Tree.Element, kind: str, text: str) -> None:
    """A text of several lines with who wrote it."""
    _add(parent, "p", kind, **{"class": "who"})
    _add(parent, "pre", text.strip("\n"), **{"class": kind})


def _add(parent: Tree.Element, tag: str, text: str = "", /, **attributes: str) -> Tree.Element:
    """A new last child of `parent`. Its text may be anyone's; tags and attributes are this module's own."""
    child = Tree.SubElement(parent, tag, attributes)
    child.text = visible(text)
    return child
