"""Placement: which device ranks a group has, read from text such as "0-3" or "0-1,4".

Pure. A group's ranks are distinct; their order is the order of its worker ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import combinations

from rlsys.errors import UserError

GROUPS = ("actor", "inference", "rollout")
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


def parse_placement(placement: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Ranks of every group; all groups must be placed and no other."""
    unknown = sorted(set(placement) - set(GROUPS))
    if unknown:
        raise UserError(f"cluster.placement.{unknown[0]} is not a group: the groups are {', '.join(GROUPS)}.")
    missing = [group for group in GROUPS if group not in placement]
    if missing:
        raise UserError(f"cluster.placement.{missing[0]} is missing: give the group's device ranks.")
    return {group: parse_ranks(placement[group], f"cluster.placement.{group}") for group in GROUPS}


def overlaps(ranks: Mapping[str, tuple[int, ...]]) -> list[tuple[str, str, list[int]]]:
    """Pairs of groups that share devices, with the shared ranks."""
    shared = ((a, b, sorted(set(ranks[a]) & set(ranks[b]))) for a, b in combinations(sorted(ranks), 2))
    return [(a, b, both) for a, b, both in shared if both]
