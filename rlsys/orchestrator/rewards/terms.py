"""The terms of the reward that are worked out from an episode alone. Pure.

A term gives [slots] finite values, one a turn and at least one; the weights are not in them. What speaks of the
whole episode stands on its last turn. Formulas and sources are in docs/rewards.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rlsys.config.schema import RewardConfig, TaskConfig
from rlsys.data.answers import exact_match, f1, sub_exact_match
from rlsys.data.trajectory import Action
from rlsys.orchestrator.rewards.reading import Reading, searched

PureTerm = Callable[[Reading], Sequence[float]]

JUDGE = "judge"
"""The built-in term that is not pure."""
ALIASES = {"correct_answer": "exact_match"}
"""Second name -> first name."""
PENALTIES = frozenset({"search_penalty", "invalid_format", "invalid_turns", "overlong"})
"""Those that grow with what is not wanted: their weights are below 0."""


def pure_terms(config: RewardConfig, task: TaskConfig) -> Mapping[str, PureTerm]:
    """Name -> term, of all that are built in but the judge."""
    return {
        "exact_match": _of_answer(exact_match),
        "correct_answer": _of_answer(exact_match),
        "sub_em": _of_answer(sub_exact_match),
        "f1": _of_answer(f1),
        "format": lambda reading: reading.at_end(format_score(reading, config)),
        "retrieval": _retrieval,
        "search_penalty": _searches,
        "invalid_format": lambda reading: reading.at_end(float(not reading.well_formed)),
        "invalid_turns": _invalid_turns,
        "overlong": lambda reading: reading.at_end(_overlong(reading, config, task)),
    }


def format_score(reading: Reading, config: RewardConfig) -> float:
    """Search-R1's qa_em_format, for the settings `structure_score`, `final_score` and `retrieval_score`."""
    right = reading.answer is not None and exact_match(reading.answer, reading.question.answers)
    if right:
        return 1.0 if reading.well_formed else 1.0 - config.structure_score
    if reading.well_formed:
        return config.structure_score + config.retrieval_score * (reading.found_in is not None)
    return config.final_score if reading.answer is not None else 0.0


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """DAPO's soft over-long punishment (2503.14476, eq. 13) with its sign turned: from 0 to 1."""
    return min(1.0, max(0.0, (length - (limit - buffer)) / buffer))


def _of_answer(measure: Callable[[str, Sequence[str]], float]) -> PureTerm:
    """The term that compares the answer with the accepted ones; 0 without an answer."""

    def term(reading: Reading) -> list[float]:
        answer = reading.answer
        return reading.at_end(0.0 if answer is None else float(measure(answer, reading.question.answers)))

    return term


def _retrieval(reading: Reading) -> list[float]:
    return [float(slot == reading.found_in) for slot in range(reading.slots)]


def _searches(reading: Reading) -> list[float]:
    return [float(searched(turn)) for turn in reading.trajectory.turns] or [0.0]


def _invalid_turns(reading: Reading) -> list[float]:
    return [float(turn.action is Action.INVALID) for turn in reading.trajectory.turns] or [0.0]


def _overlong(reading: Reading, config: RewardConfig, task: TaskConfig) -> float:
    trajectory, limit = reading.trajectory, config.overlong_limit
    if limit is None:
        limit = task.max_total_tokens - trajectory.prompt_length
    return overlong_penalty(len(trajectory.tokens) - trajectory.prompt_length, limit, config.overlong_buffer)
