"""Runs evaluations outside of training, through SGLang or plain transformers, with search and baselines.

Both engines run the same episodes as training; only the generator differs. A baseline differs in prompt and episode limits
only.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import Any, Literal, TypeVar

import torch
from rich.console import Console
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlsys.apps.evaluation.evaluation_inputs import (
    SEARCHING,
    Baseline,
    EngineName,
    EvaluationInputs,
    EvaluationMethod,
    as_hf,
    questions_of,
)
from rlsys.apps.evaluation.results import ANSWERS, PAGE, RESULTS, noting, render_table, settings_of, write_results
from rlsys.apps.running import run_to_end
from rlsys.config.schema import Device, Dtype, RunConfig, SearchR1Agent, TagsConfig
from rlsys.data.question import Question, as_asked, search_prompt
from rlsys.data.trajectory import Trajectory
from rlsys.errors import RunError, UserError
from rlsys.observe import status
from rlsys.orchestrator.evaluation.heldout import Answered, Ask, Evaluation, evaluate, heldout_score
from rlsys.orchestrator.run_logger import new_run_dir
from rlsys.orchestrator.search_server import serving
from rlsys.rollout.agent.episode import EpisodeTools, run_episode
from rlsys.rollout.agent.recorder import Generation, OnTokens, Streaming, TurnSampling, evaluation_sampling
from rlsys.rollout.agent.search_r1 import information_observer
from rlsys.rollout.agent.tokens import Codec
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
    task, rollout = replace(config.task, max_prompt_tokens=room, tools=[], agent=agent), config.rollout
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
        most, score = config.rollout.max_episodes, heldout_score(config)
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
            as_hf(inputs.model, folder) as path,
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
async def asking(config: RunConfig, engine: EngineName) -> AsyncIterator[Ask]:
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

        async def ask(question: Question, sample: int, temperature: float) -> Trajectory:
            sampling = evaluation_sampling(
                config.rollout.sampling, temperature, as_rollouts=config.compat.sampled_validation
            )
            return await run_episode(question, sample, tools, sampling, config.rollout.episode_timeout_s)

        yield ask


@asynccontextmanager
async def open_generator(config: RunConfig, engine: EngineName) -> AsyncIterator[Streaming]:
    """Start a generator for the model of `config`, and stop it on exit. Raises UserError or RunError."""
    if engine is EngineName.transformers:
        yield await _from_thread(lambda: _transformers(config))
        return
    from rlsys.rollout.engine import Engine

    require_its_weights(Path(config.model.path))
    sglang = Engine(config.model.path, config.rollout.engine, config.cluster.device, config.trainer.seed)
    sglang.require_room(config.task)
    try:
        await sglang.start()
        yield sglang
    finally:
        await sglang.stop()


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
        reason = (str(problem).splitlines() or [type(problem).__name__])[0].rstrip(".")
        raise UserError(
            f"{given} has no readable tokenizer ({reason}): give a complete model folder.",
            code="malformed",
            key=str(folder),
        ) from problem


async def _from_thread(work: Callable[[], T]) -> T:
    """Run `work` in a daemon thread and return its result; neither cancellation nor process exit waits for the thread."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as problem:  # noqa: BLE001 (raised in the awaiting task)
            done.set_exception(problem)

    Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(done)


def require_its_weights(folder: Path) -> None:
    """Raise UserError if the weights in the folder do not match its config.

    SGLang would initialise missing weights at random. Model families that rlsys does not support are not checked.
    """
    # Imported late: loads Megatron's formats, which plain transformers does not need.
    from rlsys.weights.convert.model_folder import architecture_in, check_hf
    from rlsys.weights.hf_io import HfReader
    from rlsys.weights.weight_map import WeightMap

    try:
        architecture = architecture_in(folder)
    except UserError:
        return
    check_hf(HfReader(folder), WeightMap(architecture), folder, values=False)


def _transformers(config: RunConfig) -> Streaming:
    drawn, engine = config.rollout.sampling, config.rollout.engine
    if config.compat.sampled_validation and (drawn.top_p != 1 or drawn.top_k != -1):
        raise UserError(
            f"compat.sampled_validation=true samples with top_p={drawn.top_p:g} and top_k={drawn.top_k} of rollout.sampling, "
            "but --engine transformers samples from the whole vocabulary: use sglang.",
            code="unsupported",
            key="compat.sampled_validation",
        )
    model, device = config.model, config.cluster.device
    return TransformersGenerator(model.path, model.dtype, device, engine.max_running, config.trainer.seed)


_GATHER_S = 0.02
"""Time that a batch waits for further requests."""


@dataclass(slots=True)
class _Request:
    input_ids: list[int]
    sampling: TurnSampling
    draws: torch.Generator
    on_tokens: OnTokens | None
    loop: asyncio.AbstractEventLoop
    """Event loop in which `on_tokens` is called."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Literal["", "stop", "length", "abort"] = ""


class TransformersGenerator:
    """Generates with a Hugging Face model: an independent check of the engine, and slower by design.

    Waiting requests are decoded as one left-padded batch. The random draws of a request depend on its id and the seed, not
    on the other requests. Raises `UserError` for a folder without a complete model.
    """

    def __init__(self, model_path: str, dtype: Dtype, device: Device, max_batch: int, seed: int = 0) -> None:
        self._device = torch.device("cuda" if device is Device.gpu else "cpu")
        self._tokenizer, model = _loaded(model_path, getattr(torch, dtype))
        self._model = model.to(self._device).eval()
        # Tokens that end a turn: the end tokens of the tokenizer and of both configs, as in SGLang.
        known = (self._tokenizer.eos_token_id, model.config.eos_token_id, model.generation_config.eos_token_id)
        listed = [ends if isinstance(ends, list) else [ends] for ends in known]
        self._ends = frozenset(token for ends in listed for token in ends if token is not None)
        self._max_batch, self._seed = max_batch, seed
        self._waiting: list[_Request] = []
        self._turn = asyncio.Lock()

    async def generate(
        self, input_ids: list[int], sampling: TurnSampling, rid: str, on_tokens: OnTokens | None = None
    ) -> Generation:
        """Continue `input_ids`; calls `on_tokens` after every token. Raises ValueError for top_p or top_k sampling."""
        if sampling.top_p != 1 or sampling.top_k != -1:
            raise ValueError(
                f"{rid}: top_p={sampling.top_p} and top_k={sampling.top_k} are not supported: this generator samples from the "
                "whole vocabulary"
            )
        digest = hashlib.sha256(f"{self._seed}:{rid}".encode()).digest()
        draws = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
        request = _Request(input_ids, sampling, draws, on_tokens, asyncio.get_running_loop())
        self._waiting.append(request)
        try:
            async with self._turn:  # The holder of the lock decodes for all waiting requests, its own first.
                if not request.finish:
                    await asyncio.sleep(_GATHER_S)
                    await self._decode_batch(request)
        finally:
            request.finish = request.finish or "abort"
        versions = [0] * len(request.token_ids)
        return Generation(request.token_ids, request.logprobs, request.finish, cached_tokens=0, versions=versions)

    async def _decode_batch(self, own: _Request) -> None:
        """Decode the waiting requests, `own` among them. A cancelled caller returns only after the whole batch is done."""
        batch = [request for request in self._waiting if not request.finish][: self._max_batch]
        work = asyncio.ensure_future(asyncio.to_thread(self._decode, batch))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            own.finish = own.finish or "abort"
            await work
            raise
        finally:
            self._waiting = [request for request in self._waiting if not request.finish]

    @torch.inference_mode()
    def _decode(self, batch: Sequence[_Request]) -> None:
        """Append tokens to the requests until all are finished."""
        tokens, mask = self._left_padded([request.input_ids for request in batch])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        temperatures = torch.tensor([[request.sampling.temperature or 1.0] for request in batch], device=self._device)
        cache = None
        while not all(request.finish for request in batch):
            places = {"attention_mask": mask, "position_ids": positions}
            output = self._model(tokens, **places, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            logprobs = torch.log_softmax(output.logits[:, -1].float() / temperatures, dim=-1)
            chosen = _choose(logprobs, batch)
            taken = logprobs.gather(1, chosen)[:, 0].tolist()
            for request, token, logprob in zip(batch, chosen[:, 0].tolist(), taken, strict=True):
                self._extend(request, token, logprob)
            tokens = chosen
            mask = torch.cat([mask, mask.new_ones(len(batch), 1)], dim=1)
            positions = positions[:, -1:] + 1

    def _left_padded(self, rows: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(len(row) for row in rows)
        tokens = torch.zeros(len(rows), width, dtype=torch.long, device=self._device)
        mask = torch.zeros_like(tokens)
        for index, row in enumerate(rows):
            tokens[index, width - len(row) :] = torch.tensor(row)
            mask[index, width - len(row) :] = 1
        return tokens, mask

    def _extend(self, request: _Request, token: int, logprob: float) -> None:
        if request.finish:
            return
        request.token_ids.append(token)
        request.logprobs.append(logprob)
        if request.on_tokens is not None:
            request.loop.call_soon_threadsafe(request.on_tokens, list(request.token_ids))
        text = self._tokenizer.decode(request.token_ids)
        if token in self._ends or any(stop in text for stop in request.sampling.stop):
            request.finish = "stop"
        elif len(request.token_ids) >= request.sampling.max_new_tokens:
            request.finish = "length"


def _loaded(model_path: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Load tokenizer and model. Raises UserError for missing weights, which transformers would initialise at random."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        # Mismatched sizes are reported below, with the names of the weights.
        options = {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
        model, info = AutoModelForCausalLM.from_pretrained(model_path, **options)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as problem:
        reason = (str(problem).splitlines() or [type(problem).__name__])[0].rstrip(".")
        raise UserError(
            f"model.path={model_path} cannot be loaded: {reason}; give a complete model folder.",
            code="malformed",
            key="model.path",
        ) from problem
    lacking = {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}
    if lacking:
        raise UserError(
            f"model.path={model_path} lacks {len(lacking)} of the weights that its config.json describes, or has "
            f"them in another shape, such as {min(lacking)}: give a complete model folder.",
            code="mismatch",
            key="model.path",
        )
    return tokenizer, model


def _choose(logprobs: torch.Tensor, batch: Sequence[_Request]) -> torch.Tensor:
    """Return the next token of each request, [batch, 1]: the most likely one, or a sampled one at a temperature above 0."""
    chosen = logprobs.argmax(dim=-1, keepdim=True)
    for row, request in enumerate(batch):
        if request.sampling.temperature:
            chosen[row] = torch.multinomial(logprobs[row].exp().cpu(), 1, generator=request.draws)
    return chosen
