"""Tests of the host memory of a run by hand."""

from __future__ import annotations

import pytest

from rlsys.cluster.planning.host import host_memory
from rlsys.weights.weight_map import read_architecture
from scripts.memory_tables import shape_of
from tests.support.composed import composed

WEIGHTS, GIB = 2 * 3_085_938_688, 2**30
"""Bytes of the weights of Qwen2.5-3B in bfloat16."""
SAVED = (2 + 4 + 8) / 2 * WEIGHTS
CPU = ["cluster.device=cpu", "cluster.sync_mode=tensor"]
ADAPTED = ["model.path=Qwen2.5-3B-Instruct", "model.lora.rank=8"]


@pytest.mark.parametrize(
    ("experiment", "overrides", "pinned", "staged", "pushed", "buckets", "saved", "shared"),
    [
        # Disaggregated, by CUDA IPC: NCCL needs host memory, and checkpoints. Of each parameter, these have a weight in
        # bfloat16 and in float32, and two moments.
        ("3b_1node", [], 0, 0, WEIGHTS, 0, SAVED, 1),
        # Two engines stage one copy each; the sender has two buckets.
        ("3b_1node", ["cluster.sync_mode=tensor"], 0, 2 * WEIGHTS, WEIGHTS, 4, SAVED, 1),
        # On a CPU, engines load two buckets at a time from shared memory; Ray needs half a GiB of it.
        ("3b_1node", CPU, 0, 2 * WEIGHTS, WEIGHTS, 4, SAVED, 0.5 + 2 * 2 * 2),
        # A reference that moves has a weight in bfloat16 and in float32; one of the actor's own is saved if frozen, too.
        ("3b_1node", ["algorithm.ref_policy_ema_tau=0.5"], 0, 0, WEIGHTS, 0, SAVED + 3 * WEIGHTS, 1),
        ("3b_1node", ["algorithm.kl_estimator={kind: full_forward}"], 0, 0, WEIGHTS, 0, SAVED + WEIGHTS, 1),
        # The whole model is smaller than a bucket.
        ("3b_1node", [*CPU, f"cluster.sync_bucket_bytes={8 * GIB}"], 0, 2 * WEIGHTS, WEIGHTS, 16, SAVED, None),
        # Of each GPU: 2 bytes of policy and of reference, 2 bytes and an eighth of 12 of the actor, 2 of the engine.
        ("3b_1node_colocated", [], 8 * WEIGHTS * (4 + 2 + 12 / 8 + 2) / 2, 8 * WEIGHTS, 0, 0, SAVED, 1),
        # All of the actor, which alone saves, is on the first machine. On the second are five inference ranks and three
        # engines; NCCL needs no buckets in host memory. With adapters, the second needs more.
        ("7b_2node", ["model.path=Qwen2.5-3B-Instruct"], 0, 0, WEIGHTS, 0, SAVED, 1),
        ("7b_2node", ADAPTED, 0, 3 * WEIGHTS, 0, 0, 0, 1),
        ("7b_2node", [*ADAPTED, "cluster.sync_mode=disk"], 0, 3 * WEIGHTS, 0, 16, 0, 1),
    ],
)
def test_host_memory_by_hand(
    experiment: str,
    overrides: list[str],
    pinned: float,
    staged: float,
    pushed: float,
    buckets: float,
    saved: float,
    shared: float | None,
) -> None:
    config = composed(*overrides, name=f"searchr1_qwen2.5_{experiment}")
    found = host_memory(config, read_architecture(shape_of(config.model.path)))
    assert (found.pinned, found.staged, found.saved) == pytest.approx((pinned, staged, saved), rel=1e-3)
    assert found.pushed == pytest.approx(pushed, rel=1e-3), "what the actor has pushed, unless it is colocated"
    assert found.buckets == buckets * GIB
    assert found.shared == pytest.approx(GIB / 2 + 2 * 2 * WEIGHTS if shared is None else shared * GIB)
