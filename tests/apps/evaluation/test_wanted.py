"""An evaluation's needs, and problems of a config that do not matter to it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from rlsys.apps.evaluation.evaluation_inputs import Baseline, EvaluationInputs, find_inputs
from rlsys.config.compose import load_config
from rlsys.config.schema import RunConfig
from rlsys.errors import RunError, UserError
from tests.support.tiny_models import POLICY

DEAD = "http://127.0.0.1:9"


@pytest.fixture
def own(tmp_path: Path) -> str:
    file = tmp_path / "own.jsonl"
    file.write_text("{}\n")
    return str(file)


def config_of(*overrides: str) -> RunConfig:
    """The config of a run that has neither questions nor a model nor an index."""
    nothing = ["task.train_path=none", "task.eval_path=none", "model.path=none", "search.index=none"]
    return load_config("searchr1_tiny_cpu", [*nothing, *overrides])


async def want(
    config: RunConfig, *names: str, baseline: Baseline = Baseline.direct, model: Path | None = POLICY
) -> EvaluationInputs:
    return await find_inputs(config, baseline, names, Path("data"), model, None)


async def problems_of(config: RunConfig, *names: str, **flags: object) -> list[str]:
    with pytest.raises(UserError) as caught:
        await want(config, *names, **flags)  # type: ignore[arg-type]
    return str(caught.value).splitlines()


async def test_training_files_and_values_that_flags_replace_may_be_missing(own: str) -> None:
    config = config_of("search.topk=0")
    before = copy.deepcopy(config)
    wanted = await want(config, own)
    assert [source.path for source in wanted.sources] == [Path(own)]
    assert wanted.model.folder == POLICY
    assert wanted.config.model.path == str(POLICY)
    assert config == before, "the caller's config is his own"


async def test_the_configs_own_questions_and_model_must_be_there() -> None:
    lines = await problems_of(config_of(), model=None)
    assert [line.partition(" ")[0] for line in lines] == ["model.path=none", "task.eval_path=none"]


async def test_a_baseline_that_searches_needs_a_search_that_can_work(own: str) -> None:
    lines = await problems_of(config_of("search.topk=0"), own, baseline=Baseline.rag)
    assert [line.partition(" ")[0] for line in lines] == ["search.topk=0", "search.index=none"]


async def test_a_baseline_that_searches_is_refused_without_a_search(own: str) -> None:
    off = config_of("search.enabled=false", "task.invalid_message=no")
    (line,) = await problems_of(off, own, baseline=Baseline.search)
    assert line.startswith("--baseline search")
    await want(off, own, baseline=Baseline.none)


async def test_a_server_is_asked_unless_its_settings_are_wrong(own: str) -> None:
    with pytest.raises(RunError, match=DEAD):
        await want(config_of(f"search.url={DEAD}"), own, baseline=Baseline.search)
    lines = await problems_of(config_of(f"search.url={DEAD}", "eval.samples=4"), own, baseline=Baseline.rag)
    assert [("eval.samples" in line, DEAD in line) for line in lines] == [(True, False), (False, True)]
    (line,) = await problems_of(config_of(f"search.url={DEAD}", "search.topk=0"), own, baseline=Baseline.rag)
    assert line.startswith("search.topk=0")
