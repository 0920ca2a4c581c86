"""Which layers a pipeline stage holds."""

from __future__ import annotations

from collections.abc import Sequence

from rlsys.errors import UserError


def stage_layers(layers: int, pp: int, pp_layers: Sequence[int] | None = None) -> list[range]:
    """The global layer numbers of each of `pp` stages, in order.

    `pp_layers` gives uneven stages; without it the layers must divide evenly. Raises UserError.
    """
    if pp_layers is None:
        if layers % pp:
            raise UserError(
                f"pp is {pp}, which does not divide the model's {layers} layers; set pp_layers to {pp} counts."
            )
        pp_layers = [layers // pp] * pp
    if len(pp_layers) != pp or sum(pp_layers) != layers or min(pp_layers) < 1:
        raise UserError(
            f"pp_layers is {list(pp_layers)}; give {pp} counts of at least 1 that add up to {layers} layers."
        )
    starts = [sum(pp_layers[:stage]) for stage in range(pp)]
    return [range(start, start + count) for start, count in zip(starts, pp_layers, strict=True)]
