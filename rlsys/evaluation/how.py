"""How questions are asked, as a user chooses it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rlsys.config.schema import RunConfig
from rlsys.errors import UserError
from rlsys.evaluation.baselines import Baseline


class EngineName(StrEnum):
    """What generates."""

    sglang = "sglang"
    transformers = "transformers"


@dataclass(frozen=True, slots=True)
class How:
    """How questions are asked. Raises UserError for several answers that could not but be the same."""

    engine: EngineName = EngineName.sglang
    baseline: Baseline = Baseline.none
    samples: int = 1
    """Answers to each question."""
    temperature: float = 0.0
    """At which they are drawn; 0 is greedy."""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UserError(f"--samples {self.samples}: give 1 or more.")
        if self.temperature < 0:
            raise UserError(f"--temperature {self.temperature:g}: give 0, which is greedy, or more.")


GREEDY = How()
"""One greedy answer by SGLang to what the rows ask."""


def check_sampling(how: How, config: RunConfig) -> None:
    """Raise UserError for settings of `how` that contradict each other or `config`."""
    sampled = config.compat.sampled_validation
    if sampled and how.temperature:
        raise UserError(
            f"--temperature {how.temperature:g} and compat.sampled_validation=true, which draws as rollouts are drawn, "
            "contradict each other: leave one out."
        )
    if how.samples > 1 and not how.temperature and not sampled:
        raise UserError(
            f"--samples {how.samples} greedy answers would all be the same: give --temperature above 0, such as 1."
        )
