"""Tests of the check of reward settings before a run, and of the examples in docs/rewards.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlsys.config.compose import typed
from rlsys.config.schema import CompatConfig, JudgeConfig, RewardConfig
from rlsys.orchestrator.rewards.reward import JUDGE, Rewards, check_terms, pure_terms
from tests.support.paths import PROJECT
from tests.support.refusals import refused
from tests.support.written_episodes import TASK, task_of, terms

OWN = "tests.orchestrator.rewards.own_terms"


def problems(config: RewardConfig, **task: Any) -> list[tuple[str, str]]:
    """Return the code and key of each problem."""
    return [(problem.code, problem.key) for problem in check_terms(config, task_of(**task))]


def judged(**settings: Any) -> RewardConfig:
    good = {"url": "http://127.0.0.1:9000/v1", "model": "m"}
    return RewardConfig(terms={"judge": 1.0}, judge=JudgeConfig(**(good | settings)))


def test_defaults_and_every_term_have_no_problem_nor_has_an_unused_judge() -> None:
    assert problems(RewardConfig()) == []
    for name in pure_terms(RewardConfig(), TASK):
        assert problems(terms(**{name: -0.5})) == []
    assert problems(judged()) == problems(terms(**{f"{OWN}.answers": 1.0})) == []
    assert problems(terms(exact_match=1.0, no_such_term=0.0, judge=0.0)) == [], "a weight of 0 takes a term out"
    assert problems(RewardConfig(judge=JudgeConfig(url="?", token_env="RLSYS_NO_SUCH_KEY", prompt=""))) == []


@pytest.mark.parametrize(
    ("config", "code", "key"),
    [
        (terms(exactmatch=1.0), "unknown", "reward.terms.exactmatch"),
        (terms(f1=float("-inf")), "out_of_range", "reward.terms.f1"),
        (terms(exact_match=1.0, search_penalty=0.1), "out_of_range", "reward.terms.search_penalty"),
        (terms(exact_match=1.0, correct_answer=10.0), "conflict", "reward.terms.correct_answer"),
        (terms(**{f"{OWN}.brevity": 1.0}), "unknown", f"reward.terms.{OWN}.brevity"),
        (judged(url=None), "missing", "reward.judge.url"),
        (judged(url="127.0.0.1:9000"), "malformed", "reward.judge.url"),
        (judged(model=" "), "missing", "reward.judge.model"),
        (judged(token_env="RLSYS_NO_SUCH_KEY"), "missing", "reward.judge.token_env"),
        (judged(prompt="{question} {answer}"), "missing", "reward.judge.prompt"),
        (judged(cache_path="no/such/folder/verdicts.jsonl"), "not_found", "reward.judge.cache_path"),
    ],
)
def test_invalid_setting_is_refused_with_its_key(config: RewardConfig, code: Any, key: str) -> None:
    assert problems(config) == [(code, key)]
    with refused(code, key):
        Rewards(config, TASK, CompatConfig())


@pytest.mark.parametrize(
    ("limit", "buffer", "fine"), [(100, 100, True), (100, 101, False), (None, 600, True), (None, 601, False)]
)
def test_overlong_buffer_may_not_exceed_its_limit(limit: int | None, buffer: int, fine: bool) -> None:
    config = RewardConfig(terms={"overlong": -1.0}, overlong_limit=limit, overlong_buffer=buffer)
    found = problems(config, max_total_tokens=1000, max_prompt_tokens=400)
    assert found == [("conflict", "reward.overlong_buffer")] * (not fine)


DOCS = (PROJECT / "docs" / "rewards.md").read_text()
EXAMPLES = re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL)
(MODULE,) = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_of_the_document_is_valid(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = typed(yaml.safe_load(example)["reward"], RewardConfig)
    assert isinstance(config, RewardConfig)
    assert list(check_terms(config, TASK)) == []


def test_every_term_is_in_the_table_of_the_document() -> None:
    described = set(re.findall(r"`(\w+)`", DOCS[DOCS.index("| term |") : DOCS.index("**Normalised**")]))
    assert set(pure_terms(RewardConfig(), TASK)) | {JUDGE} <= described
