"""Tests of the plan by hand, and of configs that do not fit their machines."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from rlsys.apps.cli.main import app
from rlsys.cluster.planning.memory import MicroBatchLoad, group_memory
from rlsys.cluster.planning.placement import fullest_device, launch_problems, memory_problems
from rlsys.cluster.planning.resolve import make_plan
from rlsys.cluster.planning.work import OPTIMIZER_BYTES, HardwareCosts
from rlsys.config.schema import Layers, Mode, RunConfig, SyncMode
from rlsys.orchestrator.validate import find_problems
from rlsys.weights.weight_map import read_architecture
from scripts.memory_tables import shape_of
from tests.support.composed import composed
from tests.support.paths import PROJECT
from tests.support.refusals import refused

TinyRun = Callable[..., RunConfig]
THREE_B = "searchr1_qwen2.5_3b_1node"


def test_plan_of_groups_and_batches_by_hand(tiny_run: TinyRun) -> None:
    parallel = ("actor.parallel.tp=2", "inference.parallel.pp=2", "trainer.steps=20")
    plan = make_plan(tiny_run("cluster.placement={actor: 0-3, inference: 4-5, rollout: 6-8}", *parallel))
    actor, inference, rollout = (plan["groups"][name] for name in ("actor", "inference", "rollout"))
    assert (plan["world_size"], actor["ranks"]) == (9, [0, 1, 2, 3])
    assert [actor[size] for size in ("tp", "pp", "cp", "dp")] == [2, 1, 1, 2]
    assert (inference["pp"], inference["dp"]) == (2, 1)
    assert (rollout["engines"], rollout["tp"]) == (3, 1)
    sizes = {"prompts_per_step": 32, "episodes_per_step": 256, "episodes_per_update": [64], "updates": 80}
    assert plan["batch"] == sizes
    uneven = make_plan(tiny_run("trainer.mini_batches=10", "trainer.steps=20"))
    assert (uneven["batch"]["episodes_per_update"], uneven["batch"]["updates"]) == ([3 * 8, 4 * 8], 200)


def test_engine_memory_by_hand(tiny_run: TinyRun) -> None:
    rollout = make_plan(tiny_run("rollout.engine.kv_cache_tokens=1000000"))
    cache = 1_000_000 * 4 * 2 * (2 * 16) * 4  # tokens, layers, key and value, 2 heads of 16, 4 bytes of a float32
    held = rollout["model"]["parameters"] * 4 + cache
    assert rollout["groups"]["rollout"]["memory_gib_per_rank"] == pytest.approx(held / 2**30, abs=1e-4)


def test_memory_of_an_engine_with_a_staged_copy_by_hand() -> None:
    """Two GPUs of 80 GiB; weights arrive by CUDA IPC on the first."""
    settings = ["cluster.sync_mode=ipc", "rollout.engine.tp=2", "rollout.engine.memory_fraction=0.6"]
    config = composed(*settings, name=THREE_B)
    found = group_memory(config, read_architecture(shape_of(config.model.path)), "rollout")
    weights, gib = 2 * 3_085_938_688, 2**30
    assert found.parts["parameters"] == weights / 2
    assert found.parts["parameters"] + found.parts["kv_cache"] == pytest.approx(0.6 * 80 * gib)
    assert found.parts["weight_sync"] == weights
    # The contexts of the rank and of the worker, and one communicator.
    assert found.parts["runtime"] == 2 * gib / 2 + gib / 4
    # Graphs of 512 requests; 8,192 tokens; 512 rows of logits in bfloat16 and twice in float32.
    assert found.parts["graphs"] == 512 * 2 * 2**20
    assert found.parts["activations"] == 8192 * (4 * 2048 + 3 * 11008 / 2) * 2 + 512 * 151936 * (2 + 4 + 4)
    assert found.total == sum(found.parts.values())
    config.cluster.mode = Mode.colocated  # The copy is in host memory, and loaded bucket by bucket.
    loading = group_memory(config, read_architecture(shape_of(config.model.path)), "rollout").parts["weight_sync"]
    assert loading == config.cluster.sync_bucket_bytes


def test_only_groups_that_get_or_pass_on_weights_have_communicators_for_it() -> None:
    """All three have TP and DP; actor and critic also have PP, and one over all ranks for the norm of the gradient. The
    actor's other stages pass their weights to the first, each by one of their own."""

    def communicators(group: str, *settings: str) -> float:
        config = composed(*settings, name="searchr1_qwen2.5_32b_8node_ppo")
        runtime = group_memory(config, read_architecture(shape_of(config.model.path)), group).parts["runtime"]
        return (runtime / 2**30 - 0.5) * 4

    assert [*map(communicators, ("actor", "critic", "inference"))] == [2 + 1 + 1 + 2, 2 + 1 + 1, 2 + 1]
    assert communicators("actor", "actor.parallel.pp=4") == 1 + 1 + 1 + 1 + 3  # No DP.


def test_memory_of_a_3b_actor_by_hand() -> None:
    """An actor with Transformer Engine, recomputation, data parallelism of 4 and a tied embedding."""
    config = composed(name=THREE_B)
    config.model.layers, config.model.recompute = Layers.te, True
    model = read_architecture(shape_of(config.model.path))
    tokens, hidden, vocab, parameters = 16384, 2048, 151936, 3_085_938_688
    found = group_memory(config, model, "actor", MicroBatchLoad(tokens, targets=1000, width=tokens)).parts
    assert found["parameters"] == 2 * parameters
    assert found["gradients"] == 4 * parameters
    assert found["optimizer"] == 12 * parameters / 4
    # Inputs of all layers and of the final norm, which also keeps 4 bytes of 1/rms per token.
    assert found["activations"] == pytest.approx(36 * tokens * hidden * 2 + tokens * (2 * hidden + 4))
    # Logits, their gradient, the hidden states, and four pieces of 128 MiB.
    assert found["logits"] == 1000 * (2 * 2 * vocab + 2 * hidden) + 4 * 128 * 2**20
    # Without recomputation, a layer keeps the inputs, outputs and 4 bytes of 1/rms of both norms,
    # the queries, keys, values and outputs of attention with 4 bytes per head, and gate, up and their product in the
    # MLP.
    config.model.recompute = False
    layers, load = (model.layers, model.layers + 1), MicroBatchLoad(1000, targets=10, width=1000)
    less, more = (group_memory(config, replace(model, layers=n), "actor", load) for n in layers)
    by_hand = 2 * (2 * 2 * hidden + 4) + 2 * (hidden + 2 * 256 + hidden) + 4 * 16 + 2 * 3 * 11008
    assert more.parts["activations"] - less.parts["activations"] == pytest.approx(1000 * by_hand)


def test_adapters_are_all_that_a_checkpoint_has_and_an_optimizer_steps() -> None:
    """Rank 32 on 28 layers: q and o map 3,584 to 3,584, k and v to 512, gate and up to 18,944, and down back."""
    config = composed(name="searchr1_qwen2.5_7b_lora_1gpu")
    config.model.path = str(shape_of(config.model.path))
    trained = 28 * 32 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
    assert make_plan(config)["checkpoint_gib"] == pytest.approx(trained * (2 + 4 + 8) / 2**30)
    model = read_architecture(config.model.path)
    costs = HardwareCosts(config, model)
    update = costs.calls()["actor"].apply_s - costs.reached.call_s
    assert update == pytest.approx(OPTIMIZER_BYTES * trained / (costs.speed.memory * costs.reached.memory))


TWO_MACHINES = ["cluster.nodes=2", "cluster.devices_per_node=2", "cluster.sync_mode=broadcast"]
SEARCHED = "cluster.search.nodes=[alpha]"
APART = "cluster.placement={actor: 0-1, inference: '2', rollout: '3'}"
THREE_EACH = "cluster.placement={actor: '4', inference: '5', rollout: 0-3}"
"""A placement on two machines of 3 devices; its second engine has two ranks, one on each machine."""


def keys(config: RunConfig) -> list[str]:
    return [problem.key for problem in find_problems(config)]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([*TWO_MACHINES, APART], ""),
        (["cluster.nodes=2"], "cluster.devices_per_node"),
        ([*TWO_MACHINES, "cluster.placement.rollout='4'"], "cluster.placement"),
        ([*TWO_MACHINES, APART, "cluster.sync_mode=tensor"], "cluster.sync_mode"),
        ([*TWO_MACHINES, APART, "cluster.search.nodes=['0', '2']"], "cluster.search.nodes"),
        ([*TWO_MACHINES, APART, SEARCHED, "search.index=null", "search.url=http://a:1"], "cluster.search.nodes"),
        (["cluster.search.nodes=['1']"], "cluster.search.nodes"),
        (
            [*TWO_MACHINES, "cluster.devices_per_node=3", THREE_EACH, "rollout.engine.tp=2"],
            "cluster.placement.rollout rollout.engine.tp",
        ),
        (["cluster.sync_mode=ipc"], "cluster.sync_mode"),
    ],
)
def test_settings_that_do_not_fit_the_machines_are_refused_by_key(
    tiny_run: TinyRun, overrides: list[str], expected: str
) -> None:
    assert keys(tiny_run(*overrides)) == expected.split()


def test_groups_that_share_gpus_of_several_machines_need_sync_by_disk(tiny_run: TinyRun) -> None:
    """NCCL does not support two ranks on one GPU, and the other modes work within one machine only."""
    shared = ["cluster.mode=colocated", "trainer.schedule.kind=sequential", "cluster.device=gpu"]
    places = "cluster.placement={actor: 0-3, inference: 0-3, rollout: 0-3}"
    for mode in SyncMode:
        found = keys(tiny_run(*TWO_MACHINES, *shared, places, f"cluster.sync_mode={mode}"))
        assert ("cluster.sync_mode" in found) == (mode is not SyncMode.disk)


def test_addresses_are_required_of_a_run_without_the_launcher(tiny_run: TinyRun) -> None:
    served = ["cluster.search.nodes=['0']", "search.url=null"]
    missing = [one.key for one in launch_problems(tiny_run(*TWO_MACHINES, *served))]
    assert missing == ["cluster.address", "cluster.search.nodes"]
    assert list(launch_problems(tiny_run())) == []
    more = "cluster.max_engines=2"
    assert [one.key for one in launch_problems(tiny_run(more))] == ["cluster.max_engines"]
    given = ["cluster.address=a:6379", "search.url=http://a:1"]
    assert list(launch_problems(tiny_run(*TWO_MACHINES, *served, *given, more))) == []
    played = ["search.cassette.path=calls.jsonl", "search.cassette.mode=replay"]
    assert list(launch_problems(tiny_run(*served, *played))) == [], "replaying a cassette needs no server"


def plan_of(placed: dict[str, list[int]], gib: dict[str, float], **parts: float) -> dict[str, Any]:
    group = {"memory_gib": parts}
    return {
        "groups": {name: {"ranks": placed[name], "memory_gib_per_rank": size, **group} for name, size in gib.items()}
    }


EIGHT = ["cluster.device_memory_gib=80", "rollout.engine.memory_fraction=0.5"]
GIB = {"actor": 30.0, "critic": 25.0, "inference": 12.0, "rollout": 5.0}


def test_memory_of_groups_that_use_a_device_at_once_adds_up(tiny_run: TinyRun) -> None:
    """Actor and critic train at the same time and take 30 + 25 GiB. Colocated groups that are away keep their contexts, and
    an engine also its CUDA graphs."""
    plan = plan_of({"actor": [0], "critic": [0], "inference": [1], "rollout": [2]}, GIB)
    assert fullest_device(tiny_run(*EIGHT), plan) == (("actor", "critic"), 55.0)
    colocated = tiny_run(*EIGHT, "cluster.mode=colocated", "trainer.schedule.kind=sequential")
    together = {name: [0] for name in GIB}
    assert fullest_device(colocated, plan_of(together, GIB, runtime=0.5)) == (("actor", "critic"), 55.0 + 2 * 0.5)
    sleeps = plan_of(together, GIB, runtime=0.5)
    sleeps["groups"]["rollout"] = {**sleeps["groups"]["rollout"], "memory_gib": {"runtime": 0.5, "graphs": 1.0}}
    assert fullest_device(colocated, sleeps) == (("actor", "critic"), 55.0 + 2 * 0.5 + 1.0)
    # During a push, actor and inference have no activations.
    pushed = plan_of(together, GIB, parameters=20.0, weight_sync=9.0, activations=40.0)
    assert fullest_device(colocated, pushed) == (("actor", "inference"), 2 * 29.0)


@pytest.mark.parametrize(("gib", "problems"), [(72.0, 0), (72.5, 1)])
def test_memory_above_nine_tenths_of_a_device_is_refused(tiny_run: TinyRun, gib: float, problems: int) -> None:
    plan = plan_of({"actor": [0], "inference": [1], "rollout": [2]}, {"actor": gib, "inference": 1, "rollout": 1})
    assert len(list(memory_problems(tiny_run(*EIGHT), plan))) == problems
    assert list(memory_problems(tiny_run(), plan)) == [], "the device's memory is not known"


def test_experiment_of_a_3b_model_is_refused_on_cards_of_24_gib() -> None:
    files = ["task.train_path=README.md", "task.eval_path=README.md"]
    files += ["model.path=configs/model/shapes/qwen2.5-3b-instruct"]
    assert keys(composed(*files, name=THREE_B)) == []
    small = composed(*files, "cluster.device_memory_gib=24", name=THREE_B)
    assert keys(small) == ["cluster.device_memory_gib"]


def test_training_on_two_machines_needs_the_launcher_and_planning_does_not(files: list[str], tmp_path: Path) -> None:
    words = ["--config-name", "searchr1_tiny_cpu", *files, f"output_dir={tmp_path / 'runs'}"]
    served = [*words, "cluster.search.nodes=['0']", *TWO_MACHINES, APART]
    with refused("conflict", "cluster.address"):
        typer.main.get_command(app).main(["train", *served], standalone_mode=False)
    assert not (tmp_path / "runs").exists()
    assert CliRunner().invoke(app, ["train", *served, "--dry-run"]).exit_code == 0


def test_dry_run_needs_only_the_shape_of_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["train", "-c", THREE_B, "--dry-run", "--json"])
    plan = json.loads(done.output)
    assert (plan["model"]["path"], plan["model"]["parameters"]) == ("Qwen2.5-3B-Instruct", 3_085_938_688)
    missing = [note for note in plan["notes"] if note.startswith("A run needs more:")]
    assert [note.split()[4].partition("=")[0] for note in missing] == [
        "task.train_path",
        "task.eval_path",
        "model.path",
    ]
    teacher = PROJECT / "configs/model/shapes/qwen2.5-7b-instruct"
    done = CliRunner().invoke(
        app, ["train", "-c", THREE_B, "--dry-run", "algorithm=opd", f"algorithm.teacher.model={teacher}"]
    )
    assert done.exit_code == 0, "its tokens cannot be compared yet"
    for code, key, setting in (
        ("not_found", "model.path", "model.path=other"),
        ("conflict", "search.hedge_after_s", "search.hedge_after_s=1"),
        ("conflict", "cluster.device_memory_gib", "cluster.device_memory_gib=24"),
    ):
        with refused(code, key):
            typer.main.get_command(app).main(["train", "-c", THREE_B, "--dry-run", setting], standalone_mode=False)
