"""The prompt source: epochs, seeds and positions."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.data.question import PromptSource, Question, SourceState

SIZE = st.integers(1, 20)
SEED = st.integers(0, 10**6)
STEPS = st.lists(st.integers(0, 30), max_size=12)


def questions(count: int) -> list[Question]:
    return [Question(f"q:{number}", "?", ("yes",)) for number in range(count)]


def take(source: PromptSource, count: int) -> list[Question]:
    return [source.next() for _ in range(count)]


def uids(taken: list[Question]) -> list[str]:
    return [question.uid for question in taken]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    source = PromptSource(questions(30), seed=1)
    orders = (take(source, 30), take(source, 30), take(PromptSource(questions(30), seed=2), 30), questions(30))
    assert len({tuple(uids(order)) for order in orders}) == 4


@given(SIZE, SEED, STEPS)
@settings(max_examples=50)
def test_every_epoch_hands_out_each_question_once(size: int, seed: int, steps: list[int]) -> None:
    source = PromptSource(questions(size), seed)
    taken = [uid for count in steps for uid in uids(take(source, count))]
    assert len(taken) == source.position == sum(steps)
    for start in range(0, len(taken), size):
        epoch = taken[start : start + size]
        assert len(set(epoch)) == len(epoch)


@given(SIZE, SEED, STEPS, st.integers(0, 60))
@settings(max_examples=50)
def test_a_position_is_all_that_is_needed_to_go_on(size: int, seed: int, steps: list[int], ahead: int) -> None:
    first = PromptSource(questions(size), seed)
    for count in steps:
        take(first, count)
    second = PromptSource(questions(size), seed, SourceState(first.position, ()))
    assert uids(take(first, ahead)) == uids(take(second, ahead))


@given(SIZE, SEED, st.lists(st.booleans(), max_size=40))
@settings(max_examples=50)
def test_questions_given_back_come_again_before_new_ones(size: int, seed: int, returns: list[bool]) -> None:
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


def test_a_resumed_source_asks_again_what_was_given_back() -> None:
    first = PromptSource(questions(5), seed=3)
    early = take(first, 3)
    first.give_back(early[2])
    first.give_back(early[0])
    state = first.state()
    second = PromptSource(questions(5), 3, state)
    assert second.state() == state == SourceState(3, (early[2], early[0]))
    assert uids(take(second, 4)) == uids([early[2], early[0], *take(first, 4)[2:]])
    assert state == SourceState(3, (early[2], early[0])), "a state is of its moment"


def test_a_question_that_is_in_the_file_no_more_is_asked_again_all_the_same() -> None:
    first = PromptSource(questions(5), seed=3)
    first.give_back(gone := first.next())
    second = PromptSource([Question("new:1", "?", ("no",))], 3, first.state())
    assert take(second, 1) == [gone]
    assert second.next().uid == "new:1"
