"""Tests of held-out evaluation: its metrics, result files and HTML page, and scores with the quirks of Search-R1."""

import asyncio
import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from rlsys.apps.evaluation.results import (
    ANSWERS,
    PAGE,
    PARTIAL,
    POLICY,
    RESULTS,
    average,
    noting,
    render_page,
    summarise,
    write_results,
)
from rlsys.config.schema import CompatConfig, EvalConfig, RunConfig, SourceConfig, TaskConfig
from rlsys.data.question import Question
from rlsys.data.trajectory import Action, Finish, Trajectory
from rlsys.observe import status
from rlsys.orchestrator.evaluation.heldout import (
    Answered,
    Evaluation,
    answer_line,
    evaluate,
    heldout_questions,
    heldout_score,
)
from rlsys.orchestrator.evaluation.scores import bootstrap, wilson
from rlsys.rollout.tools.interface import named_tools
from tests.support.answers import SEARCH, answered, asked, turn
from tests.support.jsonl import read_rows
from tests.support.refusals import refused
from tests.support.trajectories import trajectory
from tests.support.written_episodes import episode, question, task_of

QUESTIONS = [
    Question("q:1", "?", ("The Nile", "Nil"), extra={"hops": 1}),
    Question("q:2", "?", ("Paris",), extra={"hops": 2}),
    Question("q:3", "?", ("Lyon",), extra={"hops": 2}),
    Question("q:4", "?", ("42",)),
]
EPISODES = {
    "q:1": trajectory(uid="q:1", turns=[SEARCH, turn(Action.ANSWER, "the nile.")]),
    "q:2": trajectory(uid="q:2", turns=[SEARCH, SEARCH, turn(Action.ANSWER, "Paris")]),
    "q:3": trajectory(uid="q:3", turns=[turn(Action.ANSWER, "Paris")]),
    "q:4": trajectory(uid="q:4", turns=[SEARCH], finish=Finish.TURN_LIMIT),
}


async def ask(question: Question, _sample: int, _temperature: float) -> Trajectory:
    return EPISODES[question.uid]


async def test_figures_of_four_questions() -> None:
    evaluation = await evaluate(QUESTIONS, ask, concurrency=2, step=7)
    row = evaluation.row()
    assert row.pop("figures") == {
        "em": 0.5,
        "f1": 0.5,
        "sub_em": 0.5,
        "finished": 0.75,
        "searches": 1.0,
        "tokens": (6 + 11 + 1 + 5) / 4,
        "em_hop_1": 1.0,
        "em_hop_2": 0.5,
    }
    hops = {"1": 1.0, "2": 0.5}
    assert row == {"step": 7, "questions": 4, "em": 0.5, "em_by_hop": hops, "searches": 1.0, "finished": 0.75}
    assert [one.em for one in evaluation.answered] == [1.0, 1.0, 0.0, 0.0]
    sources = [replace(one, data_source=name) for one, name in zip(QUESTIONS, "bbaa", strict=True)]
    figures = (await evaluate(sources, ask, concurrency=4)).metrics()
    assert {key: figures[key] for key in figures if "/" in key} == {"em/b": 1.0, "em/a": 0.0}


async def test_answers_keep_the_order_of_questions_within_the_concurrency() -> None:
    running = most = 0
    ended: list[str] = []
    said: list[str] = []

    async def slow(question: Question, _sample: int, _temperature: float) -> Trajectory:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(20 if question.uid == "q:1" else 1):
            await asyncio.sleep(0)
        running -= 1
        ended.append(question.uid)
        return EPISODES[question.uid]

    with status.reported_to(lambda _stage, text: said.append(text)):
        evaluation = await evaluate(QUESTIONS, slow, concurrency=3)
    assert ended != [one.question.uid for one in evaluation.answered] == ["q:1", "q:2", "q:3", "q:4"]
    assert most == 3
    assert said == [f"evaluates {number}/4 questions" for number in (0, 1, 2, 3, 4)]


async def test_every_question_is_asked_for_each_sample_and_every_answer_noted() -> None:
    calls: list[tuple[str, int, float]] = []
    noted: list[Answered] = []

    async def drawn(question: Question, sample: int, temperature: float) -> Trajectory:
        calls.append((question.uid, sample, temperature))
        return EPISODES[question.uid]

    evaluation = await evaluate(QUESTIONS[:2], drawn, 8, samples=3, temperature=0.5, note=noted.append)
    assert calls == [(uid, sample, 0.5) for uid in ("q:1", "q:2") for sample in range(3)]
    assert [(one.question.uid, one.trajectory) for one in noted] == [(uid, EPISODES[uid]) for uid, _, _ in calls]
    assert evaluation.row()["questions"] == 2
    assert [len(answers) for answers in evaluation.by_question.values()] == [3, 3]


FIRST = [
    answered(asked(1, "Nile", hops=1), "the Nile", 0, SEARCH),
    answered(asked(2, "Nile", hops=2), "River Nile", 0, SEARCH, SEARCH),
    answered(asked(3, "Nile", hops=2), None),
    answered(asked(4, "Nile", hops=2), "Congo"),
]
SECOND = [answered(asked(5, "Lyon", source="2wikimultihopqa"), "Lyon")]


def test_every_set_has_its_figures_and_equal_weight_in_the_average() -> None:
    sets = summarise(Evaluation(0, (*FIRST, *SECOND)))
    first, second = sets
    assert (first.name, first.questions, first.answers) == ("nq", 4, 4)
    assert first.em == wilson(1, 4)
    assert first.f1 == bootstrap([1.0, 2 / 3, 0.0, 0.0])
    assert first.sub_em == wilson(2, 4)
    assert first.finished == wilson(3, 4)
    assert (first.searches, first.tokens) == (0.75, (8 + 13 + 0 + 3) / 4)
    assert (second.name, second.em, second.tokens) == ("2wikimultihopqa", wilson(1, 1), 3.0)
    assert [(one.name, one.questions, one.em) for one in first.by_hop] == [
        ("1", 1, wilson(1, 1)), ("2", 3, wilson(0, 3)),
    ]  # fmt: skip
    assert second.by_hop == ()
    mean = average(sets)
    assert (mean.em.mean, mean.searches) == pytest.approx(((0.25 + 1.0) / 2, 0.375))
    assert (mean.questions, mean.answers) == (5, 5)


def test_several_answers_to_a_question_count_as_one_mean() -> None:
    answers = [
        answered(question, said, sample)
        for question, row in ((asked(1, "a1"), ["a1", "x", "a1", "x"]), (asked(2, "b2"), ["x", "x", "x", "x"]))
        for sample, said in enumerate(row)
    ]
    (one,) = summarise(Evaluation(0, tuple(answers)))
    assert (one.questions, one.answers) == (2, 8)
    assert one.em == bootstrap([0.5, 0.0])
    assert list(one.pass_at) == [1, 2, 4]
    assert [value.mean for value in one.pass_at.values()] == pytest.approx([0.25, (1 - 1 / 6) / 2, 0.5])


def config(path: Path = Path("none"), **compat: object) -> RunConfig:
    return RunConfig(task=TaskConfig(eval_path=str(path)), compat=CompatConfig(**compat))  # type: ignore[arg-type]


def test_the_last_partial_batch_is_left_out_only_under_the_quirk(tmp_path: Path) -> None:
    file = tmp_path / "heldout.jsonl"
    file.write_text("".join(json.dumps({"question": f"Q{n}?", "golden_answers": ["a"]}) + "\n" for n in range(7)))
    assert len(heldout_questions(config(file))) == 7
    for batch, asked_for in ((1, 7), (2, 6), (7, 7)):
        assert len(heldout_questions(config(file, validation_batch=batch))) == asked_for
    with refused("conflict", "compat.validation_batch"):
        heldout_questions(config(file, validation_batch=8))


@pytest.mark.parametrize(
    ("written", "gold", "plain", "quirky"),
    [
        ("<answer>Bamako</answer>", "Bamako", 1.0, 1.0),
        ("I do not know.", "Beijing", 0.0, 1.0),
        ("<answer>Bamako</answer>", "Beijing", 0.0, 0.0),
    ],
)
def test_the_prompts_example_counts_only_under_the_quirk(written: str, gold: str, plain: float, quirky: float) -> None:
    """`answer_over_prompt` reads the whole text, so an episode without an answer gets the prompt's example answer."""
    prompt = "put it between <answer> and </answer>, like <answer> Beijing </answer>. Question: ...?"
    about, done = question(gold, prompt=prompt), episode(written, task=task_of(max_turns=0))
    assert heldout_score(config())(done, about).em == plain
    assert heldout_score(config(answer_over_prompt=True))(done, about).em == quirky


def test_held_out_questions_of_sources_are_reported_by_source(tmp_path: Path) -> None:
    """Both rows name the same data set. The limit counts for each file, and tools are those of the source."""
    row = json.dumps({"question": "Q?", "golden_answers": ["7"], "data_source": "sets"}) + "\n"
    (tmp_path / "test.jsonl").write_text(2 * row)
    calculator = named_tools(["rlsys.rollout.tools.calculator.Calculator"])
    own = SourceConfig(eval_path=str(tmp_path / "test.jsonl"), tools=calculator)
    sources = {"wiki": replace(own, tools=None), "sums": own, "unasked": SourceConfig()}
    settings = RunConfig(task=TaskConfig(sources=sources), eval=EvalConfig(limit=1))
    questions = heldout_questions(settings)
    assert [(one.uid, one.source) for one in questions] == [("wiki/test:1", "wiki"), ("sums/test:1", "sums")]
    wrong = episode("<answer>no</answer>")
    called = episode(("<calculator>3 + 4</calculator>", "7"), "<answer>7</answer>", tools={"calculator": "calculator"})
    score = heldout_score(settings)
    given = [Answered(one, said, score(said, one)) for one, said in zip(questions, (wrong, called), strict=True)]
    found = Evaluation(0, tuple(given)).metrics()
    assert (found["em"], found["em/wiki"], found["em/sums"]) == (0.5, 0.0, 1.0)
    assert [json.loads(answer_line(one))["set"] for one in given] == ["wiki", "sums"]


def test_an_answer_after_a_call_of_a_tool_counts() -> None:
    settings = config()
    settings.task.tools = named_tools(["rlsys.rollout.tools.calculator.Calculator"])
    given = episode(("<calculator>3 + 4</calculator>", "7"), "<answer>7</answer>", tools={"calculator": "calculator"})
    assert heldout_score(settings)(given, question("7")).em == 1.0


EVALUATION = Evaluation(
    0,
    (
        answered(asked(1, "Nile", source="2wikimultihopqa", text="Which?", hops=1), "the Nile", 0, SEARCH),
        answered(asked(2, "Lyon", source="2wikimultihopqa", hops=2), None),
        answered(asked(3, "é", source="own[bold]"), "\ud800 é"),
    ),
)


def test_the_result_files_hold_questions_answers_and_figures(tmp_path: Path) -> None:
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
    rows = read_rows(tmp_path / ANSWERS)
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


def page_of(*answers: Answered) -> str:
    evaluation = Evaluation(0, answers)
    return render_page(evaluation, summarise(evaluation), 20, seed=1)


def with_text(text: str) -> Answered:
    """Return an answer with `text` in every field that untrusted sources fill."""
    found = turn(Action.SEARCH, text, text, error=text, text=text)
    return answered(Question(text, text, (text, "x"), text, {"hops": text}, text), text, 0, found)


def test_untrusted_text_never_becomes_markup() -> None:
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
