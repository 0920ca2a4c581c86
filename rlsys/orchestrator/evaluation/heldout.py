"""Runs held-out questions and aggregates the scores of the answers.

`evaluate` takes any coroutine function that answers one question, so engines and plain transformers share this code.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from rlsys.config.derived import heldout_files, task_of
from rlsys.config.problems import conflict
from rlsys.config.schema import RunConfig
from rlsys.data.question import Question, read_questions
from rlsys.data.trajectory import Finish, Trajectory
from rlsys.observe import status
from rlsys.observe.metrics import Metric
from rlsys.orchestrator.evaluation.scores import AnswerScores, scores_of
from rlsys.orchestrator.rewards.reward import EpisodeParser
from rlsys.rollout.tools.interface import tool_tags

EVALUATION_METRICS = (
    Metric("eval/em", "share", "exact match over all answers to held-out questions"),
    Metric(
        "eval/em/<source>",
        "share",
        "the same, for one source of `task.sources`, or for one data set of the file, if there are several",
        "S `val/test_score/<data source>`",
    ),
    Metric("eval/em_hop_<hops>", "share", "the same, for questions with this number of hops"),
    Metric("eval/f1 eval/sub_em", "share", "mean F1 of words; answers that contain an accepted answer"),
    Metric("eval/finished", "share", "episodes that ended with an answer"),
    Metric("eval/searches eval/tokens", "count", "searches and generated tokens per answer"),
    Metric("reference/...", "", "the same for the reference policy, with `algorithm.eval_ref_policy`"),
)
STAGE = "rollout.evaluation"
"""Status stage that shows the progress of an evaluation."""
Ask = Callable[[Question, int, float], Awaitable[Trajectory]]
"""(question, sample number, temperature) -> one episode; temperature 0 is greedy."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One episode of a held-out question, with its scores."""

    question: Question
    trajectory: Trajectory
    scores: AnswerScores

    @property
    def em(self) -> float:
        """Exact match: 1 for a correct answer, 0 for a wrong or missing answer."""
        return self.scores.em

    @property
    def finished(self) -> bool:
        """True if the episode ended with an answer."""
        return self.trajectory.finish is Finish.ANSWER

    @property
    def tokens(self) -> int:
        """Number of tokens generated in all turns."""
        return sum(turn.generated_tokens for turn in self.trajectory.turns)

    @property
    def search_errors(self) -> int:
        """Number of failed searches and tool calls."""
        return sum(bool(turn.tool_error) for turn in self.trajectory.turns)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Metrics over the answers of one evaluation; in `answered`, the answers to a question are consecutive."""

    step: int
    answered: tuple[Answered, ...]

    @property
    def em(self) -> float:
        """Share of exact matches, over all answers (avg@k)."""
        return fmean(answer.em for answer in self.answered)

    @property
    def em_by_hop(self) -> dict[str, float]:
        """Exact match by number of hops, over questions with a `hops` field."""
        return {hop: part.em for hop, part in self.by_hop.items()}

    @property
    def searches(self) -> float:
        """Mean searches per answer."""
        return fmean(answer.trajectory.searches for answer in self.answered)

    @property
    def finished(self) -> float:
        """Share of episodes that ended with an answer."""
        return fmean(answer.finished for answer in self.answered)

    @property
    def aborted(self) -> int:
        """Number of episodes that were cut off, such as at `rollout.episode_timeout_s`."""
        return sum(answer.trajectory.finish is Finish.ABORTED for answer in self.answered)

    @property
    def by_source(self) -> dict[str, Evaluation]:
        """Source of the task, or else data set -> its part of the evaluation, in order of first appearance."""
        return self._parts(lambda answer: answer.question.set_name)

    @property
    def by_hop(self) -> dict[str, Evaluation]:
        """Number of hops -> its part of the evaluation, over questions with a `hops` field."""
        parts = self._parts(lambda answer: str(answer.question.extra.get("hops", "")))
        return {hop: parts[hop] for hop in sorted(parts) if hop}

    @property
    def by_question(self) -> dict[str, tuple[Answered, ...]]:
        return {uid: part.answered for uid, part in self._parts(lambda answer: answer.question.uid).items()}

    def metrics(self) -> dict[str, float]:
        """Return tracker metrics: overall, `em_hop_N` by hops, and `em/SOURCE` by data source if several exist."""
        sources = self.by_source
        return {
            "em": self.em,
            "f1": fmean(answer.scores.f1 for answer in self.answered),
            "sub_em": fmean(answer.scores.sub_em for answer in self.answered),
            "finished": self.finished,
            "searches": self.searches,
            "tokens": fmean(answer.tokens for answer in self.answered),
            **{f"em_hop_{hop}": em for hop, em in self.em_by_hop.items()},
            **({f"em/{name}": part.em for name, part in sources.items()} if len(sources) > 1 else {}),
        }

    def row(self) -> dict[str, object]:
        """Return the row for the evaluation's files and the summary."""
        return {
            "step": self.step,
            "questions": len(self.by_question),
            "em": self.em,
            "em_by_hop": self.em_by_hop,
            "searches": self.searches,
            "finished": self.finished,
            "figures": self.metrics(),
        }

    def _parts(self, name_of: Callable[[Answered], str]) -> dict[str, Evaluation]:
        parts: dict[str, list[Answered]] = defaultdict(list)
        for answer in self.answered:
            parts[name_of(answer)].append(answer)
        return {name: Evaluation(self.step, tuple(answered)) for name, answered in parts.items()}


def answer_line(answer: Answered) -> str:
    """Return one JSON line of an answers file. Characters that UTF-8 cannot encode become question marks."""
    question, trajectory = answer.question, answer.trajectory
    row = {
        "set": question.set_name,
        "uid": question.uid,
        "sample": trajectory.sample,
        "question": question.text or question.prompt,
        "golden_answers": list(question.answers),
        "answer": trajectory.answer,
        **asdict(answer.scores),
        "finish": str(trajectory.finish),
        "searches": trajectory.searches,
        "search_errors": answer.search_errors,
        "tokens": answer.tokens,
        "response": trajectory.response,
    }
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "replace").decode("utf-8")


def heldout_questions(config: RunConfig) -> list[Question]:
    """Return the held-out questions of a run. Raises UserError if `compat.validation_batch` leaves none."""
    return [
        question
        for file in heldout_files(config.task)
        for question in whole_batches(
            read_questions(file.path, config.eval.limit, file.source), config.compat.validation_batch
        )
    ]


def whole_batches(questions: list[Question], batch: int | None) -> list[Question]:
    """Return the questions that fill whole batches; all if `batch` is None. Raises UserError if no batch is filled."""
    if batch is None:
        return questions
    if len(questions) < batch:
        raise conflict(
            f"compat.validation_batch={batch} leaves out all of the {len(questions)} held-out questions: lower it, or "
            "set it to null."
        )
    return questions[: len(questions) // batch * batch]


def plain_score(trajectory: Trajectory, question: Question) -> AnswerScores:
    """Return the scores of the answer in the last turn."""
    return scores_of(trajectory.answer, question.answers)


def heldout_score(config: RunConfig) -> Callable[[Trajectory, Question], AnswerScores]:
    """Return the scoring function for a run, which extracts the answer as `compat.answer_over_prompt` specifies."""
    tasks = {name: task_of(config.task, name) for name in ("", *config.task.sources)}
    parsers = {name: EpisodeParser(task.tags, config.compat, tool_tags(task.tools)) for name, task in tasks.items()}

    def score(trajectory: Trajectory, question: Question) -> AnswerScores:
        parser = parsers.get(question.source, parsers[""])
        return scores_of(parser.read(question, trajectory).answer, question.answers)

    return score


async def evaluate(
    questions: Sequence[Question],
    ask: Ask,
    concurrency: int,
    step: int = 0,
    score: Callable[[Trajectory, Question], AnswerScores] = plain_score,
    samples: int = 1,
    temperature: float = 0.0,
    note: Callable[[Answered], None] = lambda _: None,
) -> Evaluation:
    """Generate and score `samples` answers to each question, at most `concurrency` at a time.

    `note` is called with each answer as it arrives. If `ask` raises an error, cancels the other calls and raises an
    exception group with the error.
    """
    slots = asyncio.Semaphore(concurrency)
    done, total = 0, len(questions) * samples
    noun = "questions" if samples == 1 else "answers"
    status.show(f"evaluates 0/{total} {noun}", STAGE)

    async def answer(question: Question, sample: int) -> Answered:
        nonlocal done
        async with slots:
            trajectory = await ask(question, sample, temperature)
        done += 1
        status.show(f"evaluates {done}/{total} {noun}", STAGE)
        answered = Answered(question, trajectory, score(trajectory, question))
        note(answered)
        return answered

    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(answer(question, sample)) for question in questions for sample in range(samples)]
    return Evaluation(step, tuple(task.result() for task in asked))
