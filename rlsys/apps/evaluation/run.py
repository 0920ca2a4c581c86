"""One evaluation from its questions to its answers: search, baseline and engine put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from transformers import AutoTokenizer

from rlsys.apps.evaluation.baselines import (
    SEARCHING,
    Baseline,
    limits_of,
    prompted,
    require_texts,
    with_passages,
)
from rlsys.apps.evaluation.engines import asking
from rlsys.apps.evaluation.how import AS_TRAINED, How
from rlsys.config.schema import RunConfig
from rlsys.data.question import Question
from rlsys.orchestrator.evaluation.evaluate import Answered, Evaluation, evaluate
from rlsys.orchestrator.evaluation.heldout import heldout_score
from rlsys.orchestrator.search_server import serving
from rlsys.rollout.agent.codec import Codec
from rlsys.rollout.search_tool import open_tool


async def run_evaluation(
    config: RunConfig,
    questions: Sequence[Question],
    how: How = AS_TRAINED,
    say: Callable[[str], None] = lambda _: None,
    note: Callable[[Answered], None] = lambda _: None,
) -> Evaluation:
    """Ask `questions` to the model of a valid `config`, with its search server, or one that is started for it.

    `say` is told what goes on, `note` gets every answer as soon as it is there.

    Raises UserError for settings that the engine cannot have and for a question without the text that `how` needs, RunError if no search server answers where one is needed.
    """
    require_texts(how.baseline, questions)
    limited = limits_of(how.baseline, config)
    if how.baseline not in SEARCHING:
        return await _ask(limited, await _prompts(limited, questions, how, say), how, say, note)
    with serving(config.search, config.cluster.threads, Path(config.output_dir)) as search:
        search.wait_healthy()
        await search.require()
        served = replace(limited, search=search.search)
        return await _ask(served, await _prompts(served, questions, how, say), how, say, note)


async def _prompts(
    config: RunConfig, questions: Sequence[Question], how: How, say: Callable[[str], None]
) -> list[Question]:
    if how.baseline is not Baseline.rag:
        return [prompted(how.baseline, one, config.task.tags) for one in questions]
    say(f"searches for {len(questions)} questions")
    codec = Codec(AutoTokenizer.from_pretrained(config.model.path))
    async with open_tool(config.search) as search:
        return await with_passages(questions, search, codec, config)


async def _ask(
    config: RunConfig,
    questions: Sequence[Question],
    how: How,
    say: Callable[[str], None],
    note: Callable[[Answered], None],
) -> Evaluation:
    say(f"starts {how.engine}")
    async with asking(config, how.engine) as ask:
        return await evaluate(
            questions,
            ask,
            config.rollout.max_episodes,
            say=say,
            score=heldout_score(config),
            samples=config.eval.samples,
            temperature=config.eval.temperature,
            note=note,
        )
