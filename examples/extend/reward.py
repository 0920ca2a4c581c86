"""A reward term: a penalty that grows with the number of searches beyond a budget.

PYTHONPATH=$PWD rlsys train -c searchr1_tiny_cpu \
    reward.terms='{exact_match: 1, examples.extend.reward.searches_above: {weight: -0.1, budget: 2}}'
"""

from typing import Annotated

from annotated_types import Ge

from rlsys.data.question import Question
from rlsys.data.trajectory import Trajectory


def searches_above(question: Question, trajectory: Trajectory, *, budget: Annotated[int, Ge(0)] = 1) -> float:  # noqa: ARG001
    """Return the number of searches above `budget`; return a list with one value per turn to credit turns."""
    return float(max(0, trajectory.searches - budget))
