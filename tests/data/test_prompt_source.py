"""Tests of the source of prompts: epochs, questions given back, several sources by weight, and the curriculum."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.config.schema import CurriculumConfig, SourceConfig, TaskConfig
from rlsys.data.prompt_source import PromptSource, SourceState
from rlsys.data.question import Question
from rlsys.data.trajectory import Group
from rlsys.weights.checkpoint.state_file import load_values, save_values
from tests.support.refusals import refused
from tests.support.trajectories import rewarded, trajectory

SIZE = st.integers(1, 20)
SEED = st.integers(0, 10**6)


def questions(count: int) -> list[Question]:
    return [Question(f"q:{number}", "?", ("yes",)) for number in range(count)]


def take(source: PromptSource, count: int) -> list[Question]:
    return [source.next() for _ in range(count)]


def uids(taken: list[Question]) -> list[str]:
    return [question.uid for question in taken]


def test_each_epoch_and_seed_has_a_different_order() -> None:
    source = PromptSource(questions(30), seed=1)
    orders = (take(source, 30), take(source, 30), take(PromptSource(questions(30), seed=2), 30), questions(30))
    assert len({tuple(uids(order)) for order in orders}) == 4


@given(SIZE, SEED, st.integers(0, 60), st.integers(0, 60))
@settings(max_examples=50)
def test_every_epoch_hands_out_each_question_once_also_after_a_resume(
    size: int, seed: int, before: int, after: int
) -> None:
    first = PromptSource(questions(size), seed)
    taken = uids(take(first, before))
    second = PromptSource(questions(size), seed, SourceState(first.position, ()))
    rest = uids(take(second, after))
    assert rest == uids(take(first, after))
    assert second.position == before + after
    for start in range(0, before + after, size):
        epoch = [*taken, *rest][start : start + size]
        assert len(set(epoch)) == len(epoch)


@given(SIZE, SEED, st.lists(st.booleans(), max_size=40))
@settings(max_examples=50)
def test_returned_questions_are_asked_again_before_new_ones(size: int, seed: int, returns: list[bool]) -> None:
    source, untouched = PromptSource(questions(size), seed), PromptSource(questions(size), seed)
    new = []
    for back in returns:
        question = source.next()
        if back:
            source.give_back(question)
            assert source.state().given_back == (question,)
            assert source.next() is question
        new.append(question)
    assert uids(new) == uids(take(untouched, len(returns)))
    assert source.position == len(returns)


def test_a_resumed_source_asks_returned_questions_again() -> None:
    first = PromptSource(questions(5), seed=3)
    early = take(first, 3)
    first.give_back(early[2])
    first.give_back(early[0])
    state = first.state()
    second = PromptSource(questions(5), 3, state)
    assert second.state() == state == SourceState(3, (early[2], early[0]))
    assert uids(take(second, 4)) == uids([early[2], early[0], *take(first, 4)[2:]])
    assert state == SourceState(3, (early[2], early[0])), "a state does not change afterwards"


def test_a_returned_question_is_asked_again_even_if_the_file_has_lost_it() -> None:
    first = PromptSource(questions(5), seed=3)
    first.give_back(gone := first.next())
    second = PromptSource([Question("new:1", "?", ("no",))], 3, first.state())
    assert take(second, 1) == [gone]
    assert second.next().uid == "new:1"


WEIGHTS = st.lists(st.sampled_from([0.1, 0.25, 0.3, 1.0, 1.5, 2.0, 3.0, 7.0]), min_size=1, max_size=6)


def mixed(sizes: Sequence[int]) -> list[Question]:
    """Questions of sources s0, s1, ... of these sizes."""
    counts = enumerate(sizes)
    return [
        Question(f"s{name}/q:{row}", "?", ("yes",), source=f"s{name}") for name, size in counts for row in range(size)
    ]


def task(weights: Sequence[float], curriculum: CurriculumConfig | None = None) -> TaskConfig:
    """A task with sources s0, s1, ... of these weights, whose episodes pass with a reward of at least 1."""
    sources = {f"s{name}": SourceConfig(weight=weight, pass_reward=1.0) for name, weight in enumerate(weights)}
    return TaskConfig(sources=sources, curriculum=curriculum or CurriculumConfig())


def counted(question: Question, passed: int, episodes: int = 4) -> Group:
    """A rewarded group, `passed` of whose episodes passed."""
    return Group(question, tuple(rewarded(trajectory(), float(number < passed)) for number in range(episodes)))


@given(WEIGHTS, SEED, st.integers(0, 150))
@settings(max_examples=40)
def test_every_source_gets_its_share_at_any_time_and_goes_through_its_epochs(
    weights: list[float], seed: int, draws: int
) -> None:
    """Compared with the share by exact arithmetic; the names do not matter to it."""
    sizes = [3 + 2 * number for number in range(len(weights))]
    source = PromptSource(mixed(sizes), seed, task=task(weights))
    shares = {f"s{name}": Fraction(str(weight)) for name, weight in enumerate(weights)}
    total, drawn, taken = sum(shares.values()), Counter[str](), []
    for draw in range(1, draws + 1):
        taken.append(question := source.next())
        drawn[question.source] += 1
        for name, share in shares.items():
            assert abs(drawn[name] - draw * share / total) < 1, (name, draw)
    for name, size in enumerate(sizes):
        own = [question.uid for question in taken if question.source == f"s{name}"]
        for start in range(0, len(own), size):
            epoch = own[start : start + size]
            assert len(set(epoch)) == len(epoch)


@pytest.mark.parametrize("name", ["", "only"])
def test_a_single_source_has_the_order_of_a_file_without_a_name(name: str) -> None:
    """The order is worked out anew: runs of earlier versions must go on with the same questions."""
    rows = [Question(f"q:{row}", "?", ("yes",), source=name) for row in range(7)]
    expected = []
    for epoch in range(3):
        order = list(range(7))
        random.Random(f"5:{epoch}").shuffle(order)
        expected += [rows[row] for row in order]
    assert take(PromptSource(rows, 5, task=TaskConfig(sources={name: SourceConfig()} if name else {})), 21) == expected


def test_sources_of_the_same_size_have_orders_of_their_own() -> None:
    source = PromptSource(mixed([20, 20]), seed=1)
    taken = uids(take(source, 40))
    assert [uid[3:] for uid in taken if uid[1] == "0"] != [uid[3:] for uid in taken if uid[1] == "1"]


CURRICULUM = CurriculumConfig(easy_threshold=0.75, hard_threshold=0.25, factor=0.1, window=2)


class Driven:
    """A source whose questions are drawn, given back and rewarded as a script says."""

    def __init__(self, source: PromptSource, shuffled: Callable[[list[tuple[int, Question]]], None]) -> None:
        """`shuffled` puts the groups of a step in the order in which they end."""
        self.source, self.drawn, self._shuffled = source, list[str](), shuffled

    def step(self, plan: Sequence[tuple[bool, int]], first: int) -> None:
        """Draw and reward a prompt group for each (is given back, episodes that passed); they have numbers from `first`."""
        groups = [(first + place, self.source.next()) for place in range(len(plan))]
        self.drawn += [question.uid for _, question in groups]
        self._shuffled(groups)
        for number, question in groups:
            back, passed = plan[number - first]
            if not back:
                self.source.observe(number, counted(question, passed))
        for number, question in sorted(groups, key=lambda group: group[0]):
            if plan[number - first][0]:
                self.source.give_back(question)
        self.source.end_step()


def through_file(state: SourceState) -> SourceState:
    with TemporaryDirectory() as folder:
        save_values(Path(folder) / "state.npz", state)
        return load_values(Path(folder) / "state.npz", SourceState)


STEP = st.lists(st.tuples(st.sampled_from([False, False, True]), st.integers(0, 4)), min_size=1, max_size=6)


@given(st.lists(STEP, max_size=8), st.integers(0, 8), SEED, st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_draws_depend_neither_on_the_order_of_completions_nor_on_an_interruption(
    steps: list[list[tuple[bool, int]]], cut: int, seed: int, rng: random.Random
) -> None:
    """The second run ends its groups in another order, and is saved and resumed after `cut` steps."""
    weights, rows = task([1.0, 2.0, 0.5], CURRICULUM), mixed([5, 3, 4])
    whole = Driven(PromptSource(rows, seed, task=weights), lambda _: None)
    broken = Driven(PromptSource(rows, seed, task=weights), rng.shuffle)
    for place, plan in enumerate(steps):
        if place == cut:
            saved = through_file(broken.source.state())
            assert saved == broken.source.state()
            resumed = Driven(PromptSource(rows, seed, saved, weights), rng.shuffle)
            resumed.drawn, broken = broken.drawn, resumed
        for one in (whole, broken):
            one.step(plan, 10 * place)
    assert whole.drawn == broken.drawn
    assert whole.source.state() == broken.source.state()


def test_easy_and_hard_sources_are_drawn_less_while_they_are() -> None:
    """Worked out by hand: weights 1 and 1; s0 passes 3 of 4 twice, then 2 of 4 (5/8, below 3/4 again)."""
    source = PromptSource(mixed([9, 9]), 0, task=task([1.0, 1.0], CURRICULUM))
    shares = lambda: [source.metrics()[f"sources/s{name}/share"] for name in (0, 1)]  # noqa: E731
    easy = next(question for question in take(source, 2) if question.source == "s0")
    source.observe(0, counted(easy, 3))
    source.end_step()
    assert shares() == [0.5, 0.5], "one group is less than the window"
    source.observe(1, counted(easy, 3))
    assert shares() == [0.5, 0.5], "groups count from the end of the step"
    source.end_step()
    assert shares() == [1 / 11, 10 / 11]
    assert Counter(question.source for question in take(source, 22)) == {"s0": 2, "s1": 20}
    source.observe(2, counted(easy, 2))
    source.end_step()
    assert shares() == [0.5, 0.5]
    assert Counter(question.source for question in take(source, 10)) == {"s0": 5, "s1": 5}
    for number in (3, 4):
        source.observe(number, counted(easy, 1))
    source.end_step()
    assert shares() == [1 / 11, 10 / 11], "1/4 is hard"


def test_the_state_of_a_curriculum_is_bounded_by_the_window() -> None:
    source = PromptSource(mixed([3, 3]), 0, task=task([1.0, 1.0], CURRICULUM))
    for number in range(40):
        source.observe(number, counted(source.next(), number % 5))
        source.end_step()
    state = source.state()
    assert [len(progress.recent) for progress in state.sources.values()] == [2, 2]
    assert state.uncounted == ()


def test_without_thresholds_nothing_is_kept() -> None:
    source = PromptSource(mixed([3, 3]), 0, task=task([1.0, 1.0]))
    source.observe(0, counted(source.next(), 4))
    source.end_step()
    assert all(not progress.recent for progress in source.state().sources.values())
    assert source.metrics() == {}


@pytest.mark.parametrize(("before", "now"), [([3, 3], [3]), ([3], [3, 3]), ([], [3]), ([3], [])])
def test_a_state_continues_only_with_the_same_sources(before: list[int], now: list[int]) -> None:
    """An empty list stands for a file without sources."""
    state = PromptSource(mixed(before) or questions(3), 0).state()
    with refused("mismatch", "task.sources"):
        PromptSource(mixed(now) or questions(3), 0, state)


def test_other_weights_after_a_resume_hold_from_then_on() -> None:
    """No source catches up on what it would have had."""
    before = PromptSource(mixed([9, 9]), 0, task=task([1.0, 1.0]))
    take(before, 10)
    same, other = (PromptSource(mixed([9, 9]), 0, before.state(), task(weights)) for weights in ([1, 1.0], [3.0, 1.0]))
    assert Counter(question.source for question in take(same, 8)) == {"s0": 4, "s1": 4}
    assert Counter(question.source for question in take(other, 8)) == {"s0": 6, "s1": 2}


def test_another_window_after_a_resume_holds_from_then_on() -> None:
    """4, 4, 2 and 2 of 4 episodes passed: 3/4 of the last four groups, which is easy, and 1/2 of the last two."""
    wide = replace(CURRICULUM, window=4)
    before = PromptSource(mixed([9, 9]), 0, task=task([1.0, 1.0], wide))
    question = next(question for question in take(before, 2) if question.source == "s0")
    for number, passed in enumerate((4, 4, 2, 2)):
        before.observe(number, counted(question, passed))
    before.end_step()
    for curriculum, share in ((wide, 1 / 11), (CURRICULUM, 0.5), (replace(wide, window=5), 0.5)):
        resumed = PromptSource(mixed([9, 9]), 0, before.state(), task([1.0, 1.0], curriculum))
        assert resumed.metrics()["sources/s0/share"] == share, curriculum.window
