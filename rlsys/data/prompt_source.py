"""Hands out the questions of a run: each source in an endless, seeded shuffle, the sources mixed by their weights. Pure.

With `task.curriculum`, a source that is easy or hard has a lower weight. Its pass rate is that of its last rewarded prompt
groups. Groups that are rewarded during a step count from the end of the step on, in the order of their numbers, so the
order in which they end changes nothing.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil

from rlsys.config.derived import train_files
from rlsys.config.schema import CurriculumConfig, SourceConfig, TaskConfig
from rlsys.data.answers import passes
from rlsys.data.question import Question, read_questions
from rlsys.data.trajectory import Group
from rlsys.errors import UserError

_ADDED = {"added later": True}


@dataclass(frozen=True, slots=True)
class PassCount:
    """Episodes of a rewarded prompt group that passed."""

    prompt_group: int
    """Number of the group."""
    source: str
    passed: int
    episodes: int


@dataclass(frozen=True, slots=True)
class SourceProgress:
    """Checkpointed position in one of several sources."""

    position: int
    """Number of new questions handed out."""
    since: int
    """`position` when the weights changed last."""
    weight: str
    """Weight in force, as a fraction such as 3/10."""
    recent: tuple[PassCount, ...]
    """The last `task.curriculum.window` groups that count; none without a curriculum."""


@dataclass(frozen=True, slots=True)
class SourceState:
    """Checkpointed state of a PromptSource.

    It stores whole questions, so that a resumed run can hand out a question that the data file no longer has.
    """

    position: int
    """Number of new questions handed out, of all sources."""
    given_back: tuple[Question, ...]
    sources: Mapping[str, SourceProgress] = field(default_factory=dict, metadata=_ADDED)
    """Progress in each source; empty for a task without sources."""
    uncounted: tuple[PassCount, ...] = field(default=(), metadata=_ADDED)
    """Groups that were rewarded since the last step closed."""


def training_questions(task: TaskConfig) -> list[Question]:
    return [one for file in train_files(task) for one in read_questions(file.path, source=file.source)]


class PromptSource:
    """Hands out questions of several sources, each in an endless, seeded shuffle.

    Invariants:
    - Each epoch of a source hands out every question of it exactly once, in an order that depends only on seed, epoch and,
      with several sources, the name.
    - After any number of new questions since the weights changed last, each source has handed out its share of them, to
      within less than one question.
    - Questions given back are handed out again before new questions. `position` counts only the new questions.
    - A source restored from a `state()` continues at the same question.
    """

    def __init__(
        self, questions: Sequence[Question], seed: int, state: SourceState | None = None, task: TaskConfig | None = None
    ) -> None:
        """`task` has weights and curriculum; by default, all sources have the same weight.

        Raises UserError if `state` is of a task with other sources. Their weights may have changed.
        """
        self._task = TaskConfig() if task is None else task
        of_source: dict[str, list[Question]] = {}
        for question in questions:
            of_source.setdefault(question.source, []).append(question)
        known = state.sources or {"": SourceProgress(state.position, 0, "1", ())} if state else {}
        if known and known.keys() != of_source.keys():
            was, now = (", ".join(filter(None, sorted(names))) or "none" for names in (known, of_source))
            sentence = f"task.sources has {now}, and the run that is to be resumed had {was}: name the same, or start a new run."
            raise UserError(sentence, code="mismatch", key="task.sources")
        self._sources = {
            name: _Source(of_source[name], f"{seed}:{name}" if len(of_source) > 1 else f"{seed}", known.get(name))
            for name in sorted(of_source)
        }
        self._given_back = deque(state.given_back if state else ())
        self._uncounted = list(state.uncounted if state else ())
        self._weights = {name: Fraction(progress.weight) for name, progress in known.items()}
        self._weigh()

    @property
    def position(self) -> int:
        """Number of new questions handed out."""
        return sum(source.position for source in self._sources.values())

    def state(self) -> SourceState:
        """Return the state from which a source with the same questions, seed and task continues."""
        progress = {
            name: SourceProgress(source.position, source.since, str(self._weights[name]), source.recent)
            for name, source in self._sources.items()
            if name
        }
        return SourceState(self.position, tuple(self._given_back), progress, tuple(self._uncounted))

    def next(self) -> Question:
        """Return the question that was given back first, or else the next question of the source whose turn it is."""
        if self._given_back:
            return self._given_back.popleft()
        drawn = {name: source.position - source.since for name, source in self._sources.items()}
        return self._sources[next_source(self._weights, drawn)].next()

    def give_back(self, question: Question) -> None:
        """Queue `question` to be handed out again, after those given back earlier."""
        self._given_back.append(question)

    def observe(self, prompt_group: int, group: Group) -> None:
        """Count the episodes of a rewarded prompt group that passed, for the curriculum."""
        source = self._task.sources.get(group.question.source)
        if source is not None and _judges(self._task.curriculum):
            passed = sum(passes(sample, group.question, source.pass_reward) for sample in group.samples)
            self._uncounted.append(PassCount(prompt_group, group.question.source, passed, len(group.samples)))

    def end_step(self) -> None:
        """Let the groups that were observed since the last call change the weights."""
        for count in sorted(self._uncounted, key=lambda count: count.prompt_group):
            source = self._sources[count.source]
            source.recent = (*source.recent, count)[-self._task.curriculum.window :]
        self._uncounted = []
        self._weigh()

    def metrics(self) -> dict[str, float]:
        """Return the share of each source in the new prompts; empty without a curriculum."""
        total = sum(self._weights.values())
        shares = {f"sources/{name}/share": float(weight / total) for name, weight in self._weights.items()}
        return shares if _judges(self._task.curriculum) else {}

    def _weigh(self) -> None:
        """Compute the weights. If they have changed, shares count from now on."""
        weights = {}
        for name, source in self._sources.items():
            given = self._task.sources.get(name, SourceConfig())
            weights[name] = _decimal(given.weight) * _factor(source.recent, self._task.curriculum)
        if weights != self._weights:
            self._weights = weights
            for source in self._sources.values():
                source.since = source.position


class _Source:
    """Endless shuffle of the questions of one source."""

    def __init__(self, questions: Sequence[Question], seed: str, progress: SourceProgress | None) -> None:
        self.position = progress.position if progress else 0
        self.since = progress.since if progress else 0
        self.recent = progress.recent if progress else ()
        self._questions, self._seed = questions, seed
        self._epoch = -1
        self._order: list[int] = []

    def next(self) -> Question:
        epoch, index = divmod(self.position, len(self._questions))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._questions)))
            random.Random(f"{self._seed}:{epoch}").shuffle(self._order)
        self.position += 1
        return self._questions[self._order[index]]


def next_source(weights: Mapping[str, Fraction], drawn: Mapping[str, int]) -> str:
    """Return the source of the next draw, if each source was `drawn` so often by this rule, under the same weights.

    Of the sources that are below their share of all draws, the next one included, it is the one that must be drawn first
    to stay above its share minus 1. Earliest deadline first meets all such deadlines, so the draws of each source differ
    from its share by less than 1 (Tijdeman, The chairman assignment problem, Discrete Mathematics 32, 1980).
    """
    draw, total = sum(drawn.values()) + 1, sum(weights.values())
    shares = {name: weight / total for name, weight in weights.items()}
    deadlines = {name: ceil((drawn[name] + 1) / share) for name, share in shares.items() if drawn[name] < draw * share}
    return min(deadlines, key=lambda name: (deadlines[name], name))


def _factor(recent: Sequence[PassCount], curriculum: CurriculumConfig) -> Fraction:
    """Return the factor on the weight of a source whose last groups are `recent`; a resumed run may have a smaller window."""
    recent = recent[-curriculum.window :]
    if len(recent) < curriculum.window:
        return Fraction(1)
    rate = Fraction(sum(one.passed for one in recent), sum(one.episodes for one in recent))
    easy, hard = curriculum.easy_threshold, curriculum.hard_threshold
    is_easy = easy is not None and rate >= _decimal(easy)
    is_hard = hard is not None and rate <= _decimal(hard)
    return _decimal(curriculum.factor) if is_easy or is_hard else Fraction(1)


def _judges(curriculum: CurriculumConfig) -> bool:
    """True if there is a curriculum."""
    return curriculum.easy_threshold is not None or curriculum.hard_threshold is not None


def _decimal(number: float) -> Fraction:
    """Return the number as it is written: 0.1 is one tenth."""
    return Fraction(str(number))
