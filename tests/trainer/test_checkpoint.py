"""A resumed run equals the uninterrupted one; checkpoints convert bit for bit in both directions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlsys.config.schema import Dtype, Layers, ModelConfig, OptimizerConfig, ParallelConfig
from rlsys.errors import UserError
from rlsys.trainer import mesh
from rlsys.trainer.actor import Actor
from rlsys.weights.checkpoint.store import About, is_complete, read_about
from rlsys.weights.convert.conversion import hf_to_megatron, megatron_to_hf
from rlsys.weights.hf_io import HfReader
from tests.support.ports import free_port
from tests.trainer import reference
from tests.trainer.harness import OBJECTIVE, rendezvous, run_group, weights_of

OPTIMIZER = OptimizerConfig(lr=3e-3, weight_decay=0.1)
STEPS = [reference.make_batches(4, seed=step) for step in range(3)]
CUTS = {"dp2": ParallelConfig(), "tp2": ParallelConfig(tp=2), "cp2": ParallelConfig(cp=2)}
"""Of two processes."""


def _actor(
    rank: int,
    port: int,
    model: str,
    parallel: ParallelConfig,
    distributed: bool = True,
    dtype: Dtype = Dtype.float32,
) -> Actor:
    optimizer = replace(OPTIMIZER, distributed=distributed)
    config = ModelConfig(model, Layers.local, dtype)
    return Actor(rendezvous(rank, 2, port), config, parallel, optimizer, OBJECTIVE, len(STEPS), seed=1)


def _train(actor: Actor, step: int) -> None:
    cp, mine = actor.place.cp_size, STEPS[step][actor.place.dp :: actor.place.dp_size]
    actor.accumulate([reference.packed(batch, cp=cp) for batch in mine] if cp > 1 else mine)
    actor.apply()


def _resume(
    rank: int,
    _: int,
    model: str,
    out: str,
    ports: list[int],
    layouts: tuple[ParallelConfig, ParallelConfig],
    distributed: bool,
    dtype: Dtype,
) -> None:
    """Save under the first layout, and go on under both."""
    checkpoint = f"{out}/checkpoint"
    first, other = layouts
    actor = _actor(rank, ports[0], model, first, distributed, dtype)
    actor.load_hf(model)
    _train(actor, 0)
    _train(actor, 1)
    actor.begin_save(checkpoint)
    actor.finish_save()
    with pytest.raises(UserError, match="already"):
        actor.begin_save(checkpoint)
    results = {"saved": weights_of(actor)}
    _train(actor, 2)
    results["uninterrupted"] = weights_of(actor)
    for name, parallel, port in (("resumed", first, ports[1]), ("resharded", other, ports[2])):
        mesh.stop()
        actor = _actor(rank, port, model, parallel, distributed, dtype)
        assert actor.load(checkpoint) == (parallel is first)
        assert actor.step == 2
        _train(actor, 2)
        results[name] = weights_of(actor)
    mesh.stop()
    if rank == 0:
        torch.save(results, f"{out}/results.pt")
        megatron_to_hf(checkpoint, f"{out}/hf", model, shard_bytes=60_000, processes=1)


@pytest.mark.parametrize(
    ("layouts", "distributed", "dtype", "tolerance"),
    [
        (("dp2", "tp2"), True, Dtype.float32, 2e-5),
        (("cp2", "dp2"), True, Dtype.float32, 2e-5),
        pytest.param(("tp2", "cp2"), True, Dtype.float32, 2e-5, marks=pytest.mark.slow),
        pytest.param(("dp2", "tp2"), False, Dtype.float32, 2e-5, marks=pytest.mark.slow),
        pytest.param(("dp2", "tp2"), True, Dtype.bfloat16, 2e-2, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_equals_the_uninterrupted_one(
    layouts: tuple[str, str], distributed: bool, dtype: Dtype, tolerance: float, tmp_path: Path
) -> None:
    model = reference.make_model(reference.tiny_config(), tmp_path / "model")
    ports = [free_port() for _ in range(3)]
    cuts = tuple(CUTS[name] for name in layouts)
    run_group(_resume, 2, str(model), str(tmp_path), ports, cuts, distributed, dtype)
    results = torch.load(tmp_path / "results.pt")
    for name, tensor in results["uninterrupted"].items():
        assert torch.equal(tensor, results["resumed"][name]), name
        torch.testing.assert_close(results["resharded"][name], tensor, rtol=tolerance, atol=tolerance)

    assert any(not torch.equal(results["saved"][name], t) for name, t in results["uninterrupted"].items())
    converted = HfReader(tmp_path / "hf")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    assert converted.names() == results["saved"].keys()
    for name, tensor in results["saved"].items():
        assert torch.equal(converted.get(name), tensor), name
    # transformers reads what was written, as the model that was trained.
    loaded = reference.named_tensors(reference.load(tmp_path / "hf"))
    assert all(torch.equal(loaded[name], tensor.float()) for name, tensor in results["saved"].items())


def _convert(rank: int, _: int, model: str, out: str, port: int) -> None:
    if rank == 0:
        hf_to_megatron(model, f"{out}/megatron")
        megatron_to_hf(f"{out}/megatron", f"{out}/back", model)
        with pytest.raises(UserError, match="already"):
            megatron_to_hf(f"{out}/megatron", f"{out}/back", model)
        with pytest.raises(UserError, match="weights that this model does not have"):
            megatron_to_hf(f"{out}/megatron", f"{out}/other", f"{out}/shallow")
    actor = _actor(rank, port, model, ParallelConfig(pp=2, pp_layers=[1, 2]))
    assert not actor.load(f"{out}/megatron")
    weights = weights_of(actor)
    mesh.stop()
    if rank == 0:
        torch.save(weights, f"{out}/exported.pt")


def test_a_converted_model_round_trips_and_loads_in_a_pipeline(tmp_path: Path) -> None:
    model = reference.make_model(reference.tiny_qwen3(), tmp_path / "model")
    reference.make_model(reference.tiny_qwen3(layers=2), tmp_path / "shallow")
    run_group(_convert, 2, str(model), str(tmp_path), free_port())
    original, back = HfReader(model), HfReader(tmp_path / "back")
    exported = torch.load(tmp_path / "exported.pt")
    assert original.names() == back.names() == exported.keys()
    for name in original.names():
        assert torch.equal(original.get(name), back.get(name)), name
        assert torch.equal(original.get(name), exported[name]), name


def test_an_incomplete_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text("{}")
    assert not is_complete(tmp_path)
    with pytest.raises(UserError, match="no complete checkpoint"):
        read_about(tmp_path)


def test_what_a_checkpoint_says_of_itself_is_read_whoever_wrote_it(tmp_path: Path) -> None:
    file = tmp_path / "complete.json"
    ours = About(3, optimizer=True, version=2, master=True, layout={"tp": 2, "dp": 1})
    file.write_text(ours.to_json())
    assert read_about(tmp_path) == ours
    # Other versions say more, or less.
    file.write_text('{"step": 5, "optimizer": true, "dtype": "bfloat16", "extra": {}}')
    assert read_about(tmp_path) == About(step=5, optimizer=True)
    file.write_text('{"step": 0}')
    assert read_about(tmp_path) == About(step=0, optimizer=False, version=0, master=False, layout=None)
    for damaged in ("", "[]", "3", "null", "{}", '{"optimizer": true}', "\0"):
        file.write_text(damaged)
        with pytest.raises(UserError, match=r"complete.json is damaged: take"):
            read_about(tmp_path)
