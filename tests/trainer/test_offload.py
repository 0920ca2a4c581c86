"""Tests of offloading: memory is released, comes back bit for bit, and cannot be used in between."""

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlsys.config.schema import Dtype, ParallelConfig
from rlsys.errors import RunError
from rlsys.trainer.actor import Actor
from rlsys.trainer.log_prob import LogProbWorker, ReferencePlan
from rlsys.trainer.offload import HostBlocks, HostMemoryBackup, Offload
from rlsys.weights.transport import open_sender
from tests.support import tiny_configs
from tests.support.megatron_processes import Group, on_ranks
from tests.support.tensors import digest_of
from tests.trainer import reference
from tests.trainer.harness import OPTIMIZER, export, local_model, make_actor, shared_memory, weights_of

AVERAGE = ReferencePlan(tau=0.5, update_period=2, reset_period=None)
STEPS = [reference.make_batches(4, seed=step) for step in range(3)]
MIB = 2**20
PP2 = ParallelConfig(pp=2, pp_layers=[2, 1])


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def test_offloaded_bytes_come_back_and_views_stay_views(tmp_path: Path) -> None:
    # Random bytes include all kinds of NaN, which a copy by value could change.
    flat = torch.randint(0, 256, (MIB,), dtype=torch.uint8).view(torch.bfloat16)
    front, back = flat[:1000].view(10, 100), flat[1000:200_000]
    pages = flat.view(torch.uint8).numpy()  # from now on, torch cannot resize the storage
    alone, zeros = torch.randn(3333, 3), torch.zeros(5000)
    before = raw(flat), raw(alone)
    memory = Offload("The test", lambda: (front, alone, flat, back), lambda: (zeros[10:], zeros, back))

    assert memory.restore().bytes == 0
    away = memory.offload(tmp_path / "made")
    assert memory.offload(tmp_path).bytes == 0, "it is offloaded already"
    sizes = [tensor.untyped_storage().nbytes() for tensor in (flat, alone, zeros)]
    assert sum(sizes) - 2 * 4096 * len(sizes) <= away.bytes <= sum(sizes)
    assert list((tmp_path / "made").iterdir()) == [], "the file must be unlinked"
    assert int((pages != 0).sum()) < 2 * 4096, "all pages but the ends are released"
    for tensor in (flat, alone, zeros):
        tensor.fill_(1)  # `restore` must overwrite this
    there = memory.restore()
    assert there.bytes == away.bytes
    assert memory.restore().bytes == 0, "it is restored already"
    assert (raw(flat), raw(alone)) == before
    assert not zeros.any()
    front.fill_(7)
    assert (flat[:1000] == 7).all()
    assert front.data_ptr() + 2000 == back.data_ptr()


@contextmanager
def _files_of_at_most(nbytes: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_full_disk_releases_nothing(tmp_path: Path) -> None:
    tensors = [torch.randn(MIB // 4) for _ in range(3)]
    before = [raw(tensor) for tensor in tensors]
    memory = Offload("The test", lambda: tensors)
    with _files_of_at_most(2 * MIB), pytest.raises(RunError, match=f"{tmp_path}"):
        memory.offload(tmp_path)
    assert memory.away is None
    assert [raw(tensor) for tensor in tensors] == before
    memory.offload(tmp_path)
    memory.restore()
    assert [raw(tensor) for tensor in tensors] == before


def target(link: Path) -> str:
    """Return what a link leads to; empty if it has gone meanwhile."""
    with suppress(FileNotFoundError):
        return os.readlink(link)
    return ""


def test_failed_restore_can_be_repeated(tmp_path: Path) -> None:
    tensor, zeros = torch.randn(MIB), torch.zeros(10)
    before = raw(tensor)
    memory = Offload("The test", lambda: [tensor], lambda: [zeros])
    memory.offload(tmp_path)
    (file,) = [file for file in Path("/proc/self/fd").iterdir() if str(tmp_path) in target(file)]
    content = file.read_bytes()
    os.truncate(file, MIB)
    with pytest.raises(RunError, match="The test"):
        memory.restore()
    assert int((tensor != 0).sum()) < 4096, "the part that was restored is released again"
    assert memory.away is not None
    file.write_bytes(content)
    memory.restore()
    assert raw(tensor) == before
    assert not zeros.any()


@settings(max_examples=25)
@given(st.lists(st.integers(1, 40), max_size=8), st.integers(1, 50), st.integers(0, 2**32 - 1))
def test_storages_are_kept_in_host_blocks_of_any_size(sizes: list[int], block: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    host = HostBlocks(block)
    for _ in range(2):  # the second round reuses the blocks
        values = [random.integers(0, 256, size, dtype=np.uint8) for size in sizes]
        tensors = [torch.tensor(value) for value in values]
        views, zeros = [tensor[1:] for tensor in tensors], torch.zeros(7)
        saved = [tensor.untyped_storage() for tensor in tensors]
        away = HostMemoryBackup(saved, [zeros.untyped_storage()], host)
        assert away.nbytes == sum(sizes) + 28
        away.keep()
        away.release()
        assert [storage.nbytes() for storage in (*saved, zeros.untyped_storage())] == [0] * (len(sizes) + 1)
        away.fill()
        away.forget()
        for tensor, view, value in zip(tensors, views, values, strict=True):
            assert tensor.tolist() == value.tolist()
            assert view.tolist() == value[1:].tolist()
        assert not zeros.any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_offloading_frees_gpu_memory(tmp_path: Path) -> None:
    kept, zeros = torch.randn(40 * MIB, device="cuda"), torch.zeros(10 * MIB, device="cuda")
    step = torch.ones(())
    expected, used = kept.cpu(), torch.cuda.memory_reserved()
    memory = Offload("The test", lambda: (kept[5:], step), lambda: [zeros])
    for _ in range(2):
        memory.offload(tmp_path)
        assert used - torch.cuda.memory_reserved() >= 200 * MIB
        assert step.item() == 1.0, "a tensor in host memory stays there"
        memory.restore()
        assert torch.equal(kept.cpu(), expected)
        assert not zeros.any()


def _train(actor: Actor, step: int) -> dict[str, Tensor]:
    actor.accumulate(STEPS[step][actor.coords.dp :: actor.coords.dp_size])
    norm = actor.apply().grad_norm
    return {**weights_of(actor), "norm": torch.tensor(norm)}


def _offload_and_restore(actor: Actor) -> None:
    away, there = actor.offload(), actor.restore()
    assert away.bytes == there.bytes > 0


def _trained_with_and_without_offloading(
    group: Group, model: Path, out: Path, parallel: ParallelConfig, distributed: bool, dtype: Dtype
) -> tuple[list[Any], list[Any]]:
    """Weights after each step, without offloading and with it."""
    optimizer = replace(OPTIMIZER, distributed=distributed)
    new = partial(make_actor, group, model, parallel, optimizer, dtype=dtype, scratch=out / "scratch")
    actor = new()
    actor.load_hf(model)
    plain = [_train(actor, step) for step in range(3)]

    actor = new()
    _offload_and_restore(actor)  # when Adam has no state yet
    actor.load_hf(model)
    offloaded = [_train(actor, 0)]
    _offload_and_restore(actor)
    offloaded.append(_train(actor, 1))
    _offload_and_restore(actor)
    _offload_and_restore(actor)
    exported = {**weights_of(actor), "norm": plain[1]["norm"]}
    actor.begin_save(out / "checkpoint")
    actor.finish_save()
    offloaded.append(_train(actor, 2))

    actor = new()
    actor.load(out / "checkpoint")
    _offload_and_restore(actor)
    return [*plain, plain[1], plain[2]], [*offloaded, exported, _train(actor, 2)]


@pytest.mark.parametrize(
    ("processes", "parallel", "distributed", "dtype"),
    [
        pytest.param(2, ParallelConfig(), True, Dtype.float32, id="dp2"),
        pytest.param(4, PP2, True, Dtype.bfloat16, id="pp2 dp2 bfloat16", marks=pytest.mark.slow),
        pytest.param(2, ParallelConfig(tp=2), False, Dtype.bfloat16, id="not distributed", marks=pytest.mark.slow),
    ],
)
def test_run_that_offloads_equals_one_that_does_not(
    processes: int, parallel: ParallelConfig, distributed: bool, dtype: Dtype, tmp_path: Path
) -> None:
    model = reference.make_model(tiny_configs.qwen2(), tmp_path / "model")
    wanted, got = on_ranks(
        _trained_with_and_without_offloading, processes, model, tmp_path, parallel, distributed, dtype
    )[0]
    for number, (one, other) in enumerate(zip(wanted, got, strict=True)):
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name]), f"{number}: {name}"
    assert not torch.equal(wanted[0]["model.norm.weight"], wanted[2]["model.norm.weight"])


def _refused(*calls: Callable[[], object]) -> None:
    for call in calls:
        with pytest.raises(RunError, match="offloaded"):
            call()


def _refusals(group: Group, model: Path, out: Path) -> None:
    actor = make_actor(group, model, scratch=out)
    actor.load_hf(model)
    actor.accumulate(STEPS[0][:1])
    for holds_gradients in (actor.offload, lambda: actor.begin_save(out / "checkpoint")):
        with pytest.raises(RunError, match="gradients"):
            holds_gradients()
    actor.apply()
    begun = actor.export(50_000, open_sender(shared_memory(0, 50_000)))
    begun.next()
    actor.offload()
    _refused(
        lambda: actor.load_hf(model),
        lambda: actor.accumulate(STEPS[0]),
        actor.apply,
        begun.next,
        lambda: actor.export(50_000, None),
        lambda: actor.begin_save(out / "checkpoint"),
        lambda: actor.load(out / "checkpoint"),
    )
    actor.restore()
    buckets = export(actor, 50_000)
    sent = digest_of(buckets)

    worker = LogProbWorker(group.meet(), local_model(model), ParallelConfig(), 0.7, 1, AVERAGE, scratch=out)
    first = worker.compute(STEPS[1])
    assert first is not None
    away = worker.offload()
    weights = sum(tensor.nbytes for tensor in reference.named_tensors(reference.load(model)).values())
    assert weights < away.bytes <= 2.2 * weights, "policy and reference but for the ends of their tensors"
    _refused(
        *(lambda: worker.compute(STEPS[1]), worker.begin_update, lambda: worker.take_bucket(buckets[0])),
        *(lambda: worker.finish_update(1, sent), lambda: worker.begin_save(out / "reference")),
        *(lambda: worker.load(out / "reference"), lambda: worker.export(50_000, None)),
    )
    worker.restore()
    worker.begin_update()
    for number, bucket in enumerate(buckets):
        worker.take_bucket(bucket)
        if number == 1:
            worker.offload()
            worker.restore()
    worker.finish_update(1, sent)
    after = worker.compute(STEPS[1])
    assert after is not None
    assert (after[0].policy != first[0].policy).any()
    assert (after[0].reference == first[0].reference).all()


def test_calls_are_refused_while_memory_is_offloaded(tmp_path: Path) -> None:
    model = reference.make_model(tiny_configs.qwen2(), tmp_path / "model")
    on_ranks(_refusals, 1, model, tmp_path)
