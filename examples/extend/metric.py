"""A metric: how long the answers are.

PYTHONPATH=$PWD rlsys train -c searchr1_tiny_cpu tracking.metrics=[examples.extend.metric.answer_words]
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Annotated

from annotated_types import Ge

from rlsys.components import measured_in
from rlsys.data.trajectory import Group


@measured_in({"mean": "words", "long_share": "share"})
def answer_words(groups: Sequence[Group], *, long: Annotated[int, Ge(1)] = 10) -> Mapping[str, float]:
    """Return the mean number of words of an answer, and the share of answers with more than `long` words."""
    answers = [sample.trajectory.answer for group in groups for sample in group.samples]
    words = [len(answer.split()) for answer in answers if answer is not None] or [0]
    return {"mean": fmean(words), "long_share": fmean(count > long for count in words)}
