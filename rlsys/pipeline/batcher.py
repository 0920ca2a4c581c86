"""Which samples share a micro-batch, and on which data-parallel rank.

Invariants: every sample is in exactly one micro-batch; a micro-batch's rows times its width stays
within the token budget unless a single sample exceeds it; every rank gets equally many micro-batches
(a pipeline- or data-parallel rank with fewer would leave the others waiting), some of them empty;
the padded tokens of two ranks differ by at most those of the largest micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlsys.pipeline.micro_batch import round_up

Plan = list[list[list[int]]]
"""[rank][micro-batch] -> indices into the samples."""


def plan_micro_batches(
    lengths: Sequence[int], budget_tokens: int, ranks: int = 1, multiple_of: int = 1
) -> Plan:
    """Fill micro-batches with samples of like length, and deal them to `ranks`, the largest first.

    Each micro-batch goes to the rank with the fewest padded tokens among those with the fewest
    micro-batches. So every round of dealing gives more to who has less, which bounds the difference.
    """

    def cost(batch: list[int]) -> int:
        return len(batch) * round_up(lengths[batch[0]], multiple_of)

    plan: Plan = [[] for _ in range(ranks)]
    load = [0] * ranks
    for batch in sorted(_pack(lengths, budget_tokens, multiple_of), key=cost, reverse=True):
        rank = min(range(ranks), key=lambda r: (len(plan[r]), load[r]))
        plan[rank].append(batch)
        load[rank] += cost(batch)
    deepest = max((len(batches_of_rank) for batches_of_rank in plan), default=0)
    for batches_of_rank in plan:
        batches_of_rank.extend([] for _ in range(deepest - len(batches_of_rank)))
    return plan


def _pack(lengths: Sequence[int], budget_tokens: int, multiple_of: int) -> list[list[int]]:
    """Micro-batches of indices, each led by its longest sample."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches:
            width = round_up(lengths[batches[-1][0]], multiple_of)
            if (len(batches[-1]) + 1) * width <= budget_tokens:
                batches[-1].append(index)
                continue
        batches.append([index])
    return batches
