"""How questions are asked, as a user chooses it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rlsys.apps.evaluation.baselines import Baseline


class EngineName(StrEnum):
    """What generates."""

    sglang = "sglang"
    transformers = "transformers"


@dataclass(frozen=True, slots=True)
class How:
    """What is asked for answers, and with which prompts. How often and at which temperature, `eval` of the config says."""

    engine: EngineName = EngineName.sglang
    baseline: Baseline = Baseline.none


AS_TRAINED = How()
"""By the engine that training uses, with the prompts of the rows."""
