"""Tests of the weight export: the smallest buckets, reused memory, and pipeline stages that each send their part."""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rlsys.config.schema import Dtype, ParallelConfig, SyncMode
from rlsys.errors import RunError
from rlsys.trainer import export as export_module
from rlsys.trainer.export import export_plan
from rlsys.trainer.log_prob import LogProbWorker
from rlsys.trainer.mesh import mesh_coordinates
from rlsys.weights.bucket import Bucket, digest, unpack
from rlsys.weights.weight_map import largest_tensor_bytes, read_architecture
from tests.support import tiny_configs
from tests.support import transport_ends as ends
from tests.support.megatron_processes import Group, on_ranks
from tests.support.tensors import digest_of, pack
from tests.trainer import reference
from tests.trainer.harness import export, local_model, make_actor


def _in_process(group: Group, model: Path, other: Path) -> None:
    actor = make_actor(group, model)
    actor.load_hf(other)
    smallest = largest_tensor_bytes(read_architecture(model), Dtype.float32)
    buckets = export(actor, smallest)
    assert max(bucket.data.nbytes for bucket in buckets) == smallest
    with pytest.raises(RunError, match=f"cluster.sync_bucket_bytes={smallest - 1}"):
        export(actor, smallest - 1)

    probe = reference.make_batches(2, seed=3)
    worker = LogProbWorker(group.meet(), local_model(model), ParallelConfig(), 0.7, seed=1)
    worker.begin_update()
    # Query, key and value arrive in separate buckets, which all use the same memory in turn.
    memory = np.empty(smallest, dtype=np.uint8)
    tensors = reference.named_tensors(reference.load(other))
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
            expected = reference.logprobs_and_entropy(reference.load(other), batch.tokens)[0].numpy()
        np.testing.assert_allclose(logprobs.policy[batch.loss_mask], expected[batch.loss_mask], rtol=2e-5, atol=2e-5)


def test_bucket_of_the_largest_tensor_suffices_and_its_memory_can_be_reused(tmp_path: Path) -> None:
    model = reference.make_model(tiny_configs.qwen2(), tmp_path / "model")
    other = reference.make_model(tiny_configs.qwen2(), tmp_path / "other", seed=5)
    on_ranks(_in_process, 1, model, other)


def _every_stage_sends(group: Group, models: list[Path], folder: Path, mode: SyncMode) -> None:
    # The process ends after this call, so the patches are never undone.
    patch = pytest.MonkeyPatch()
    patch.setattr(export_module, "open_sender", partial(ends.sender_of, on_device=True))
    patch.setattr(export_module, "bucket_memory", lambda nbytes, _: torch.empty(nbytes, dtype=torch.uint8))
    actor, rank = make_actor(group, models[0], ParallelConfig(pp=2, pp_layers=[2, 1])), group.rank
    spec = ends.spec(mode, 1, folder, bucket_bytes=50_000)
    receiver = ends.receiver_of(replace(spec, rank=1), on_device=True)
    speed = actor.open_export(spec)
    assert (speed is not None) == (rank == 0), "only rank 0 measures, though the first rank of each stage sends"
    taken = 0
    for model in models:
        actor.load_hf(model)
        actor.begin_export()
        found, checksums = {}, {}
        pids = set()
        while True:
            # Like the driver, ask for the next handle before the last one is read.
            handle = actor.next_handle(taken)
            done = [handle is None]
            dist.broadcast_object_list(done, src=0)
            if done[0]:
                break
            if handle is not None:
                assert handle.number == taken + 1
                pids.add(handle.location.pid)
                for record, tensor in unpack(receiver.receive(handle)):
                    found[record.name], checksums[record.name] = tensor.clone(), record.checksum
                receiver.release()
            taken += 1
        whole = actor.end_export(taken)
        if rank == 0:
            expected = reference.named_tensors(reference.load(model))
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
            assert whole == digest(checksums)
            assert len(pids) == (2 if mode is SyncMode.ipc else 1), "with ipc, each stage sends its own tensors"


@pytest.mark.parametrize("mode", [SyncMode.ipc, SyncMode.tensor], ids=str)
def test_tensors_of_all_pipeline_stages_arrive_in_device_memory(mode: SyncMode, tmp_path: Path) -> None:
    shape = tiny_configs.qwen2(tied=False)
    models = [reference.make_model(shape, tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    on_ranks(_every_stage_sends, 2, models, tmp_path, mode)


@pytest.mark.parametrize(("of_group", "expected"), [("nccl", "cpu:gloo,cuda:nccl"), ("gloo", "gloo")])
def test_stages_pass_tensors_on_over_nccl_on_gpus(
    of_group: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over gloo they would cross the bus twice and the network as TCP. Ranks 0 and 4 of two stages own the weights."""
    made: list[tuple[list[int], str]] = []
    monkeypatch.setattr(dist, "get_backend", lambda: of_group)
    monkeypatch.setattr(dist, "new_group", lambda ranks, backend: made.append((ranks, backend)))
    export_module.owners_group(mesh_coordinates(6, 8, ParallelConfig(tp=2, pp=2)))
    assert made == [([0, 4], expected)]


def _experts_come_together(group: Group, model: Path, ep: int) -> None:
    actor = make_actor(group, model, ParallelConfig(ep=ep))
    actor.load_hf(model)
    transfers: Counter[str] = Counter()

    def count(name: str) -> None:
        call = getattr(dist, name)

        def counted(*args: Any, **options: Any) -> Any:
            transfers[name] += 1
            return call(*args, **options)

        pytest.MonkeyPatch().setattr(dist, name, counted)

    for name in ("send", "recv", "isend", "irecv", "batch_isend_irecv", "all_gather", "all_to_all_single"):
        count(name)
    own = len(actor._policy.experts)
    foreign = [sum((entry.expert or 0) >= own for entry in run) for run in export_plan(actor._policy, 130_000)]
    buckets = export(actor, 130_000)
    assert transfers == {"all_to_all_single": sum(map(bool, foreign))}
    assert 1 < sum(map(bool, foreign)) < sum(foreign) / 2
    if group.rank == 0:
        found = {record.name: tensor for bucket in buckets for record, tensor in unpack(bucket)}
        expected = reference.named_tensors(reference.load(model))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("ep", [2, 4])
def test_experts_of_other_ranks_come_in_one_transfer_per_bucket(ep: int, tmp_path: Path) -> None:
    model = reference.make_model(tiny_configs.FAMILIES["qwen3_moe"](), tmp_path / "model")
    on_ranks(_experts_come_together, ep, model, ep)
