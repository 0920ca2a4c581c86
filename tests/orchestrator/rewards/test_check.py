"""Problems of the settings, each in a sentence, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlsys.config.schema import CompatConfig, JudgeConfig, RewardConfig
from rlsys.errors import UserError
from rlsys.orchestrator.rewards.reward import Rewards, check_terms, pure_terms
from tests.orchestrator.rewards.episodes import TASK, task_of, terms

OWN = "tests.orchestrator.rewards.own_terms"


def problems(config: RewardConfig, **task: Any) -> list[str]:
    return list(check_terms(config, task_of(**task)))


def judged(**settings: Any) -> RewardConfig:
    good = {"url": "http://127.0.0.1:9000/v1", "model": "m"}
    return RewardConfig(terms={"judge": 1.0}, judge=JudgeConfig(**(good | settings)))


def test_the_defaults_and_every_term_are_fine() -> None:
    assert problems(RewardConfig()) == []
    for name in pure_terms(RewardConfig(), TASK):
        assert problems(terms(**{name: -0.5})) == []
    assert problems(judged()) == []
    assert problems(terms(**{f"{OWN}.answers": 1.0})) == []


def test_weight_0_takes_a_term_out() -> None:
    assert problems(terms(exact_match=1.0, no_such_term=0.0, judge=0.0)) == []


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (terms(exactmatch=1.0), "reward.terms.exactmatch is not a term: did you mean exact_match?"),
        (terms(search_penality=-0.1), "did you mean search_penalty?"),
        (terms(juge=1.0), "did you mean judge?"),
        (terms(xyz=1.0), "known are exact_match, correct_answer,"),
        (terms(exact_match=float("nan")), "reward.terms.exact_match=nan must be finite"),
        (terms(f1=float("-inf")), "reward.terms.f1=-inf must be finite"),
        (terms(exact_match=1.0, search_penalty=0.1), "reward.terms.search_penalty=0.1 pays for what"),
        (terms(exact_match=1.0, invalid_format=5), "reward.terms.invalid_format=5 pays"),
        (terms(exact_match=1.0, invalid_turns=0.5), "reward.terms.invalid_turns=0.5 pays"),
        (terms(exact_match=1.0, overlong=1.0), "reward.terms.overlong=1 pays"),
        (terms(search_penalty=float("inf")), "reward.terms.search_penalty=inf must be finite"),
        (terms(exact_match=0.0), "every term the weight 0"),
        (terms(exact_match=1.0, correct_answer=10.0), "are one term"),
        (terms(**{f"{OWN}.brevity": 1.0}), "has no function brevity"),
        (judged(url=None), "reward.judge.url=null is not an address"),
        (judged(url="127.0.0.1:9000"), "reward.judge.url=127.0.0.1:9000 is not an address"),
        (judged(model=" "), "reward.judge.model is empty"),
        (judged(token_env="RLSYS_NO_SUCH_KEY"), "reward.judge.token_env=RLSYS_NO_SUCH_KEY is not set"),
        (judged(prompt="{question} {answer}"), "reward.judge.prompt lacks {answers}"),
        (judged(prompt=""), "reward.judge.prompt lacks {question}, {answers}, {answer}"),
        (judged(cache_path="no/such/folder/verdicts.jsonl"), "reward.judge.cache_path="),
        (judged(cache_path="/"), "reward.judge.cache_path=/ cannot be a file"),
    ],
)
def test_a_problem_is_one_sentence(config: RewardConfig, said: str) -> None:
    (problem,) = problems(config)
    assert said in problem
    assert problem.endswith((".", "?"))
    with pytest.raises(UserError) as error:
        Rewards(config, TASK, CompatConfig())
    assert str(error.value) == problem


def test_a_judge_that_is_not_used_is_not_checked() -> None:
    assert problems(RewardConfig(judge=JudgeConfig(url="?", token_env="RLSYS_NO_SUCH_KEY", prompt=""))) == []


@pytest.mark.parametrize(
    ("limit", "buffer", "fine"), [(100, 100, True), (100, 101, False), (None, 600, True), (None, 601, False)]
)
def test_an_overlong_buffer_fits_its_limit(limit: int | None, buffer: int, fine: bool) -> None:
    config = RewardConfig(terms={"overlong": -1.0}, overlong_limit=limit, overlong_buffer=buffer)
    found = problems(config, max_total_tokens=1000, max_prompt_tokens=400)
    assert [problem.startswith(f"reward.overlong_buffer={buffer} is larger") for problem in found] == [True] * (
        not fine
    )


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    config = judged(model="", prompt="{question}", cache_path=str(tmp_path))
    config.terms |= {"nothing": float("inf"), f"{OWN}.NUMBER": 1.0}
    assert len(problems(config)) == 6
