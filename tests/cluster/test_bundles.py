"""Tests of device slots and bundles: random placements checked by reachability of ranks, examples, refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.cluster.planning.placement import DeviceSlot, Ranks, overlaps, parse_placement, plan_bundles
from rlsys.errors import Code
from tests.support.refusals import refused

Holdings = Mapping[str, Sequence[Ranks]]


@st.composite
def placements(draw: st.DrawFn) -> Holdings:
    """Draw up to four groups on up to eight ranks, each divided into processes of one to three ranks."""
    holdings = {}
    for group in "abcd"[: draw(st.integers(1, 4))]:
        ranks = draw(st.lists(st.integers(0, 7), unique=True, min_size=1))
        size = draw(st.integers(1, 3))
        holdings[group] = [tuple(ranks[i : i + size]) for i in range(0, len(ranks), size)]
    return holdings


@settings(max_examples=50)
@given(placements())
def test_processes_fill_their_bundles_and_no_more(holdings: Holdings) -> None:
    plan = plan_bundles(holdings)
    held = [(slot, ranks) for group in holdings for slot, ranks in zip(plan.slots[group], holdings[group], strict=True)]
    everywhere = sorted({rank for _, ranks in held for rank in ranks})

    def reachable(rank: int) -> list[int]:
        found = {rank}
        for _ in everywhere:
            found |= {other for _, ranks in held if found & set(ranks) for other in ranks}
        return sorted(found)

    bundles = {tuple(reachable(rank)) for rank in everywhere}
    assert plan.sizes == tuple(len(bundle) for bundle in sorted(bundles))
    for slot, ranks in held:
        bundle = sorted(bundles)[slot.bundle]
        assert tuple(bundle[device] for device in slot.devices) == ranks
        several = any(sum(rank in other for _, other in held) > 1 for rank in bundle)
        assert slot.pinned == (len(bundle) > 1 and several)
    for number, size in enumerate(plan.sizes):
        # Ray rounds shares to ten-thousandths.
        shares = [Fraction(round(slot.share * 10_000), 10_000) for slot, _ in held if slot.bundle == number]
        assert size - Fraction(len(shares), 10_000) <= sum(shares) <= size


def test_each_machine_of_known_size_has_a_bundle() -> None:
    """Two machines of four devices: the actor fills the first, an engine and a scorer use three of the second."""
    plan = plan_bundles({"rollout": [(5, 6)], "inference": [(4,)], "actor": [(0,), (1,), (2,), (3,)]}, 4)
    assert plan.sizes == (4, 3)
    assert plan.machines == (0, 1)
    assert plan.slots["rollout"] == (DeviceSlot(1, (1, 2), 2.0, pinned=False),)
    assert [slot.bundle for slot in plan.slots["actor"]] == [0] * 4


@pytest.mark.parametrize(
    ("placement", "code", "key"),
    [
        ({"actor": "0-"}, "malformed", "cluster.placement.actor"),
        ({"trainer": "0"}, "unknown", "cluster.placement.trainer"),
        ({"rollout": None}, "missing", "cluster.placement.rollout"),
        ({"critic": "0"}, "conflict", "cluster.placement.critic"),
    ],
)
def test_invalid_placement_is_refused(placement: dict[str, str | None], code: Code, key: str) -> None:
    whole = {"actor": "0", "inference": "1", "rollout": "2", **placement}
    with refused(code, key):
        parse_placement({group: ranks for group, ranks in whole.items() if ranks is not None})


def test_critic_has_the_ranks_of_the_actor_by_default() -> None:
    placement = {"actor": "1, 0", "inference": "3", "rollout": "5-6"}
    ranks = {"actor": (1, 0), "inference": (3,), "rollout": (5, 6)}
    assert parse_placement(placement, with_critic=True) == {**ranks, "critic": (1, 0)}


def test_critic_shares_all_ranks_of_the_actor_or_none() -> None:
    for critic, shared in (("0-1", []), ("7", []), ("0", [("actor", "critic", [0])])):
        placement = {"actor": "0-1", "inference": "2", "rollout": "3-6", "critic": critic}
        assert overlaps(parse_placement(placement, with_critic=True)) == shared
