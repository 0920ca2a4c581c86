"""Placement: which device ranks a group has, read from text such as "0-3" or "0-1,4".

Pure. A group's ranks are distinct; their order is the order of its worker ranks. A critic that is not placed
lives on the actor's ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import combinations

from rlsys.errors import UserError

GROUPS = ("actor", "inference", "rollout")
CRITIC = "critic"
_PART = re.compile(r"(\d+)(?:-(\d+))?")


def parse_ranks(text: str, key: str) -> tuple[int, ...]:
    """Read device ranks; `key` names the setting in the error's sentence."""
    ranks: list[int] = []
    for part in str(text).split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise UserError(f'{key}="{text}" is not a list of ranks: write e.g. "0-3" or "0,2-3".')
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UserError(f'{key}="{text}" counts down from {first} to {last}: write "{last}-{first}".')
        ranks.extend(range(first, last + 1))
    if len(set(ranks)) != len(ranks):
        raise UserError(f'{key}="{text}" names a rank twice: name each rank once.')
    return tuple(ranks)


def parse_placement(placement: Mapping[str, str], with_critic: bool = False) -> dict[str, tuple[int, ...]]:
    """Ranks of every group; all must be placed but the critic, where there is one, and no other."""
    unknown = sorted(set(placement) - {*GROUPS, CRITIC})
    if unknown:
        groups = ", ".join((*GROUPS, CRITIC))
        raise UserError(f"cluster.placement.{unknown[0]} is not a group: the groups are {groups}.")
    missing = [group for group in GROUPS if group not in placement]
    if missing:
        raise UserError(f"cluster.placement.{missing[0]} is missing: give the group's device ranks.")
    if CRITIC in placement and not with_critic:
        raise UserError(
            "cluster.placement.critic is given but algorithm.baseline is not critic: leave it out, or set "
            "algorithm.baseline=critic."
        )
    ranks = {group: parse_ranks(placement[group], f"cluster.placement.{group}") for group in GROUPS}
    if with_critic:
        placed = placement.get(CRITIC)
        ranks[CRITIC] = ranks["actor"] if placed is None else parse_ranks(placed, f"cluster.placement.{CRITIC}")
    return ranks


def overlaps(ranks: Mapping[str, tuple[int, ...]]) -> list[tuple[str, str, list[int]]]:
    """Pairs of groups that share devices, with the shared ranks.

    A critic on all of the actor's ranks and no other is as one group with it.
    """
    together = CRITIC in ranks and set(ranks[CRITIC]) == set(ranks["actor"])
    apart = sorted(set(ranks) - {CRITIC} if together else ranks)
    shared = ((a, b, sorted(set(ranks[a]) & set(ranks[b]))) for a, b in combinations(apart, 2))
    return [(a, b, both) for a, b, both in shared if both]
