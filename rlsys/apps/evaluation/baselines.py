"""Ways of asking a model: which engine generates, and with which prompts, as the baselines of the papers' tables.

A baseline is another prompt about the raw question and other limits of the episode, nothing else: the same engine, the same
loop and the same scores. `direct`, `cot` and `rag` have one generation and no search of their own; `search` has the whole
loop, under the prompt that Search-R1 trains with. None asks with the prompts that the rows hold.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from rlsys.config.schema import RunConfig, TagsConfig
from rlsys.data.question import Question, as_asked, search_prompt
from rlsys.errors import RunError, UserError
from rlsys.rollout.agent.episode import Observer, SearchTool, render_search
from rlsys.rollout.agent.tokens import Codec


class Baseline(StrEnum):
    """How the model is asked."""

    none = "none"  # As the rows say: how a trained policy is asked
    direct = "direct"  # The answer at once
    cot = "cot"  # A chain of thought, then the answer
    rag = "rag"  # The passages that a search for the question finds, then the answer
    search = "search"  # The loop with the prompt of Search-R1, for a model that was not trained with it


class EngineName(StrEnum):
    """What generates."""

    sglang = "sglang"
    transformers = "transformers"


@dataclass(frozen=True, slots=True)
class How:
    """What is asked for answers, and with which prompts. How often and at which temperature, `eval` of the config says."""

    engine: EngineName = EngineName.sglang
    baseline: Baseline = Baseline.none


AS_TRAINED = How()  # By the engine that training uses, with the prompts of the rows
SEARCHING = (Baseline.none, Baseline.search, Baseline.rag)  # Those that need a search server

_QUESTION, _EXAMPLE = "Question: ", "For example, <answer> Beijing </answer>. "
_TASKS = {
    Baseline.direct: (
        "Answer the given question from what you know. Write the answer alone, inside <answer> and </answer>, without any "
        "reasoning or explanation. " + _EXAMPLE
    ),
    Baseline.cot: (
        "Answer the given question from what you know. First reason step by step inside <think> and </think>. Then write "
        "the answer inside <answer> and </answer>, without detailed illustrations. " + _EXAMPLE
    ),
    Baseline.rag: (
        "Answer the given question. A search engine has found the passages between <information> and </information>, which "
        "may help or not. Write the answer alone, inside <answer> and </answer>, without detailed illustrations. "
        + _EXAMPLE
    ),
    Baseline.search: search_prompt("?").rpartition(_QUESTION)[0],
}
"""What stands before the question."""
_TAG = re.compile(r"(?<=<|/)(search|answer|information)(?=>)")


def limits_of(baseline: Baseline, config: RunConfig) -> RunConfig:
    """`config` with the limits of an episode that `baseline` has.

    Prompts are not the rows' own, so they are held to what is left beside one turn. Only the answer's tag ends a
    generation that may not search. None has tools of the task's own, for no prompt of theirs speaks of them.
    """
    if baseline is Baseline.none:
        return config
    task = config.task
    room = task.max_total_tokens - task.max_turn_tokens
    if baseline is Baseline.search:
        return replace(config, task=replace(task, max_prompt_tokens=room, tools=[]))
    stop = [f"</{task.tags.answer}>"]
    sampling = replace(config.rollout.sampling, stop=stop)
    return replace(
        config,
        task=replace(task, max_prompt_tokens=room, max_turns=0, tools=[]),
        rollout=replace(config.rollout, sampling=sampling),
    )


def require_texts(baseline: Baseline, questions: Sequence[Question]) -> None:
    """Raise UserError where `baseline` would need the raw text of a question that does not have it."""
    lacking = next((question.uid for question in questions if not question.text.strip()), None)
    if baseline is not Baseline.none and lacking is not None:
        raise UserError(
            f"--baseline {baseline} writes prompts of its own, and question {lacking} has its text only inside a prompt: "
            'give rows with the raw question, such as those of `rlsys data prepare` or with a field "question".'
        )


def prompted(baseline: Baseline, question: Question, tags: TagsConfig, passages: str = "") -> Question:
    """`question` with the prompt of `baseline`; `passages` stand between their tags."""
    if baseline is Baseline.none:
        return question
    task = _TAG.sub(lambda tag: str(getattr(tags, tag.group())), _TASKS[baseline])
    return replace(question, prompt=f"{task.rstrip()}{passages or ' '}{_QUESTION}{as_asked(question.text)}\n")


async def with_passages(
    questions: Sequence[Question], search: SearchTool, codec: Codec, config: RunConfig
) -> list[Question]:
    """`questions` with the prompt of `rag`: the passages look as in the loop, and are cut to the same length.

    Raises RunError for a search that failed: a prompt without its passages is another baseline.
    """
    task, observer = config.task, Observer(config.task.tags, codec)
    slots = asyncio.Semaphore(config.search.max_concurrent)

    async def with_its_own(question: Question) -> Question:
        async with slots:
            result = await search.search(question.text)
        if result.error:
            raise RunError(f"--baseline rag: the search for question {question.uid} failed: {result.error}")
        contents = [passage.contents for passage in result.passages]
        passages = observer.observe(render_search(contents, ""), task.max_observation_tokens)
        return prompted(Baseline.rag, question, task.tags, passages)

    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(with_its_own(question)) for question in questions]
    return [task.result() for task in asked]
