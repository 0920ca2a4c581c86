"""Tests of weight updates of a real engine: tokens before, during and after, transports, refusals."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from rlsys.config.schema import Device, OnUpdate, SyncMode
from rlsys.data.trajectory import Trajectory
from rlsys.errors import RunError
from rlsys.weights.bucket import Bucket, pack_into
from rlsys.weights.transport import BucketHandle, TransportSpec
from tests.rollout.bench import QUESTION, STOP, Bench, endless, greedy, greedy_by_transformers
from tests.support import tiny
from tests.support.tensors import digest_of, pack
from tests.support.transport_ends import receiver_of, sender_of

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="package")]


async def test_tokens_follow_the_new_weights_after_an_update(bench: Bench) -> None:
    old = await bench.bring(bench.first)
    ids = bench.encode(tiny.FIRST.prompt)
    before = await bench.engine.generate(ids, greedy(64, STOP), "before")
    new, total = await bench.stage(bench.second)
    meanwhile = await bench.engine.generate(ids, greedy(64, STOP), "meanwhile")
    assert (meanwhile.token_ids, meanwhile.versions) == (before.token_ids, before.versions)
    await bench.engine.finish_update(new, total)
    after = await bench.engine.generate(ids, greedy(64, STOP), "after")
    assert (set(before.versions), set(after.versions)) == ({old}, {new})
    assert bench.words.decode(after.token_ids) == tiny.SECOND.search
    assert after.cached_tokens == 0, "the prefix cache has keys of the old weights"
    bench.assert_logprobs(ids, after)
    assert 0 < bench.engine.counts.pause_s < bench.engine.counts.update_s


async def test_requests_in_flight_continue_with_the_new_weights(bench: Bench) -> None:
    before, after = endless(bench.first, bench.words), endless(bench.second, bench.words)
    old = await bench.bring(before)
    prompts = [bench.encode(text) for text in ("zzz", "Paris", tiny.FIRST.prompt)]
    tasks = [asyncio.create_task(bench.engine.generate(ids, greedy(4000), "long")) for ids in prompts]
    new, total = await bench.stage(after)
    await bench.until_generating(requests=3)
    await bench.engine.finish_update(new, total)
    late = asyncio.create_task(bench.engine.generate(prompts[0], greedy(60), "late"))
    held = max(len(state.output_ids) for state in bench.sglang._manager.rid_to_state.values())
    await bench.until_generating(requests=3, tokens=held + 100)
    bench.sglang.abort_all()
    for ids, generation in zip(prompts, await asyncio.gather(*tasks), strict=True):
        tokens, versions = generation.token_ids, generation.versions
        boundary = versions.count(old)
        assert 50 <= boundary < len(tokens)
        assert versions == [old] * boundary + [new] * (len(tokens) - boundary)
        assert tokens[:boundary] == greedy_by_transformers(before, ids, boundary)
        continued = greedy_by_transformers(after, [*ids, *tokens[:boundary]], len(tokens) - boundary)
        assert tokens[boundary:] == continued
        bench.assert_logprobs(ids, generation)
    assert set((await late).versions) == {new}


async def hold_a_group(bench: Bench, samples: int) -> asyncio.Task[list[Trajectory]]:
    """Start a group; return once all its episodes wait for a search, between two turns."""
    bench.search.answering.clear()
    asked = len(bench.search.asked)
    group = asyncio.create_task(bench.worker.run_group(QUESTION, samples, key="held"))
    await bench.search.until_asked(asked + samples)
    return group


def versions_of_turns(trajectory: Trajectory) -> list[set[int]]:
    """Return, for each turn, the versions of its sampled tokens; observations separate the turns."""
    sampled = np.flatnonzero(trajectory.versions >= 0)
    cuts = np.flatnonzero(np.diff(sampled) > 1) + 1
    return [set(trajectory.versions[turn].tolist()) for turn in np.split(sampled, cuts)]


async def test_on_update_finish_ends_groups_on_the_old_version_and_delays_new_ones(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.rollout.sampling, "temperature", 0.0)
    old = await bench.bring(bench.first)
    new, total = await bench.stage(bench.second)
    flying = await hold_a_group(bench, samples=3)
    drained = bench.worker.metrics()["drain_s"]
    update = asyncio.create_task(bench.worker.finish_update(new, total))
    await asyncio.sleep(0)
    asked = len(bench.search.asked)
    waiting = asyncio.create_task(bench.worker.run_group(QUESTION, 1))
    await asyncio.sleep(0)
    assert not update.done()
    assert (bench.engine.running, len(bench.search.asked)) == (0, asked), "the new group has begun"
    bench.search.answering.set()
    for trajectory in await flying:
        assert trajectory.answer == "Paris", "the second turn of the group was delayed or changed"
        assert versions_of_turns(trajectory) == [{old}, {old}]
    await update
    (later,) = await waiting
    assert later.answer == "Lyon"
    assert versions_of_turns(later) == [{new}, {new}]
    assert bench.worker.metrics()["drain_s"] > drained


async def test_on_update_continue_switches_between_two_turns_of_a_group(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.rollout.sampling, "temperature", 0.0)
    monkeypatch.setattr(bench.worker, "_on_update", OnUpdate["continue"])
    old = await bench.bring(bench.first)
    new, total = await bench.stage(bench.second)
    flying = await hold_a_group(bench, samples=3)
    await bench.worker.finish_update(new, total)
    bench.search.answering.set()
    for trajectory in await flying:
        assert trajectory.answer == "Lyon", "the second turn follows the new weights"
        assert versions_of_turns(trajectory) == [{old}, {new}]


@pytest.mark.parametrize("mode", [SyncMode.ipc, SyncMode.tensor], ids=str)
async def test_weights_arrive_in_device_memory_and_are_copied_for_the_engine_outside_the_event_loop(
    bench: Bench, mode: SyncMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `tensor`, the engine stages them in host memory."""
    from rlsys.rollout import sglang_process  # Importable once the engine runs.

    serialize, threads = sglang_process._serialize, []

    def recorded(*args: Any) -> list[bytes]:
        threads.append(threading.current_thread())
        return serialize(*args)

    monkeypatch.setattr(sglang_process, "_serialize", recorded)
    monkeypatch.setattr("rlsys.rollout.worker.open_receiver", partial(receiver_of, on_device=True))
    await bench.bring(bench.first)
    weights = dict(bench.second.named_parameters())
    parts = list(pack(weights.items(), bucket_bytes=40_000))
    size = max(bucket.data.nbytes for bucket in parts)
    spec = TransportSpec(mode, 0, ("actor", "engine"), size, 60.0, Device.cpu, None, folder="")
    sender = sender_of(spec, on_device=True)
    with pytest.raises(RunError, match="open_transport"):
        await bench.worker.load_bucket(BucketHandle(1, (), 0, None))
    await bench.worker.open_transport(replace(spec, rank=1))
    version = bench.new_version(bench.second)
    await bench.worker.begin_update(version)
    sent = []
    for taken, part in enumerate(parts, start=1):
        room = sender.next_slot()
        sent.append(pack_into(room, [(record.name, weights[record.name]) for record in part.records]))
        await bench.worker.load_bucket(sender.send(sent[-1]))
        assert bench.worker._receiver._memory is None, "memory on the device is released"
        room[:] = 0  # The sender overwrites its memory with the next bucket.
        sender.release(taken)
    await bench.worker.finish_update(version, digest_of(sent))
    trajectory = await bench.worker.answer(QUESTION)
    assert trajectory.answer == "Lyon"
    assert len(threads) >= len(parts)
    assert threading.current_thread() not in threads
    await bench.worker._close_transport()
    sender.close()


async def test_engine_with_a_changed_tensor_refuses_groups_until_the_next_update(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    changed = bench.first.get_parameter(name).detach().clone()
    changed[5, 7] += 1e-6
    (stray,) = pack([(name, changed)], bucket_bytes=1 << 30)
    version, total = await bench.stage(bench.first)
    sglang = bench.sglang
    load = sglang.load_bucket

    async def load_with_a_stray(bucket: Bucket, version: int) -> tuple[bool, str]:
        await load(bucket, version)
        return await load(stray, version) if name in {r.name for r in bucket.records} else (True, "")

    with monkeypatch.context() as patch:
        patch.setattr(sglang, "load_bucket", load_with_a_stray)
        with pytest.raises(RunError, match=r"1 of its tensors .*first model\.layers\.1\.self_attn\.qkv_proj\.weight"):
            await bench.engine.finish_update(version, total)
    with pytest.raises(RunError, match="refused a weight update"):
        await bench.worker.run_group(QUESTION, n_samples=2)
    version = await bench.bring(bench.first)
    trajectory = await bench.worker.answer(QUESTION)
    assert trajectory.answer == "Paris"
    assert set(trajectory.versions[trajectory.loss_mask]) == {version, -1}
