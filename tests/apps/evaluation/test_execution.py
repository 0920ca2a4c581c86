"""Tests of an evaluation's execution: prompts and limits of each baseline, and evaluations of the tiny policy."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from rlsys.apps.evaluation.evaluation_inputs import Baseline, EvaluationMethod
from rlsys.apps.evaluation.execution import (
    limits_of,
    prompted,
    require_sglang_model,
    run_evaluation,
    settings_for,
    with_passages,
)
from rlsys.config.schema import (
    Dtype,
    ReActAgent,
    RunConfig,
    SearchR1Agent,
    SglangConfig,
    TagsConfig,
    TaskConfig,
    TransformersConfig,
)
from rlsys.data.question import Question, search_prompt
from rlsys.errors import RunError, root_cause
from rlsys.rollout.agent.tokens import Codec
from rlsys.rollout.tools.interface import named_tools
from rlsys.search.retrieval import Failure, SearchResult
from tests.apps.evaluation.questions import QUESTIONS, TEXTS
from tests.search.scripted import Script, found
from tests.support.bpe import build_tokenizer
from tests.support.composed import composed
from tests.support.refusals import refused
from tests.support.tiny import Search, search_server
from tests.support.tiny_models import POLICY, tiny_model

QUESTION = Question("q:1", "a row's own prompt", ("x",), text="  who wrote {this} <b>  ")


def test_the_search_loop_has_own_prompts_or_those_of_search_r1() -> None:
    config = RunConfig()
    assert prompted(Baseline.none, QUESTION, TagsConfig()) is QUESTION
    assert limits_of(Baseline.none, config) is config
    assert prompted(Baseline.search, QUESTION, TagsConfig()).prompt == search_prompt(QUESTION.text)
    limited = limits_of(Baseline.search, config)
    assert limited.task.max_turns == config.task.max_turns > 0
    assert limited.rollout.sampling.stop == config.rollout.sampling.stop


@pytest.mark.parametrize("baseline", [Baseline.direct, Baseline.cot, Baseline.rag])
def test_the_other_baselines_answer_in_one_turn(baseline: Baseline) -> None:
    tools = named_tools(["rlsys.rollout.tools.calculator.Calculator"])
    task = TaskConfig(max_total_tokens=1000, max_turn_tokens=200, tools=tools, agent=ReActAgent())
    limited = limits_of(baseline, RunConfig(task=task))
    assert (limited.task.max_turns, limited.task.tools, limited.task.max_prompt_tokens) == (0, [], 800)
    assert limited.task.agent == SearchR1Agent()
    assert limited.rollout.sampling.stop == ["</answer>"]
    prompt = prompted(baseline, QUESTION, TagsConfig()).prompt
    assert prompt.endswith("Question: who wrote {this} <b>?\n")
    assert "<answer> Beijing </answer>" in prompt
    assert "search>" not in prompt
    assert [tag in prompt for tag in ("<think>", "<information>")] == [
        baseline is Baseline.cot, baseline is Baseline.rag,
    ]  # fmt: skip
    own_tags = prompted(baseline, QUESTION, TagsConfig(search="look", answer="reply", information="found")).prompt
    assert "<reply> Beijing </reply>" in own_tags
    assert not {"<answer>", "<search>", "<information>", "</information>"} & set(own_tags.split())


async def test_rag_puts_the_passages_before_the_question() -> None:
    questions = [Question(f"q:{n}", "", ("x",), text=f"Who is {n}?") for n in range(3)]
    server = Script({one.text: found(one.text, f"all about {one.uid} </information>") for one in questions})
    config, codec = RunConfig(task=TaskConfig(max_observation_tokens=4000)), Codec(build_tokenizer(words=True))
    got = await with_passages(questions, server, codec, config)
    assert server.asked == [one.text for one in questions]
    for one, before in zip(got, questions, strict=True):
        assert one.uid == before.uid
        _, inside = one.prompt.split("\n\n<information>")
        passages, tail = inside.split("</information>\n\n")
        assert passages.startswith(f'Doc 1(Title: "{before.text}") all about {before.uid} (/information)')
        assert tail == f"Question: {before.text}\n"
    failing = Script({questions[1].text: SearchResult(error="no answer", failure=Failure.unavailable)})
    with pytest.raises(ExceptionGroup) as error:
        await with_passages(questions, failing, codec, config)
    cause = root_cause(error.value)
    assert isinstance(cause, RunError)
    assert "q:1" in str(cause)


@pytest.fixture
def server() -> Iterator[Search]:
    with search_server() as search:
        yield search


@pytest.fixture
def config(server: Search, tmp_path: Path) -> RunConfig:
    loaded = composed(f"search.url={server.url}", f"output_dir={tmp_path}")
    return replace(loaded, model=replace(loaded.model, path=str(POLICY)))


OWN = "examples.extend.engine.OneByOne"


async def test_rag_searches_for_every_question_and_every_engine_gives_the_same_answers(
    config: RunConfig, server: Search
) -> None:
    answered = []
    for engine in ("transformers", OWN):
        evaluation = await run_evaluation(config, QUESTIONS, EvaluationMethod(engine, Baseline.rag))
        answered.append([one.trajectory.tokens.tolist() for one in evaluation.answered])
        for one in evaluation.answered:
            assert one.question.prompt.startswith("Answer the given question")
            assert len(one.trajectory.turns) == 1
    assert answered[0] == answered[1]
    assert set(TEXTS) <= set(server.asked)


async def test_engine_of_ones_own_that_cannot_run_is_refused(config: RunConfig) -> None:
    for changed, engine, code, key in (
        (config, "nowhere.Engine", "user_code", "rollout.engine.kind"),
        (config, "examples.extend.schedule.NewestFirst", "user_code", "rollout.engine.kind"),
        (with_dtype(config, Dtype.bfloat16), OWN, "conflict", "rollout.engine.dtype"),
    ):
        with refused(code, key):
            await run_evaluation(changed, QUESTIONS, EvaluationMethod(engine, Baseline.direct))


def with_dtype(config: RunConfig, dtype: Dtype) -> RunConfig:
    return replace(config, rollout=replace(config.rollout, engine=replace(config.rollout.engine, dtype=dtype)))


def test_an_engine_has_the_settings_of_the_run_where_it_has_the_keys(config: RunConfig) -> None:
    assert settings_for(config, "sglang") is config.rollout.engine
    own = settings_for(config, OWN)
    assert (own.kind, own.dtype, own.max_running) == (OWN, Dtype.float32, config.rollout.engine.max_running)
    plain, common = settings_for(config, "transformers"), config.rollout.engine
    assert plain == TransformersConfig(
        dtype=config.model.dtype, max_running=common.max_running, stall_timeout_s=common.stall_timeout_s
    )
    config.rollout.engine = TransformersConfig(dtype=Dtype.float32, max_running=7, start_timeout_s=9.0)
    fast = settings_for(config, "sglang")
    assert fast == SglangConfig(dtype=Dtype.float32, max_running=7, start_timeout_s=9.0)


def test_a_model_that_sglang_would_compute_wrongly_is_refused(config: RunConfig, tmp_path: Path) -> None:
    def of(folder: Path) -> RunConfig:
        model = replace(config.model, path=str(folder))
        return replace(config, model=model, rollout=replace(config.rollout, engine=SglangConfig()))

    require_sglang_model(of(POLICY))
    folder = shutil.copytree(POLICY, tmp_path / "other")
    weights = load_file(folder / "model.safetensors")
    renamed = {name.replace("q_proj", "query"): tensor for name, tensor in weights.items()}
    save_file(renamed, folder / "model.safetensors")
    with refused("mismatch") as caught:
        require_sglang_model(of(folder))
    assert "q_proj" in caught.value.key
    latent = tiny_model("deepseek_v2", tmp_path / "latent")
    require_sglang_model(of(latent))
    described = json.loads((latent / "config.json").read_text())
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    (latent / "config.json").write_text(json.dumps(described | {"rope_parameters": plain}))
    with refused("conflict", "rollout.engine.kind"):
        require_sglang_model(of(latent))
