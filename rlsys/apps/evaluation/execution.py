"""Runs evaluations outside of training, through SGLang or plain transformers, with search and baselines.

Both engines run the same episodes as training; only the generator differs. A baseline differs in prompt and episode limits
only.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from transformers import AutoTokenizer

from rlsys.apps.evaluation.evaluation_inputs import (
    ENGINES,
    SEARCHING,
    Baseline,
    EvaluationInputs,
    EvaluationMethod,
    as_hf,
    is_about,
    questions_of,
)
from rlsys.apps.evaluation.results import ANSWERS, PAGE, RESULTS, noting, render_table, settings_of, write_results
from rlsys.apps.running import run_to_end
from rlsys.config.compose import typed
from rlsys.config.derived import concurrent_episodes
from rlsys.config.schema import (
    CustomEngine,
    EngineConfig,
    RunConfig,
    SearchR1Agent,
    SglangConfig,
    TagsConfig,
    TransformersConfig,
)
from rlsys.data.question import Question, as_asked, search_prompt
from rlsys.data.trajectory import Trajectory
from rlsys.errors import RunError, UserError, first_line
from rlsys.observe import status
from rlsys.orchestrator.evaluation.heldout import Answered, Ask, Evaluation, evaluate, heldout_score
from rlsys.orchestrator.run_logger import new_run_dir
from rlsys.orchestrator.search_server import serving
from rlsys.rollout.agent.episode import EpisodeTools, run_episode
from rlsys.rollout.agent.recorder import Streaming, evaluation_sampling
from rlsys.rollout.agent.search_r1 import information_observer
from rlsys.rollout.agent.tokens import Codec
from rlsys.rollout.kinds import attention_problems, capability_problems
from rlsys.rollout.tools.calls import SearchTool, render_search
from rlsys.rollout.tools.search_tool import open_tool
from rlsys.search.retrieval import SearchResult

T = TypeVar("T")
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
"""Baseline -> instructions that precede the question."""
_TAG = re.compile(r"(?<=<|/)(search|answer|information)(?=>)")


def limits_of(baseline: Baseline, config: RunConfig) -> RunConfig:
    """Return `config` with the episode limits of `baseline`.

    A baseline's prompt may take up all tokens of an episode except the tokens of one turn. Without searches, only the
    answer tag stops generation. Baselines have no task tools, because their prompts do not mention them, and act by the tags
    of their prompts.
    """
    if baseline is Baseline.none:
        return config
    room = config.task.max_total_tokens - config.task.max_turn_tokens
    agent = config.task.agent if isinstance(config.task.agent, SearchR1Agent) else SearchR1Agent()
    task = replace(config.task, max_prompt_tokens=room, tools=[], agent=agent, sources={})
    rollout = config.rollout
    if baseline is not Baseline.search:
        task = replace(task, max_turns=0)
        rollout = replace(rollout, sampling=replace(rollout.sampling, stop=[f"</{task.tags.answer}>"]))
    return replace(config, task=task, rollout=rollout)


def require_texts(baseline: Baseline, questions: Sequence[Question]) -> None:
    """Raise UserError if `baseline` needs raw questions and a question has only a prompt."""
    lacking = next((question.uid for question in questions if not question.text.strip()), None)
    if baseline is not Baseline.none and lacking is not None:
        raise UserError(
            f"--baseline {baseline} needs the raw questions for its prompts, but question {lacking} has only a prompt: "
            'give rows with a field "question", such as those of `rlsys data prepare`.',
            code="conflict",
            key="--baseline",
        )


def prompted(baseline: Baseline, question: Question, tags: TagsConfig, passages: str = "") -> Question:
    """Return `question` with the prompt of `baseline`; `passages` include their tags."""
    if baseline is Baseline.none:
        return question
    task = _TAG.sub(lambda tag: str(getattr(tags, tag.group())), _TASKS[baseline])
    return replace(question, prompt=f"{task.rstrip()}{passages or ' '}{_QUESTION}{as_asked(question.text)}\n")


async def with_passages(
    questions: Sequence[Question], search: SearchTool, codec: Codec, config: RunConfig
) -> list[Question]:
    """Return `questions` with the `rag` prompt; passages are formatted and truncated as in the search loop.

    Raises RunError for a failed search, because a prompt without passages would be another baseline.
    """
    task, observer = config.task, information_observer(config.task.tags, codec)
    slots = asyncio.Semaphore(config.search.max_concurrent)

    async def with_its_own(question: Question) -> Question:
        async with slots:
            result = await search.search(question.text)
        if result.error:
            raise RunError(f"--baseline rag: the search for question {question.uid} failed: {result.error}")
        contents = [passage.contents for passage in result.passages]
        passages = observer.observe(render_search(contents), task.max_observation_tokens)
        return prompted(Baseline.rag, question, task.tags, passages)

    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(with_its_own(question)) for question in questions]
    return [task.result() for task in asked]


async def run_evaluation(
    config: RunConfig,
    questions: Sequence[Question],
    method: EvaluationMethod,
    report: Callable[[str], None] = lambda _: None,
    note: Callable[[Answered], None] = lambda _: None,
) -> Evaluation:
    """Evaluate the model of a valid `config` on `questions`; start its search server if necessary.

    `report` receives the progress; `note` receives each answer as it arrives. Raises UserError for settings that the
    engine does not support and for a question without the text that `method` needs, RunError if a needed search server
    does not respond.
    """
    require_texts(method.baseline, questions)
    limited = limits_of(method.baseline, config)
    if method.baseline not in SEARCHING:
        return await _run(limited, questions, method, report, note)
    with serving(config.search, config.cluster.threads, Path(config.output_dir)) as search:
        search.wait_healthy()
        await search.require()
        return await _run(replace(limited, search=search.search), questions, method, report, note)


async def _run(
    config: RunConfig,
    questions: Sequence[Question],
    method: EvaluationMethod,
    report: Callable[[str], None],
    note: Callable[[Answered], None],
) -> Evaluation:
    if method.baseline is Baseline.rag:
        report(f"searching for {len(questions)} questions")
        codec = Codec(AutoTokenizer.from_pretrained(config.model.path))
        async with open_tool(config.search) as search:
            questions = await with_passages(questions, search, codec, config)
    else:
        questions = [prompted(method.baseline, question, config.task.tags) for question in questions]
    report(f"starting {method.engine}")
    async with asking(config, method.engine) as ask:
        options: dict[str, Any] = {"samples": config.eval.samples, "temperature": config.eval.temperature, "note": note}
        most, score = concurrent_episodes(config.task, config.rollout), heldout_score(config)
        with status.reported_to(lambda _stage, text: report(text)):
            return await evaluate(questions, ask, most, score=score, **options)


def evaluate_into_folder(inputs: EvaluationInputs, method: EvaluationMethod, shown: int, out: Path | None) -> None:
    """Evaluate, write the results to `out` or a new folder, with up to `shown` right and `shown` wrong samples, and
    print the table."""
    config = inputs.config
    questions = questions_of(inputs.sources, config)
    started = time.time()
    with _results_folder(config, out) as folder:
        with (
            Console(stderr=True).status("starting") as status,
            noting(folder) as note,
            as_hf(inputs.model, folder, config.model.family) as path,
        ):
            here = replace(config, output_dir=str(folder), model=replace(config.model, path=str(path)))
            evaluation = run_to_end(run_evaluation(here, questions, method, status.update, note))
        settings = settings_of(inputs, method, started, time.time())
        sets = write_results(evaluation, folder, settings, shown, config.trainer.seed)
    Console().print(render_table(sets))
    where = f"The results are in {folder / RESULTS}; {ANSWERS} next to it has all answers, {PAGE} is a page of samples."
    Console().print(where, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _results_folder(config: RunConfig, out: Path | None) -> Iterator[Path]:
    """Yield the output folder, which must have no results; if the body fails, a new and empty folder is removed."""
    is_new = out is None or not out.exists()
    if out is None:
        out = new_run_dir(replace(config, name="eval"))
    if (out / RESULTS).exists():
        raise UserError(
            f"--out {out} already holds the results of an evaluation: give another folder.", code="exists", key="--out"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UserError(
            f"--out {out} cannot be created ({problem.strerror}): give another folder.", code="denied", key="--out"
        ) from problem
    try:
        yield out
    except BaseException:
        if is_new:
            with suppress(OSError):
                out.rmdir()  # Succeeds only if the folder is empty.
        raise


@asynccontextmanager
async def asking(config: RunConfig, engine: str) -> AsyncIterator[Ask]:
    """Yield a function that runs one episode of `config` with `engine`; the engine stops when the context ends.

    Raises UserError or RunError.
    """
    async with AsyncExitStack() as stack:
        codec = open_codec(config.model.path, f"model.path={config.model.path}")
        generator = await stack.enter_async_context(open_generator(config, engine))
        search: SearchTool | None = UnusedSearch() if config.search.enabled else None
        if config.search.enabled and config.task.max_turns > 0:
            search = await stack.enter_async_context(open_tool(config.search))
        tools = EpisodeTools(generator, search, codec, config.task)
        stack.callback(tools.close)
        slots = asyncio.Semaphore(concurrent_episodes(config.task, config.rollout))

        async def ask(question: Question, sample: int, temperature: float) -> Trajectory:
            sampling = evaluation_sampling(
                config.rollout.sampling, temperature, as_rollouts=config.compat.sampled_validation
            )
            async with slots:
                return await run_episode(question, sample, tools, sampling, config.rollout.episode_timeout_s)

        yield ask


@asynccontextmanager
async def open_generator(config: RunConfig, engine: str) -> AsyncIterator[Streaming]:
    """Start an engine for the model of `config`, and stop it on exit. Raises UserError or RunError."""
    from rlsys.rollout.engine import EngineDriver

    config = replace(config, rollout=replace(config.rollout, engine=settings_for(config, engine)))
    for problem in capability_problems(config):
        if is_about(problem, "rollout.engine"):  # Not about schedules and placements, which only training has.
            raise problem
    if engine == "sglang":
        require_sglang_model(config)
    generator = EngineDriver(config.model.path, config.rollout.engine, config.cluster.device, config.trainer.seed)
    generator.require_room(config.task)
    try:
        await generator.start()
        yield generator
    finally:
        await generator.stop()


def settings_for(config: RunConfig, engine: str) -> SglangConfig | TransformersConfig | CustomEngine:
    """Return the settings of `engine`: those of the run, if its engine is of that kind, else the keys of every engine.

    Raises UserError for a class of the user's that needs more settings.
    """
    own = config.rollout.engine
    if own.kind == engine:
        return own
    common = {item.name: getattr(own, item.name) for item in fields(EngineConfig)} | {"kind": engine}
    if engine == "transformers":
        common |= {"tp": 1, "dtype": config.model.dtype}
    settings: SglangConfig | TransformersConfig | CustomEngine = typed(common, ENGINES, "rollout.engine")
    return settings


class UnusedSearch:
    """Search tool of episodes that may not search."""

    async def search(self, query: str) -> SearchResult:
        raise AssertionError(f"an episode without searches has searched for {query!r}")


def open_codec(folder: str | Path, given: str) -> Codec:
    """Return the codec of the model in `folder`, which error messages call `given`. Raises UserError if the tokenizer
    is unreadable."""
    try:
        return Codec(AutoTokenizer.from_pretrained(folder))
    except Exception as problem:  # The tokenizers library raises no narrower class.
        raise UserError(
            f"{given} has no readable tokenizer ({first_line(problem)}): give a complete model folder.",
            code="malformed",
            key=str(folder),
        ) from problem


def require_sglang_model(config: RunConfig) -> None:
    """Raise UserError if SGLang cannot compute the model, or if its weights do not match its config.

    SGLang would initialise missing weights at random. Model families that rlsys does not support are not checked.
    """
    # Imported late: loads Megatron's formats, which plain transformers does not need.
    from rlsys.weights.convert.model_folder import architecture_in, check_hf
    from rlsys.weights.hf_io import HfReader
    from rlsys.weights.weight_map import WeightMap

    folder = Path(config.model.path)
    try:
        architecture = architecture_in(folder, config.model.family)
    except UserError:
        return
    for problem in attention_problems(config, architecture):
        raise problem
    check_hf(HfReader(folder), WeightMap(architecture), folder, values=False)
