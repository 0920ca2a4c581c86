"""What leaves the actor and what the log-prob worker makes of it, where the memory between them is tight."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlsys.config.schema import Dtype, Layers, ModelConfig, OptimizerConfig, ParallelConfig
from rlsys.errors import RunError
from rlsys.megatron import parallel as groups
from rlsys.megatron.actor import Actor
from rlsys.megatron.log_prob_worker import LogProbWorker
from rlsys.weights.buckets import Bucket, pack
from rlsys.weights.sizes import largest_tensor_bytes
from tests.megatron import reference
from tests.megatron.harness import OBJECTIVE, digest_of, export, free_port, rendezvous, run_group


def _in_process(rank: int, _: int, model: str, other: str, ports: list[int]) -> None:
    config = ModelConfig(model, Layers.local, Dtype.float32)
    place = rendezvous(rank, 1, ports[0])
    actor = Actor(place, config, ParallelConfig(), OptimizerConfig(), OBJECTIVE, 3, seed=1)
    actor.load_hf(other)
    smallest = largest_tensor_bytes(model, config.dtype)
    buckets = export(actor, smallest)
    assert max(bucket.data.nbytes for bucket in buckets) == smallest
    with pytest.raises(
        RunError, match=rf"cluster.sync_bucket_bytes={smallest - 1} is too small .*_proj.*Raise it"
    ):
        export(actor, smallest - 1)
    groups.stop()

    probe = reference.make_batches(2, seed=3)
    worker = LogProbWorker(rendezvous(rank, 1, ports[1]), config, ParallelConfig(), 0.7, seed=1)
    worker.begin_update()
    # Query, key and value come apart, and all buckets lie in the same memory one after the other.
    memory = np.empty(smallest, dtype=np.uint8)
    tensors = reference.named_tensors(reference.load(Path(other)))
    single = list(pack(tensors.items(), bucket_bytes=1))
    for bucket in single:
        memory[: bucket.data.nbytes] = bucket.data
        worker.load_bucket(Bucket(memory[: bucket.data.nbytes], bucket.records))
    memory[:] = 0
    assert digest_of(single) == digest_of(buckets)
    worker.finish_update(1, digest_of(single))
    found = worker.compute(probe)
    assert found is not None
    for batch, logprobs in zip(probe, found, strict=True):
        with torch.no_grad():
            expected = reference.logprobs_and_entropy(reference.load(Path(other)), batch.tokens)[0].numpy()
        np.testing.assert_allclose(
            logprobs.policy[batch.loss_mask], expected[batch.loss_mask], rtol=2e-5, atol=2e-5
        )
    groups.stop()


def test_buckets_are_as_small_as_the_model_allows_and_may_lie_in_one_memory(tmp_path: Path) -> None:
    model = reference.make_model(reference.tiny_config(), tmp_path / "model")
    other = reference.make_model(reference.tiny_config(), tmp_path / "other", seed=5)
    run_group(_in_process, 1, str(model), str(other), [free_port(), free_port()])
