"""A config that does not fit its machines is refused before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from rlsys.apps.cli.main import app
from rlsys.cluster.planning.placement import fullest_device, launch_problems, memory_problems
from rlsys.config.compose import load_config
from rlsys.config.schema import RunConfig, SyncMode
from rlsys.errors import UserError
from rlsys.orchestrator.validate import find_problems

TinyRun = Callable[..., RunConfig]
TWO_MACHINES = ["cluster.nodes=2", "cluster.devices_per_node=2", "cluster.sync_mode=broadcast"]
APART = "cluster.placement={actor: 0-1, inference: '2', rollout: '3'}"


def keys(config: RunConfig) -> list[str]:
    return [problem.key for problem in find_problems(config)]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ([*TWO_MACHINES, APART], None),
        (["cluster.nodes=2"], "cluster.devices_per_node"),
        ([*TWO_MACHINES, "cluster.placement.rollout='4'"], "cluster.placement"),
        ([*TWO_MACHINES, APART, "cluster.sync_mode=tensor"], "cluster.sync_mode"),
        ([*TWO_MACHINES, APART, "cluster.search.nodes=['0', '2']"], "cluster.search.nodes"),
        (
            [*TWO_MACHINES, APART, "cluster.search.nodes=[alpha]", "search.index=null", "search.url=http://a:1"],
            "cluster.search.nodes",
        ),
        (["cluster.search.nodes=['1']"], "cluster.search.nodes"),
        (["cluster.sync_mode=ipc"], "cluster.sync_mode"),
    ],
)
def test_settings_that_do_not_fit_the_machines_are_named(
    tiny_run: TinyRun, overrides: list[str], key: str | None
) -> None:
    assert keys(tiny_run(*overrides)) == [key] * (key is not None)


def test_groups_that_share_gpus_of_several_machines_are_told_of_the_disk(tiny_run: TinyRun) -> None:
    """NCCL refuses what sync_mode=broadcast would do there, and the others do not leave a machine."""
    shared = ["cluster.mode=collocated", "trainer.schedule.kind=sequential", "cluster.device=gpu"]
    places = "cluster.placement={actor: 0-3, inference: 0-3, rollout: 0-3}"
    for mode in SyncMode:
        found = keys(tiny_run(*TWO_MACHINES, *shared, places, f"cluster.sync_mode={mode}"))
        assert ("cluster.sync_mode" in found) == (mode is not SyncMode.disk)


def test_the_launcher_settles_addresses(tiny_run: TinyRun) -> None:
    served = ["cluster.search.nodes=['0']", "search.url=null"]
    assert [one.key for one in launch_problems(tiny_run(*TWO_MACHINES, *served))] == [
        "cluster.address",
        "cluster.search.nodes",
    ]
    assert list(launch_problems(tiny_run())) == []
    settled = ["cluster.address=a:6379", "search.url=http://a:1"]
    assert list(launch_problems(tiny_run(*TWO_MACHINES, *served, *settled))) == []
    played = ["search.cassette.path=calls.jsonl", "search.cassette.mode=replay"]
    assert list(launch_problems(tiny_run(*served, *played))) == [], "no server is needed"


def test_an_engine_lies_on_one_machine(tiny_run: TinyRun) -> None:
    """Of machines of 3 devices, the second engine of two ranks would be on both."""
    placed = "cluster.placement={actor: '4', inference: '5', rollout: 0-3}"
    config = tiny_run(*TWO_MACHINES, "cluster.devices_per_node=3", placed, "rollout.engine.tp=2")
    assert any("ranks 2 to 3" in problem.sentence for problem in find_problems(config))


def plan_of(placed: dict[str, list[int]], gib: dict[str, float]) -> dict[str, Any]:
    return {"groups": {name: {"ranks": placed[name], "memory_gib_per_rank": size} for name, size in gib.items()}}


EIGHT = ["cluster.device_memory_gib=80", "rollout.engine.memory_fraction=0.5"]
GIB = {"actor": 30.0, "critic": 25.0, "inference": 12.0, "rollout": 5.0}


def test_groups_that_share_a_device_side_by_side_add_up(tiny_run: TinyRun) -> None:
    """Actor and critic on one device, 30 + 25: they learn together, and never with an engine that takes turns."""
    plan = plan_of({"actor": [0], "critic": [0], "inference": [1], "rollout": [2]}, GIB)
    assert fullest_device(tiny_run(*EIGHT), plan) == (("actor", "critic"), 55.0)
    turns = tiny_run(*EIGHT, "cluster.mode=collocated", "trainer.schedule.kind=sequential")
    assert fullest_device(turns, plan_of({name: [0] for name in GIB}, GIB)) == (("actor", "critic"), 55.0)


@pytest.mark.parametrize(("gib", "problems"), [(72.0, 0), (72.5, 1)])
def test_more_than_nine_tenths_of_a_device_is_too_much(tiny_run: TinyRun, gib: float, problems: int) -> None:
    plan = plan_of({"actor": [0], "inference": [1], "rollout": [2]}, {"actor": gib, "inference": 1, "rollout": 1})
    assert len(list(memory_problems(tiny_run(*EIGHT), plan))) == problems
    assert list(memory_problems(tiny_run(), plan)) == [], "the device's memory is not known"


def test_the_big_experiment_does_not_fit_smaller_cards() -> None:
    """The estimate of a real shape reaches the check: 3B on four cards of 24 GiB is refused, of 80 it is not."""
    files = ["task.train_path=README.md", "task.eval_path=README.md"]
    files += ["model.path=configs/model/shapes/qwen2.5-3b-instruct"]
    assert keys(load_config("searchr1_qwen2.5_3b_1node", files)) == []
    small = load_config("searchr1_qwen2.5_3b_1node", [*files, "cluster.device_memory_gib=24"])
    (found,) = find_problems(small)
    assert "cluster.device_memory_gib=24" in found.sentence


def test_training_without_the_launcher_is_refused_and_planning_is_not(files: list[str], tmp_path: Path) -> None:
    words = ["--config-name", "searchr1_tiny_cpu", *files, f"output_dir={tmp_path / 'runs'}"]
    served = [*words, "cluster.search.nodes=['0']", *TWO_MACHINES, APART]
    with pytest.raises(UserError) as caught:
        typer.main.get_command(app).main(["train", *served], standalone_mode=False)
    assert all(key in str(caught.value) for key in ("cluster.address", "cluster.search.nodes"))
    assert not (tmp_path / "runs").exists()
    assert CliRunner().invoke(app, ["train", *served, "--dry-run"]).exit_code == 0
