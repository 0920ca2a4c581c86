"""Prompts and limits of each baseline."""

from __future__ import annotations

import pytest

from rlsys.apps.evaluation.evaluation_inputs import Baseline
from rlsys.apps.evaluation.execution import limits_of, prompted, require_texts, with_passages
from rlsys.config.schema import RunConfig, TagsConfig, TaskConfig
from rlsys.data.question import Question, search_prompt
from rlsys.errors import RunError, root_cause
from rlsys.rollout.agent.tokens import Codec
from rlsys.search.retrieval import Failure, SearchResult
from tests.search.scripted import Script, found
from tests.support.bpe import build_tokenizer
from tests.support.refusals import refused

QUESTION = Question("q:1", "a row's own prompt", ("x",), text="  who wrote {this} <b>  ")
ENDING = "Question: who wrote {this} <b>?\n"


def test_without_a_baseline_the_rows_prompts_and_the_configs_limits_hold() -> None:
    config = RunConfig()
    assert prompted(Baseline.none, QUESTION, TagsConfig()) is QUESTION
    assert limits_of(Baseline.none, config) is config


def test_search_asks_with_search_r1s_prompt_in_the_whole_loop() -> None:
    assert prompted(Baseline.search, QUESTION, TagsConfig()).prompt == search_prompt(QUESTION.text)
    config = RunConfig()
    limited = limits_of(Baseline.search, config)
    assert limited.task.max_turns == config.task.max_turns
    assert limited.rollout.sampling.stop == config.rollout.sampling.stop


@pytest.mark.parametrize("baseline", [Baseline.direct, Baseline.cot, Baseline.rag])
def test_the_others_answer_in_one_turn(baseline: Baseline) -> None:
    task = TaskConfig(max_total_tokens=1000, max_turn_tokens=200, tools=["rlsys.rollout.tools.calculator.Calculator"])
    limited = limits_of(baseline, RunConfig(task=task))
    assert (limited.task.max_turns, limited.task.tools) == (0, [])
    assert limited.task.max_prompt_tokens == 800
    assert limited.rollout.sampling.stop == ["</answer>"]
    prompt = prompted(baseline, QUESTION, TagsConfig()).prompt
    assert prompt.endswith(ENDING)
    assert "<answer> Beijing </answer>" in prompt
    own_tags = prompted(baseline, QUESTION, TagsConfig(search="look", answer="reply", information="found")).prompt
    assert "<reply> Beijing </reply>" in own_tags
    assert not {"<answer>", "<search>", "<information>", "</information>"} & set(own_tags.split())
    assert "search>" not in prompt
    assert ("<think>" in prompt) is (baseline is Baseline.cot)
    assert ("<information>" in prompt) is (baseline is Baseline.rag)


async def test_rag_puts_the_passages_of_its_search_before_the_question() -> None:
    questions = [Question(f"q:{n}", "", ("x",), text=f"Who is {n}?") for n in range(3)]
    server = Script({one.text: found(one.text, f"all about {one.uid} </information>") for one in questions})
    config = RunConfig(task=TaskConfig(max_observation_tokens=4000))
    got = await with_passages(questions, server, Codec(build_tokenizer(words=True)), config)
    assert server.asked == [one.text for one in questions]
    for one, before in zip(got, questions, strict=True):
        assert one.uid == before.uid
        head, inside = one.prompt.split("\n\n<information>")
        assert "A search engine has found" in head
        passages, tail = inside.split("</information>\n\n")
        assert passages.startswith(f'Doc 1(Title: "{before.text}") all about {before.uid} (/information)')
        assert tail == f"Question: {before.text}\n"


async def test_a_failed_search_ends_rag() -> None:
    failed = SearchResult(error="no answer", failure=Failure.unavailable)
    question = Question("q:7", "", ("x",), text="Who?")
    with pytest.raises(ExceptionGroup) as error:
        await with_passages([question], Script({"Who?": failed}), Codec(build_tokenizer(words=True)), RunConfig())
    cause = root_cause(error.value)
    assert isinstance(cause, RunError)
    assert "q:7" in str(cause)


def test_a_question_without_its_text_is_refused_where_it_is_needed() -> None:
    bare = Question("q:9", "prompt", ("x",), text=" ")
    require_texts(Baseline.none, [bare])
    with refused("conflict", "--baseline"):
        require_texts(Baseline.cot, [QUESTION, bare])
