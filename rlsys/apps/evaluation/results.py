"""Writes the files of an evaluation: results.json (metrics and settings), answers.jsonl (all answers), samples.html.

Contract: files are written atomically, `results.json` last. Until then finished answers are in `answers.partial.jsonl`.
Text of a model, the web or a data set is untrusted: control characters and bidi marks are spelled out, and the
serialiser escapes HTML. The page has no script, and its content security policy allows none; its filters are radio
buttons and CSS.

The average over sets weighs every set equally, like "Avg." in papers. Intervals treat the question as the unit: several
answers to a question are averaged first, because they are not independent.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any
from xml.etree import ElementTree as Tree

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlsys.apps.evaluation.evaluation_inputs import EvaluationInputs, EvaluationMethod, title_of
from rlsys.config.compose import as_dict
from rlsys.files import json_safe, sha256_of, write_atomically
from rlsys.observe.environment import environment
from rlsys.observe.samples import visible
from rlsys.orchestrator.evaluation.heldout import Answered, Evaluation, answer_line
from rlsys.orchestrator.evaluation.scores import LEVEL, Estimate, estimate, mean_of, pass_at

UNNAMED = "questions"
"""Set name for questions that name no set."""


@dataclass(frozen=True, slots=True)
class SetFigures:
    """Metrics of one set, or of the average of several; scores, searches and tokens are means per answer."""

    name: str
    questions: int
    answers: int
    em: Estimate
    f1: Estimate
    sub_em: Estimate
    finished: Estimate
    """Share of episodes that ended with an answer."""
    searches: float
    tokens: float
    search_errors: int
    """Total number of failed searches."""
    pass_at: Mapping[int, Estimate] = field(default_factory=dict)
    """k -> probability that at least one of k answers is right; empty with one answer per question."""
    by_hop: tuple[SetFigures, ...] = ()
    """Metrics for each number of hops, which is their `name`; empty unless the questions differ in their number of
    hops."""


def summarise(evaluation: Evaluation) -> list[SetFigures]:
    """Return the metrics of every set, in the order of the questions."""
    return [_figures(name or UNNAMED, part) for name, part in evaluation.by_source.items()]


def average(sets: Sequence[SetFigures]) -> SetFigures:
    """Return the unweighted mean over sets; counts are sums."""
    columns: dict[str, Any] = {
        field.name: [getattr(figures, field.name) for figures in sets] for field in fields(SetFigures)
    }
    sums: dict[str, Any] = {name: sum(columns[name]) for name in ("questions", "answers", "search_errors")}
    means: dict[str, Any] = {name: mean_of(columns[name]) for name in ("em", "f1", "sub_em", "finished")}
    means |= {name: fmean(columns[name]) for name in ("searches", "tokens")}
    shared = sorted(set.intersection(*map(set, columns["pass_at"])))
    return SetFigures(
        name="average", **sums, **means, pass_at={k: mean_of([of[k] for of in columns["pass_at"]]) for k in shared}
    )


def overall(sets: Sequence[SetFigures]) -> list[SetFigures]:
    """Return the rows that a table has below the rows of `sets`: the average if there are several sets, else none."""
    return [average(sets)] if len(sets) > 1 else []


def tries(samples: int) -> list[int]:
    """Return the k of pass@k to report for `samples` answers per question: 1, 2, 4, ... and `samples`."""
    if samples == 1:
        return []
    return [2**power for power in range((samples - 1).bit_length())] + [samples]


def _figures(name: str, part: Evaluation, *, split: bool = True) -> SetFigures:
    questions = list(part.by_question.values())
    hops = part.by_hop if split else {}
    samples = min(map(len, questions))

    def mean(value: Callable[[Answered], float]) -> Estimate:
        return estimate([fmean(map(value, answers)) for answers in questions])

    def passed(k: int) -> Estimate:
        return estimate([pass_at(k, len(answers), sum(one.em == 1 for one in answers)) for answers in questions])

    return SetFigures(
        name=name,
        questions=len(questions),
        answers=len(part.answered),
        em=mean(lambda one: one.em),
        f1=mean(lambda one: one.scores.f1),
        sub_em=mean(lambda one: one.scores.sub_em),
        finished=mean(lambda one: one.finished),
        searches=part.searches,
        tokens=fmean(one.tokens for one in part.answered),
        search_errors=sum(one.search_errors for one in part.answered),
        pass_at={k: passed(k) for k in tries(samples)},
        by_hop=tuple(_figures(hop, of_hop, split=False) for hop, of_hop in hops.items()) if len(hops) > 1 else (),
    )


def render_table(sets: Sequence[SetFigures]) -> RenderableType:
    """Return tables of 80 columns: scores by set, by hops and on average, and pass@k.

    Shares are in percent, each with its interval below.
    """
    below = overall(sets)
    parts: list[RenderableType] = [_scores(sets, below)]
    if sets[0].pass_at:
        chances = _table("At least one of k right", *(f"pass@{k}" for k in sets[0].pass_at))
        for row in (*sets, *below):
            chances.add_row(Text(visible(title_of(row.name))), *map(_share, row.pass_at.values()))
        parts += [Text(), chances]
    parts.append(Text("scores in percent, with 95 % intervals; the average weighs every set equally", "dim"))
    failed = sum(figures.search_errors for figures in sets)
    if failed:
        parts.append(Text(f"{failed} searches failed: these results do not reflect a fully working search.", "red"))
    return Group(*parts)


def _scores(sets: Sequence[SetFigures], below: Sequence[SetFigures]) -> Table:
    table = _table("", "questions", "EM", "F1", "sub-EM", "finished", "searches", "tokens")

    def add(row: SetFigures, title: str, style: str = "") -> None:
        name = Text(visible(title), overflow="fold")
        shares = [_share(value) for value in (row.em, row.f1, row.sub_em)]
        finished, per_answer = _percent(row.finished.mean), (f"{row.searches:.2f}", f"{row.tokens:.0f}")
        table.add_row(name, str(row.questions), *shares, finished, *per_answer, style=style)

    for row in sets:
        add(row, title_of(row.name))
        for hop in row.by_hop:
            add(hop, f"  {hop.name} {'hop' if hop.name == '1' else 'hops'}", "dim")
    for row in below:
        add(row, row.name, "bold")
    return table


def _table(first: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _share(value: Estimate) -> Text:
    interval = f"{_percent(value.low)}-{_percent(value.high)}"
    return Text.assemble(f"{_percent(value.mean)}\n", (interval, "dim"), justify="right")


def _percent(share: float) -> str:
    """Format a share in percent with at most four characters."""
    text = f"{share * 100:.1f}"
    return "100" if text == "100.0" else text


RESULTS, ANSWERS, PAGE = "results.json", "answers.jsonl", "samples.html"
PARTIAL = "answers.partial.jsonl"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
RIGHT, WRONG = "right", "wrong"


def write_results(
    evaluation: Evaluation, out: Path, settings: Mapping[str, Any], shown: int, seed: int
) -> list[SetFigures]:
    """Write the three files to `out` and return the metrics of every set.

    The page shows at most `shown` right and as many wrong answers per set. `settings`: see `settings_of`.
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


def settings_of(inputs: EvaluationInputs, method: EvaluationMethod, started: float, ended: float) -> dict[str, Any]:
    """Return the `settings` for results.json; `started` and `ended` are in seconds since the epoch."""
    model, asked = inputs.model, inputs.config.eval
    return {
        "config": as_dict(inputs.config),
        "model": str(model.folder),
        "original": None if model.original is None else str(model.original),
        "step": model.step,
        "data": [{"set": of.label, "path": str(of.path), "sha256": sha256_of(of.path)} for of in inputs.sources],
        "limit": asked.limit,
        **asdict(method),
        "samples": asked.samples,
        "temperature": asked.temperature,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(started)),
        "seconds": round(ended - started, 1),
    }


@contextmanager
def noting(out: Path) -> Iterator[Callable[[Answered], None]]:
    """Yield a function that appends an answer to `answers.partial.jsonl` in `out` immediately."""
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
    """Return the page, with at most `shown` right and as many wrong answers per set, sampled with `seed`."""
    parts = enumerate(evaluation.by_source.values())
    picked = [(number, answer) for number, part in parts for answer in _pick(part.answered, shown, Random(seed))]
    verdicts = {f"is-{name}": name for name in ("all", RIGHT, WRONG)}
    names = {"of-all": "all sets"} | {f"of-{number}": title_of(one.name) for number, one in enumerate(sets)}
    page = Tree.Element("html", {"lang": "en"})
    head = _add(page, "head")
    _add(head, "meta", charset="utf-8")
    _add(head, "meta", **{"http-equiv": "Content-Security-Policy", "content": POLICY})
    _add(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    _add(head, "title", "Answers of an evaluation")
    style = (files("rlsys.apps.evaluation") / "static" / "samples.css").read_text(encoding="utf-8")
    _add(head, "style").text = f"\n{style}{_filter_rules(len(sets))}"  # Not escaped: CSS holds no untrusted text.
    body = _add(page, "body")
    for group, choices in (("verdict", verdicts), ("set", names)):
        for identity in choices:
            first = {"checked": "checked"} if identity == next(iter(choices)) else {}
            _add(body, "input", type="radio", name=group, id=identity, **first)
    header = _add(body, "header")
    _add(header, "h1", "Answers")
    drawn = (
        f"{len(picked)} of {len(evaluation.answered)} answers: a random sample of at most {shown} right and {shown} wrong "
        "ones per set. Answers and passages are unedited."
    )
    _add(header, "p", drawn)
    nav = _add(body, "nav")
    for label, choices in (("Verdict", verdicts), ("Set", names)):
        row = _add(nav, "div", role="group", **{"aria-label": label})
        for identity, name in choices.items():
            _add(row, "label", name, **{"for": identity})
    main = _add(body, "main")
    main.append(_figures_element(sets))
    for number, answer in picked:
        main.append(_article(number, answer))
    _add(main, "p", "No answer matches the filters.", **{"class": "none"})
    return f"<!doctype html>\n{Tree.tostring(page, encoding='unicode', method='html')}\n"


def _pick(answered: Sequence[Answered], most: int, draws: Random) -> Iterable[Answered]:
    """Sample at most `most` right and as many wrong answers; keep their order."""
    picked: set[int] = set()
    for right in (True, False):
        places = [place for place, one in enumerate(answered) if (one.em == 1) is right]
        picked |= set(draws.sample(places, min(most, len(places))))
    return [answered[place] for place in sorted(picked)]


def _figures_element(sets: Sequence[SetFigures]) -> Tree.Element:
    """Return the table of all sets."""
    box = Tree.Element("div", {"class": "figures"})
    table = _add(box, "table")
    _add(table, "caption", "Scores in percent, with 95 % intervals.")
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
    """Return one answer with its folded episode."""
    question, trajectory = one.question, one.trajectory
    verdict = RIGHT if one.em == 1 else WRONG
    article = Tree.Element("article", {"class": f"{verdict} set-{number}"})
    meta = _add(article, "p", **{"class": "meta"})
    _add(meta, "strong", verdict)
    facts = [title_of(question.set_name), question.uid, f"answer {trajectory.sample + 1}"]
    facts += [f"{trajectory.searches} searches", f"{one.tokens} tokens", f"ended by {trajectory.finish.value}"]
    _add(meta, "span", " · ".join(facts))
    _add(article, "h2", question.text or question.prompt.strip())
    pairs = _add(article, "dl")
    answered = "nothing" if trajectory.answer is None else trajectory.answer
    terms = {"answered": answered, "accepted": "\n".join(question.answers), "F1": f"{one.scores.f1:.2f}"}
    for term, text in terms.items():
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
    """Add a text block, labelled with its author `kind`."""
    _add(parent, "p", kind, **{"class": "who"})
    _add(parent, "pre", text.strip("\n"), **{"class": kind})


def _add(parent: Tree.Element, tag: str, text: str = "", /, **attributes: str) -> Tree.Element:
    """Append a child to `parent`. `text` may be untrusted; tag and attributes must not be."""
    child = Tree.SubElement(parent, tag, attributes)
    child.text = visible(text)
    return child


def _filter_rules(sets: int) -> str:
    """Return CSS rules that hide articles which the filters exclude.

    Sets: article class `set-N`, button id `of-N`. Verdicts: article classes `right` and `wrong`, button ids `is-right` and
    `is-wrong`.
    """
    hide, show = "{ display: none; }\n", "{ display: block; }\n"
    buttons = ["is-all", "is-right", "is-wrong", "of-all", *(f"of-{number}" for number in range(sets))]
    chosen = "{ background: var(--text); color: var(--back); border-color: var(--text); }\n"
    focus = "{ outline: 2px solid var(--accent); outline-offset: 2px; }\n"
    states = {"checked": chosen, "focus-visible": focus}
    rules = [f"#{name}:{state} ~ nav label[for={name}] {style}" for name in buttons for state, style in states.items()]
    rules += [
        f"#is-{RIGHT}:checked ~ main article.{WRONG} {hide}",
        f"#is-{WRONG}:checked ~ main article.{RIGHT} {hide}",
    ]
    rules += [f"#of-{number}:checked ~ main article:not(.set-{number}) {hide}" for number in range(sets)]
    # Show the message if no article matches both filters.
    rules.append(f"main:not(:has(article)) .none {show}")
    for verdict in (RIGHT, WRONG):
        rules.append(f"#is-{verdict}:checked ~ main:not(:has(article.{verdict})) .none {show}")
        rules += [
            f"#is-{verdict}:checked ~ #of-{number}:checked ~ main:not(:has(article.{verdict}.set-{number})) .none {show}"
            for number in range(sets)
        ]
    return "\n" + "".join(rules)
