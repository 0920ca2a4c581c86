"""The examples of docs/rewards.md, as a reader would use them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from rlsys.config.compose import typed
from rlsys.config.schema import CompatConfig, RewardConfig
from rlsys.orchestrator.rewards.reward import JUDGE, Rewards, check_terms, pure_terms
from tests.support.paths import PROJECT
from tests.support.written_episodes import TASK, episode, question, think

DOCS = (PROJECT / "docs" / "rewards.md").read_text()
EXAMPLES = re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL)
(MODULE,) = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)


@pytest.fixture
def my_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


def config_of(example: str) -> RewardConfig:
    config = typed(yaml.safe_load(example)["reward"], RewardConfig)
    assert isinstance(config, RewardConfig)
    return config


@pytest.mark.usefixtures("my_rewards")
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_can_be_used(example: str) -> None:
    assert list(check_terms(config_of(example), TASK)) == []


@pytest.mark.usefixtures("my_rewards")
async def test_the_readers_own_terms_score() -> None:
    rewards = Rewards(config_of(EXAMPLES[-1]), TASK, CompatConfig())
    said = ((think("search", "Mali"), "Bamako"), think("answer", "Bamako"))
    result = await rewards.score(question("Bamako"), episode(*said))
    empty = await rewards.score(question("Bamako"), episode())
    await rewards.close()
    assert empty.turn_rewards == (0.05,)
    assert result.turn_rewards == pytest.approx((0.0, 1.0 + 0.05 / 7))


def test_every_term_is_described() -> None:
    described = set(re.findall(r"`(\w+)`", DOCS[DOCS.index("| term |") : DOCS.index("**Normalised**")]))
    assert set(pure_terms(RewardConfig(), TASK)) | {JUDGE} <= described
