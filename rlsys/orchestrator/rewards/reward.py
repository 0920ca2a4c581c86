"""What an episode is worth: the weighted sum of the terms that the settings name, and where in it they fell.

Invariants: every term gives one finite value a turn, at least one; `turn_rewards` add up to `reward` but for
rounding. `reward` is made from the terms' totals alone, so that episodes with the same totals have the same
reward to the last bit, whichever turns they fell on: a group without spread is seen to have none.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence

import httpx

from rlsys.config.schema import CompatConfig, RewardConfig, TaskConfig
from rlsys.data.group import ANSWER_TERMS
from rlsys.data.question import Question
from rlsys.data.trajectory import Trajectory
from rlsys.errors import UserError
from rlsys.orchestrator.rewards.check import check_terms, weights_of
from rlsys.orchestrator.rewards.judge import Judge
from rlsys.orchestrator.rewards.own import Calls, OwnTerm
from rlsys.orchestrator.rewards.reading import Reader, Reading
from rlsys.orchestrator.rewards.scored import Scored
from rlsys.orchestrator.rewards.terms import JUDGE, PureTerm, pure_terms
from rlsys.rollout.tools.interface import tool_tags

Term = Callable[[Reading], Awaitable[Sequence[float]]]
"""[slots] values, unweighted."""


class Rewards:
    """Scores episodes, for one event loop; `close` it at the end.

    `transport` takes the place of the network for the judge. Raises UserError with one line for each problem of
    the settings.
    """

    def __init__(
        self,
        config: RewardConfig,
        task: TaskConfig,
        compat: CompatConfig,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        problems = list(check_terms(config, task))
        if problems:
            raise UserError("\n".join(problems))
        self._config = config
        self._weights = weights_of(config)
        self._reader = Reader(task.tags, compat, tool_tags(task.tools))
        self._judge = Judge(config.judge, transport) if JUDGE in self._weights else None
        self._calls = Calls(config.own_timeout_s) if any("." in name for name in self._weights) else None
        pure = pure_terms(config, task)
        self._terms = {name: self._term(name, pure) for name in self._weights}

    async def score(self, question: Question, trajectory: Trajectory) -> Scored:
        """The reward of one episode of `question`.

        Raises RunError where the judge does not answer or a term of the user's own fails.
        """
        reading = self._reader.read(question, trajectory)
        values = {name: self._bounded(name, reading, await term(reading)) for name, term in self._terms.items()}
        parts = {name: math.fsum(of_turns) for name, of_turns in values.items()}
        return Scored(
            reward=math.fsum(self._weights[name] * part for name, part in parts.items()),
            turn_rewards=tuple(
                math.fsum(self._weights[name] * of_turns[slot] for name, of_turns in values.items())
                for slot in range(reading.slots)
            ),
            parts=parts,
        )

    def figures(self) -> dict[str, float]:
        """Figures of the judge since the last call, see `Judge.figures`; empty without one."""
        return self._judge.figures() if self._judge else {}

    async def close(self) -> None:
        """Give connections and files back. A function of the user's own that runs is not waited for."""
        if self._calls:
            self._calls.close()
        if self._judge:
            await self._judge.close()

    def _term(self, name: str, pure: Mapping[str, PureTerm]) -> Term:
        if name == JUDGE and self._judge:
            return self._judge
        return OwnTerm(name, self._calls) if self._calls and "." in name else _awaited(pure[name])

    def _bounded(self, name: str, reading: Reading, values: Sequence[float]) -> Sequence[float]:
        """`values` of an answer's term, no more than `many_answers_score` for an episode of too many answers."""
        most = self._config.max_answer_tags
        if most is None or name not in ANSWER_TERMS or reading.answer_tags <= most:
            return values
        return [*values[:-1], min(values[-1], self._config.many_answers_score)]


def _awaited(term: PureTerm) -> Term:
    async def call(reading: Reading) -> Sequence[float]:
        return term(reading)

    return call
