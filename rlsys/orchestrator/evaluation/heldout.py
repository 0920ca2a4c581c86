"""Asks held-out questions, and sums up the answers.

Pure but for the asking: `evaluate` takes any coroutine function that answers one question, so an
engine and plain transformers are measured by the same lines.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from rlsys.config.schema import RunConfig
from rlsys.data.question import Question, read_questions
from rlsys.data.trajectory import Finish, Trajectory
from rlsys.errors import UserError
from rlsys.observe import status
from rlsys.orchestrator.evaluation.scores import AnswerScores, scores_of
from rlsys.orchestrator.rewards.reward import Reader
from rlsys.rollout.tools.interface import tool_tags

STAGE = "rollout.evaluation"
"""Stage that reports how far an evaluation is."""
Ask = Callable[[Question, int, float], Awaitable[Trajectory]]
"""Answers a question, as number so many of it, at a temperature; 0 is greedy."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer to a question, and how it went."""

    question: Question
    trajectory: Trajectory
    scores: AnswerScores

    @property
    def em(self) -> float:
        """1 for a right answer, 0 for another or none."""
        return self.scores.em

    @property
    def finished(self) -> bool:
        """Whether the episode ended with an answer."""
        return self.trajectory.finish is Finish.ANSWER

    @property
    def tokens(self) -> int:
        """Tokens that were generated, in all turns."""
        return sum(turn.generated_tokens for turn in self.trajectory.turns)

    @property
    def search_errors(self) -> int:
        """Searches that failed."""
        return sum(bool(turn.tool_error) for turn in self.trajectory.turns)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Metrics over all answers; those to one question come one after the other."""

    step: int
    answered: tuple[Answered, ...]

    @property
    def em(self) -> float:
        """Share of exact matches, over all answers (avg@k)."""
        return fmean(answer.em for answer in self.answered)

    @property
    def em_by_hop(self) -> dict[str, float]:
        """Exact match by the question's `hops`, where the data set says them."""
        return {hop: part.em for hop, part in self.by_hop.items()}

    @property
    def searches(self) -> float:
        """Searches a question."""
        return fmean(answer.trajectory.searches for answer in self.answered)

    @property
    def finished(self) -> float:
        """Share of episodes that ended with an answer."""
        return fmean(answer.finished for answer in self.answered)

    @property
    def by_source(self) -> dict[str, Evaluation]:
        """The part of each data source, in the order in which they come."""
        return self._parts(lambda answer: answer.question.data_source)

    @property
    def by_hop(self) -> dict[str, Evaluation]:
        """The part of each number of hops, of questions whose data set says it."""
        parts = self._parts(lambda answer: str(answer.question.extra.get("hops", "")))
        return {hop: parts[hop] for hop in sorted(parts) if hop}

    @property
    def by_question(self) -> dict[str, tuple[Answered, ...]]:
        """The answers to each question, by its id."""
        return {uid: part.answered for uid, part in self._parts(lambda answer: answer.question.uid).items()}

    def metrics(self) -> dict[str, float]:
        """Metrics for trackers: of all answers, `em_hop_N` by hops, and `em/SOURCE` of each of several data sources."""
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
        """The metrics, flat enough for a table."""
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
    """A line of `answers.jsonl`, without what UTF-8 cannot say, which a model's tokenizer may produce."""
    question, trajectory = answer.question, answer.trajectory
    row = {
        "set": question.data_source,
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
    """The questions that a run holds out. Raises UserError if `compat.validation_batch` leaves none."""
    return whole_batches(read_questions(config.task.eval_path, config.eval.limit), config.compat.validation_batch)


def whole_batches(questions: list[Question], batch: int | None) -> list[Question]:
    """The questions that fill batches of `batch`; all without one. Raises UserError if they fill none."""
    if batch is None:
        return questions
    if len(questions) < batch:
        raise UserError(
            f"compat.validation_batch={batch} leaves out all of the {len(questions)} held-out questions: lower it, or "
            "set it to null.",
            code="conflict",
            key="compat.validation_batch",
        )
    return questions[: len(questions) // batch * batch]


def plain_score(trajectory: Trajectory, question: Question) -> AnswerScores:
    """The scores of the answer that the last turn holds."""
    return scores_of(trajectory.answer, question.answers)


def heldout_score(config: RunConfig) -> Callable[[Trajectory, Question], AnswerScores]:
    """The function that scores the answer that `compat.answer_over_prompt` says."""
    reader = Reader(config.task.tags, config.compat, tool_tags(config.task.tools))
    return lambda trajectory, question: scores_of(reader.read(question, trajectory).answer, question.answers)


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
    """Ask each of `questions` `samples` times, at most `concurrency` at a time; `score` says what an answer is worth.

    `note` gets every answer as soon as it is there. Raises what `ask` raises, once the other questions are cancelled.
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
