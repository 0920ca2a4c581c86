"""Writes the files of an evaluation: figures and settings for programs, every answer, and a page for people.

Contract: each appears whole or not at all. `results.json` comes last: where it is, all are there. Until then the answers
that are known lie in `answers.partial.jsonl`, in the order in which they came.

The page is one file that needs nothing else. Everything on it that a model, a page of the web or a data set has written is
untrusted: it gets there as text of a tree that the serialiser escapes, never as markup, after control characters and marks
that reorder text are spelled out. Filters are radio buttons that the style sheet reads: the page has no script at all, and
its policy allows none.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any
from xml.etree import ElementTree as Tree

from rlsys.apps.evaluation.baselines import How
from rlsys.apps.evaluation.evaluation_inputs import EvaluationInputs, title_of
from rlsys.apps.evaluation.set_figures import SetFigures, average, overall, summarise
from rlsys.config.compose import as_dict
from rlsys.files import json_safe, sha256_of, write_atomically
from rlsys.observe.environment import environment
from rlsys.observe.samples import visible
from rlsys.orchestrator.evaluation.heldout import Answered, Evaluation, answer_line
from rlsys.orchestrator.evaluation.scores import LEVEL

RESULTS, ANSWERS, PAGE = "results.json", "answers.jsonl", "samples.html"
PARTIAL = "answers.partial.jsonl"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
EVERY, RIGHT, WRONG = "all", "right", "wrong"
_LABEL = "~ nav label[for={name}]"
_CHOSEN = (
    f"#{{name}}:checked {_LABEL} {{{{ background: var(--text); color: var(--back); border-color: var(--text); }}}}\n"
)
_FOCUS = f"#{{name}}:focus-visible {_LABEL} {{{{ outline: 2px solid var(--accent); outline-offset: 2px; }}}}\n"


def write_results(
    evaluation: Evaluation, out: Path, settings: Mapping[str, Any], shown: int, seed: int
) -> list[SetFigures]:
    """Write the three files to `out`, at most `shown` right and as many wrong answers of each set to the page.

    Returns the figures of every set. `settings` are whatever tells how they came about.
    """
    sets = summarise(evaluation)
    write_atomically(out / ANSWERS, "".join(map(answer_line, evaluation.answered)))
    write_atomically(out / PAGE, render_page(evaluation, sets, shown, seed))
    results = {
        "settings": settings,
        "versions": environment(),
        "interval_level": LEVEL,
        "sets": {one.name: asdict(one) for one in sets},
        "average": asdict(average(sets)),
    }
    write_atomically(out / RESULTS, json.dumps(json_safe(results), indent=2) + "\n")
    (out / PARTIAL).unlink(missing_ok=True)
    return sets


def settings_of(inputs: EvaluationInputs, how: How, started: float, ended: float) -> dict[str, Any]:
    """The `settings` of an evaluation that began and ended at these times, in seconds since the epoch."""
    model, asked = inputs.model, inputs.config.eval
    return {
        "config": as_dict(inputs.config),
        "model": str(model.folder),
        "original": None if model.original is None else str(model.original),
        "step": model.step,
        "data": [
            # The checksum tells a file of questions from another.
            {"set": source.label, "path": str(source.path), "sha256": sha256_of(source.path)}
            for source in inputs.sources
        ],
        "limit": asked.limit,
        **asdict(how),
        "samples": asked.samples,
        "temperature": asked.temperature,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(started)),
        "seconds": round(ended - started, 1),
    }


@contextmanager
def noting(out: Path) -> Iterator[Callable[[Answered], None]]:
    """Write every answer to `answers.partial.jsonl` of `out` at once."""
    path = out / PARTIAL
    with path.open("w", encoding="utf-8") as lines:

        def note(one: Answered) -> None:
            lines.write(answer_line(one))
            lines.flush()

        try:
            yield note
        finally:
            if not path.stat().st_size:
                path.unlink()


def render_page(evaluation: Evaluation, sets: Sequence[SetFigures], shown: int, seed: int) -> str:
    """The page, with at most `shown` right and as many wrong answers of each of `sets`, drawn with `seed`."""
    parts = list(evaluation.by_source.values())
    picked = [
        (number, answer) for number, part in enumerate(parts) for answer in _pick(part.answered, shown, Random(seed))
    ]
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
    drawn = (
        f"{len(picked)} of {len(evaluation.answered)}: at most {shown} right and {shown} wrong ones of each set, drawn at "
        "random. Answers and passages are shown as they came."
    )
    _add(header, "p", drawn)
    nav = _add(body, "nav")
    for label, choices in (("Verdict", verdicts), ("Set", names)):
        row = _add(nav, "div", role="group", **{"aria-label": label})
        for identity, name in choices.items():
            _add(row, "label", name, **{"for": identity})
    main = _add(body, "main")
    main.append(_figures(sets))
    for number, answer in picked:
        main.append(_article(number, answer))
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
    style = (files("rlsys.apps.evaluation") / "static" / "samples.css").read_text(encoding="utf-8")
    _add(head, "style").text = f"\n{style}{_filter_rules(sets)}"  # No text of others: what is in here is not escaped.
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
            cell = _add(row, "td", f"{share.mean * 100:.1f}")
            _add(cell, "small", f"{share.low * 100:.1f}-{share.high * 100:.1f}")
        _add(row, "td", f"{one.searches:.2f}")
        _add(row, "td", f"{one.tokens:.0f}")
    return box


def _article(number: int, one: Answered) -> Tree.Element:
    """One answer and, folded, how it came about."""
    question, trajectory = one.question, one.trajectory
    verdict = RIGHT if one.em == 1 else WRONG
    article = Tree.Element("article", {"class": f"{verdict} set-{number}"})
    meta = _add(article, "p", **{"class": "meta"})
    _add(meta, "strong", verdict)
    facts = [
        title_of(question.data_source),
        question.uid,
        f"answer {trajectory.sample + 1}",
        f"{trajectory.searches} searches",
        f"{one.tokens} tokens",
        f"ended by {trajectory.finish.value}",
    ]
    _add(meta, "span", " · ".join(facts))
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
        _block(details, "model", turn.text)
        if turn.tool_error:
            _block(details, "error", turn.tool_error)
        if turn.observation:
            _block(details, "environment", turn.observation)
    return article


def _block(parent: Tree.Element, kind: str, text: str) -> None:
    """A text of several lines with who wrote it."""
    _add(parent, "p", kind, **{"class": "who"})
    _add(parent, "pre", text.strip("\n"), **{"class": kind})


def _add(parent: Tree.Element, tag: str, text: str = "", /, **attributes: str) -> Tree.Element:
    """A new last child of `parent`. Its text may be anyone's; tags and attributes are this module's own."""
    child = Tree.SubElement(parent, tag, attributes)
    child.text = visible(text)
    return child


def _filter_rules(sets: int) -> str:
    """Rules that hide what is not chosen, for so many sets: their articles have the class `set-N`, their button the id
    `of-N`; verdicts are the classes `right` and `wrong`, the buttons `is-right` and `is-wrong`."""
    hide, show = "{ display: none; }\n", "{ display: block; }\n"
    buttons = ["is-all", "is-right", "is-wrong", "of-all", *(f"of-{number}" for number in range(sets))]
    rules = [_CHOSEN.format(name=name) + _FOCUS.format(name=name) for name in buttons]
    rules += [
        f"#is-{chosen}:checked ~ main article.{other} {hide}" for chosen, other in ((RIGHT, WRONG), (WRONG, RIGHT))
    ]
    rules += [f"#of-{number}:checked ~ main article:not(.set-{number}) {hide}" for number in range(sets)]
    # Nothing is left where no article has both of what is chosen: this is said.
    rules.append(f"main:not(:has(article)) .none {show}")
    for verdict in (RIGHT, WRONG):
        rules.append(f"#is-{verdict}:checked ~ main:not(:has(article.{verdict})) .none {show}")
        rules += [
            f"#is-{verdict}:checked ~ #of-{number}:checked ~ main:not(:has(article.{verdict}.set-{number})) .none {show}"
            for number in range(sets)
        ]
    return "\n" + "".join(rules)
