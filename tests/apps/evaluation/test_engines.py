"""Whole evaluations of the tiny policy: both engines, baselines, samples, and what goes wrong."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rlsys.apps.evaluation.evaluation_inputs import Baseline, EngineName, How
from rlsys.apps.evaluation.execution import require_its_weights, run_evaluation
from rlsys.config.compose import load_config
from rlsys.config.schema import RunConfig
from rlsys.data.question import Question
from rlsys.errors import RunError, UserError
from tests.support import tiny
from tests.support.refusals import refused
from tests.support.tiny_models import POLICY

TEXTS = ["Singa has which time zone?", "Which continent is Juja on?", "What is the capital of Mali?"]
QUESTIONS = [Question(f"q:{n}", f"Question: {text}\n", ("Africa",), "tiny", text=text) for n, text in enumerate(TEXTS)]
TRANSFORMERS = EngineName.transformers


@pytest.fixture
def server() -> Iterator[tiny.Search]:
    with tiny.search_server() as search:
        yield search


@pytest.fixture
def config(server: tiny.Search, tmp_path: Path) -> RunConfig:
    loaded = load_config("searchr1_tiny_cpu", [f"search.url={server.url}", f"output_dir={tmp_path}"])
    return replace(loaded, model=replace(loaded.model, path=str(POLICY)))


@pytest.mark.slow
@pytest.mark.engine
async def test_both_engines_answer_alike(config: RunConfig) -> None:
    sglang = await run_evaluation(config, QUESTIONS, How())
    transformers = await run_evaluation(config, QUESTIONS, How(TRANSFORMERS))
    assert [one.trajectory.response for one in sglang.answered] == [
        one.trajectory.response for one in transformers.answered
    ]
    assert sglang.metrics() == transformers.metrics()
    assert all(one.trajectory.turns for one in sglang.answered)


async def test_drawn_answers_differ_and_repeat(config: RunConfig) -> None:
    how = How(TRANSFORMERS)
    config = replace(config, eval=replace(config.eval, samples=3, temperature=1.5))
    one, again = (await run_evaluation(config, QUESTIONS[:2], how), await run_evaluation(config, QUESTIONS[:2], how))
    said = [answered.trajectory.response for answered in one.answered]
    assert len(set(said[:3])) > 1
    assert said == [answered.trajectory.response for answered in again.answered]
    assert [answered.trajectory.sample for answered in one.answered] == [0, 1, 2] * 2
    other = await run_evaluation(replace(config, trainer=replace(config.trainer, seed=99)), QUESTIONS[:2], how)
    assert said != [answered.trajectory.response for answered in other.answered]


@pytest.mark.parametrize("baseline", [Baseline.direct, Baseline.rag])
async def test_a_baseline_asks_in_its_way(config: RunConfig, server: tiny.Search, baseline: Baseline) -> None:
    noted: list[str] = []
    evaluation = await run_evaluation(
        config, QUESTIONS, How(TRANSFORMERS, baseline), note=lambda one: noted.append(one.question.uid)
    )
    assert sorted(noted) == [one.uid for one in QUESTIONS]
    for one in evaluation.answered:
        assert one.question.prompt.startswith("Answer the given question")
        if baseline is not Baseline.search:
            assert len(one.trajectory.turns) == 1
    looked_up = set(TEXTS) & set(server.asked)
    assert looked_up == (set(TEXTS) if baseline is Baseline.rag else set())


async def test_a_dead_server_ends_the_evaluation_before_it_begins(config: RunConfig) -> None:
    dead = replace(config, search=replace(config.search, url="http://127.0.0.1:9", retries=0))
    with pytest.raises(RunError, match=r"127\.0\.0\.1:9"):
        await run_evaluation(dead, QUESTIONS, How(TRANSFORMERS, Baseline.rag))


async def test_transformers_refuses_to_draw_from_a_part_of_the_vocabulary(config: RunConfig) -> None:
    sampling = replace(config.rollout.sampling, top_p=0.9)
    odd = replace(
        config,
        compat=replace(config.compat, sampled_validation=True),
        rollout=replace(config.rollout, sampling=sampling),
    )
    with refused("unsupported", "compat.sampled_validation"):
        await run_evaluation(odd, QUESTIONS, How(TRANSFORMERS))


def test_weights_of_another_model_are_refused_before_sglang_makes_them_up(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    require_its_weights(POLICY)
    folder = tmp_path / "other"
    shutil.copytree(POLICY, folder)
    weights = load_file(folder / "model.safetensors")
    renamed = {name.replace("q_proj", "query"): tensor for name, tensor in weights.items()}
    save_file(renamed, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.layers\.0\.self_attn\.q_proj"):
        require_its_weights(folder)
