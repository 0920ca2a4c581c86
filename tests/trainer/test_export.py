"""What leaves the actor and what the log-prob worker makes of it, where the memory between them is tight."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rlsys.config.schema import Dtype, Layers, ModelConfig, OptimizerConfig, ParallelConfig, SyncMode
from rlsys.errors import RunError
from rlsys.trainer import export as export_module
from rlsys.trainer import mesh
from rlsys.trainer.actor import Actor
from rlsys.trainer.log_prob import LogProbWorker
from rlsys.weights.transport import Bucket, digest, pack, unpack
from rlsys.weights.weight_map import largest_tensor_bytes
from tests.support.ports import free_port
from tests.trainer import reference
from tests.trainer.harness import OBJECTIVE, Layout, digest_of, export, rendezvous, run_group
from tests.weights import ends


def _in_process(rank: int, _: int, model: str, other: str, ports: list[int]) -> None:
    config = ModelConfig(model, Layers.local, Dtype.float32)
    place = rendezvous(rank, 1, ports[0])
    actor = Actor(place, config, ParallelConfig(), OptimizerConfig(), OBJECTIVE, 3, seed=1)
    actor.load_hf(other)
    smallest = largest_tensor_bytes(model, config.dtype)
    buckets = export(actor, smallest)
    assert max(bucket.data.nbytes for bucket in buckets) == smallest
    with pytest.raises(RunError, match=rf"cluster.sync_bucket_bytes={smallest - 1} is too small .*_proj.*Raise it"):
        export(actor, smallest - 1)
    mesh.stop()

    probe = reference.make_batches(2, seed=3)
    worker = LogProbWorker(rendezvous(rank, 1, ports[1]), config, ParallelConfig(), 0.7, seed=1)
    worker.begin_update()
    # Query, key and value come apart, and all buckets lie in the same memory one after the other.
    memory = np.empty(smallest, dtype=np.uint8)
    tensors = reference.named_tensors(reference.load(Path(other)))
    single = list(pack(tensors.items(), bucket_bytes=1))
    for bucket in single:
        memory[: bucket.data.nbytes] = bucket.data
        worker.take_bucket(Bucket(memory[: bucket.data.nbytes], bucket.records))
    memory[:] = 0
    assert digest_of(single) == digest_of(buckets)
    worker.finish_update(1, digest_of(single))
    found = worker.compute(probe)
    assert found is not None
    for batch, logprobs in zip(probe, found, strict=True):
        with torch.no_grad():
            expected = reference.logprobs_and_entropy(reference.load(Path(other)), batch.tokens)[0].numpy()
        np.testing.assert_allclose(logprobs.policy[batch.loss_mask], expected[batch.loss_mask], rtol=2e-5, atol=2e-5)
    mesh.stop()


def test_buckets_are_as_small_as_the_model_allows_and_may_lie_in_one_memory(tmp_path: Path) -> None:
    model = reference.make_model(reference.tiny_config(), tmp_path / "model")
    other = reference.make_model(reference.tiny_config(), tmp_path / "other", seed=5)
    run_group(_in_process, 1, str(model), str(other), [free_port(), free_port()])


def _every_stage_sends(rank: int, world_size: int, layout: Layout, models: list[str], folder: str, port: int) -> None:
    export_module.open_sender = ends.sender_of
    config = ModelConfig(models[0], Layers.local, Dtype.float32)
    place = rendezvous(rank, world_size, port)
    actor = Actor(place, config, layout.parallel, OptimizerConfig(), OBJECTIVE, 3, seed=1)
    spec = ends.spec(SyncMode.ipc, 1, Path(folder), bucket_bytes=50_000)
    receiver = ends.receiver_of(replace(spec, rank=1))
    speed = actor.open_export(spec)
    assert (speed is not None) == (rank == 0), "one measures, though the first of each stage sends"
    taken = 0
    for model in models:
        actor.load_hf(model)
        actor.begin_export()
        found, checksums = {}, {}
        pids = set()
        while True:
            # As a driver does it: the next is asked for before the last is read.
            handle = actor.next_handle(taken)
            done = [handle is None]
            dist.broadcast_object_list(done, src=0)
            if done[0]:
                break
            if handle is not None:
                assert handle.number == taken + 1
                pids.add(handle.where.pid)
                for record, tensor in unpack(receiver.receive(handle)):
                    found[record.name], checksums[record.name] = tensor.clone(), record.checksum
                receiver.release()
            taken += 1
        whole = actor.end_export(taken)
        if rank == 0:
            expected = reference.named_tensors(reference.load(Path(model)))
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
            assert whole == digest(checksums)
            assert len(pids) == layout.pp, "each stage hands out its own"
    mesh.stop()


@pytest.mark.parametrize(
    "layout",
    [Layout(pp=2, pp_layers=(2, 1), tied=False), Layout(tp=2, pp=2, pp_layers=(1, 2))],
    ids=["two stages", "cut stages"],
)
def test_each_stage_hands_its_part_out_where_it_lies(layout: Layout, tmp_path: Path) -> None:
    shape = reference.tiny_config(tied=layout.tied)
    models = [str(reference.make_model(shape, tmp_path / str(seed), seed=seed)) for seed in (1, 2)]
    run_group(_every_stage_sends, layout.processes, layout, models, str(tmp_path), free_port())
