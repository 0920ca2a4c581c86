"""How many parameters a model has. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from rlsys.weights.families import Architecture, rules_of


@dataclass(frozen=True, slots=True)
class Parameters:
    """How many a model has."""

    shared: int
    """All but the experts'."""
    experts: int

    @property
    def all(self) -> int:
        """Of the whole model."""
        return self.shared + self.experts


def count_parameters(model: Architecture) -> Parameters:
    """Of the model's tensors, a tied one once."""
    shared = experts = 0
    for rule in rules_of(model):
        numbers = sum(map(prod, rule.shapes)) * (model.layers if rule.per_layer else 1) * rule.exported
        if rule.per_expert:
            experts += numbers * model.experts
        else:
            shared += numbers
    return Parameters(shared, experts)
