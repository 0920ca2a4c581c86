"""All that a run needs, each thing taken away in turn; and all of it at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlsys.cluster.preflight.examine import REQUIREMENTS, Finding, FindingState, examine, is_right, read_requirements
from rlsys.cluster.preflight.machine import GpuProcess, Gpus, RayCluster, RayMachine, SearchAnswer, Unseen
from rlsys.config.schema import RunConfig
from rlsys.observe.environment import Capabilities
from rlsys.orchestrator.validate import find_problems
from tests.cluster.preflight.conftest import Compose
from tests.cluster.preflight.machine import Machine, cards

URL = "http://127.0.0.1:8000"


def complete(**changed: object) -> Machine:
    """A machine with everything that requirements/gpu.txt pins."""
    pins = {
        pin.name: next(iter(pin.specifier)).version
        for pin in read_requirements(REQUIREMENTS / "gpu.txt")
        if len(pin.specifier) == 1
    }
    known = {
        one.name: pins[key]
        for one in read_requirements(REQUIREMENTS / "base.txt")
        for key in (one.name, one.name.replace("_", "-").lower())
        if key in pins
    }
    return Machine(packages=pins | known, **changed)  # type: ignore[arg-type]


def wrong_things(config: RunConfig, machine: Machine) -> dict[str, Finding]:
    return {
        one.what: one
        for one in examine(config, list(find_problems(config)), machine)
        if one.state is FindingState.wrong
    }


def found(config: RunConfig, machine: Machine, what: str) -> Finding:
    (one,) = [one for one in examine(config, list(find_problems(config)), machine) if one.what == what]
    return one


def test_where_all_is_there_nothing_is_wrong(node_run: Compose) -> None:
    machine = complete()
    findings = list(examine(node_run(), list(find_problems(node_run())), machine))
    assert [one for one in findings if one.state is FindingState.wrong] == []
    assert is_right(findings)
    assert machine.asked == ["Who wrote it?"], "a server is asked a question of the run's own"


TAKEN_AWAY: dict[str, tuple[Callable[[], Machine], str, str]] = {
    "few cards": (lambda: complete(cards=Gpus("580.82", cards(4))), "GPUs", "4 of 8"),
    "no driver": (lambda: complete(cards=Unseen("no driver")), "GPUs", "no driver"),
    "an old driver": (lambda: complete(cards=Gpus("570.1", cards(8))), "CUDA driver", "580"),
    "small cards": (lambda: complete(cards=Gpus("580.82", cards(8, total_gib=0.001))), "GPU memory", "of 0.0 GiB"),
    "a tenant": (
        lambda: complete(cards=Gpus("580.82", cards(8, used_gib=70), (GpuProcess("GPU-0", 7, "python", 69.0),))),
        "GPU 0 in use",
        "python (process 7, 69.0 GiB)",
    ),
    "an interface": (
        lambda: complete(environment={"NCCL_SOCKET_IFNAME": "ib"}),
        "NCCL_SOCKET_IFNAME",
        "eth0, lo",
    ),
    "shared memory": (lambda: complete(free_gib={"/dev/shm": 0.06}), "/dev/shm", "0.1 GiB"),
    "a full disk": (lambda: complete(free_gib={"/tmp": 80.0}), "disk for Ray", "96% full"),
    "a server": (lambda: complete(answers={URL: SearchAnswer(URL, 0, "refused")}), "search server", "refused"),
    "passages": (lambda: complete(answers={URL: SearchAnswer(URL, 1)}), "search server", "1 of search.topk=3"),
    "a version": (
        lambda: replace(complete(), packages={**(complete().packages or {}), "megatron-core": "0.15.0"}),
        "versions",
        "megatron-core 0.15.0",
    ),
}


@pytest.mark.parametrize("missing", TAKEN_AWAY)
def test_the_thing_that_is_missing_is_the_one_thing_that_is_wrong(
    node_run: Compose, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    machine, what, says = TAKEN_AWAY[missing]
    wrong = {
        key: one
        for key, one in wrong_things(node_run(), machine()).items()
        if not key.startswith("GPU ") or key == what
    }
    assert set(wrong) == {what}
    assert says in wrong[what].found
    assert wrong[what].fix


def test_an_engine_fills_its_part_of_the_card_that_is_there(node_run: Compose) -> None:
    """Of a card of 40 GiB, not of the stated 80."""
    small = complete(cards=Gpus("580.82", cards(8, total_gib=40.0)))
    assert wrong_things(node_run("rollout.engine.memory_fraction=0.8"), small) == {}
    told = found(node_run("rollout.engine.memory_fraction=0.8"), small, "GPU memory").found
    assert "32.0 of 40.0 GiB" in told
    assert "cluster.device_memory_gib=80" in told


def test_all_that_is_missing_is_said_at_once(node_run: Compose, tmp_path: Path) -> None:
    config = node_run(f"model.path={tmp_path / 'none'}", "task.eval_path=none.jsonl", "cluster.address=10.0.0.9:6379")
    machine = Machine(cards=Unseen("no driver"), here=Capabilities(), answers={URL: SearchAnswer(URL, 0, "refused")})
    expected = {"model.path", "task.eval_path", "Ray", "GPUs", "versions", "search server", "cluster.device"}
    assert set(wrong_things(config, machine)) == expected


def test_disk_for_checkpoints_is_counted_and_the_fix_fits(node_run: Compose, tmp_path: Path) -> None:
    """By hand: the model has E = 320*64 embedding, a layer q 64*64+64, k, v 2*(32*64+32), o 64*64, MLP 3*64*96, two
    norms of 64, and one norm at the end; a checkpoint has 2 + 12 bytes of each."""
    layer = 64 * 64 + 64 + 2 * (32 * 64 + 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64
    one = (320 * 64 + 4 * layer + 64) * 14 / 2**30
    outputs = str(tmp_path / "outputs")
    config = node_run("trainer.steps=105", "checkpoint.interval=10")
    enough = 1.0 + 11 * one
    assert found(config, complete(free_gib={outputs: enough * 1.0001}), "disk for the run").state is FindingState.ok
    short = found(config, complete(free_gib={outputs: 1.0 + 5.5 * one}), "disk for the run")
    assert short.state is FindingState.wrong
    assert "set checkpoint.keep_last=4" in short.fix
    mended = node_run("trainer.steps=105", "checkpoint.interval=10", "checkpoint.keep_last=4")
    assert found(mended, complete(free_gib={outputs: 1.0 + 5.5 * one}), "disk for the run").state is FindingState.ok


CLUSTER = RayCluster(
    (RayMachine("10.0.0.1", {"GPU": 8.0}), RayMachine("10.0.0.2", {"GPU": 8.0})), {"GPU": 16.0, "CPU": 64.0}
)
TWO_NODES = [
    "cluster.address=10.0.0.1:6379",
    "cluster.nodes=2",
    "cluster.devices_per_node=8",
    "cluster.placement={actor: 0-7, inference: 8-9, rollout: 10-15}",
    "cluster.sync_mode=broadcast",
    "search.url=http://10.0.0.7:8000",
]


def test_a_cluster_that_fits_is_right_and_what_is_on_other_machines_is_unknown(node_run: Compose) -> None:
    findings = list(examine(node_run(*TWO_NODES), list(find_problems(node_run(*TWO_NODES))), complete(cluster=CLUSTER)))
    assert [one for one in findings if one.state is FindingState.wrong] == []
    assert "1 other machine" in [one.what for one in findings if one.state is FindingState.unknown]


@pytest.mark.parametrize(
    ("cluster", "what", "says"),
    [
        (RayCluster(CLUSTER.nodes[:1], {"GPU": 8.0}), "Ray", "1 of 2 machines"),
        (RayCluster(CLUSTER.nodes, {"GPU": 4.0}), "Ray's GPUs", "4 are free"),
        (
            RayCluster((CLUSTER.nodes[0], RayMachine("10.0.0.2", {"GPU": 2.0})), {"GPU": 10.0}),
            "Ray's GPUs",
            "10.0.0.2 2",
        ),
        (
            RayCluster((RayMachine("10.0.0.1", {"GPU": 12.0}), RayMachine("10.0.0.2", {"GPU": 4.0})), {"GPU": 16.0}),
            "Ray's GPUs",
            "10.0.0.2",
        ),
        (Unseen("nobody listens there"), "Ray", "cluster.address=10.0.0.1:6379"),
    ],
)
def test_a_cluster_that_does_not_fit_says_in_what(
    node_run: Compose, cluster: RayCluster | Unseen, what: str, says: str
) -> None:
    wrong = wrong_things(node_run(*TWO_NODES), complete(cluster=cluster))
    assert says in wrong[what].found


def test_what_the_launcher_alone_starts_is_wrong_without_it(node_run: Compose) -> None:
    config = node_run(*TWO_NODES[1:-1], "search.url=null", "search.index=none", "cluster.search.nodes=['1']")
    wrong = wrong_things(config, complete())
    assert set(wrong) == {"cluster.address", "cluster.search.nodes"}
    assert is_right(examine(config, list(find_problems(config)), complete(), launched=True))
    # What the launcher adds.
    added = ("cluster.address=10.0.0.1:6379", "search.url=http://10.0.0.2:8000")
    launched = node_run(*TWO_NODES[1:-1], "search.index=none", "cluster.search.nodes=['1']", *added)
    assert wrong_things(launched, complete(cluster=CLUSTER)) == {}


def test_servers_that_differ_or_are_another_machine_elsewhere_are_wrong(node_run: Compose) -> None:
    assert set(wrong_things(node_run(*TWO_NODES[:-1]), complete(cluster=CLUSTER))) == {"search server"}
    config = node_run("search.replicas=[http://10.0.0.2:8000]")
    wrong = wrong_things(config, complete(differs="they serve different things"))
    assert wrong["search server"].found == "they serve different things"


def test_an_index_that_is_cut_short_is_found(node_run: Compose, tmp_path: Path) -> None:
    index = tmp_path / "index"
    index.mkdir()
    (index / "manifest.json").write_text(json.dumps({"format": 2, "kind": "bm25", "rows": 5}))
    (index / "postings").write_bytes(b"")
    config = node_run("search.url=null", f"search.index={index}")
    assert "postings is empty" in wrong_things(config, complete())["search.index"].found
    (index / "postings").write_bytes(b"1")
    assert wrong_things(config, complete()) == {}


def test_a_run_without_a_search_needs_no_server(node_run: Compose, tmp_path: Path) -> None:
    none = ["search.enabled=false", "task.invalid_message=no", "search.url=null", f"search.index={tmp_path}/no"]
    assert wrong_things(node_run(*none), complete()) == {}


def test_an_index_that_another_machine_serves_need_not_be_here(node_run: Compose, tmp_path: Path) -> None:
    elsewhere = ["search.url=null", f"search.index={tmp_path / 'none'}"]
    served = node_run(*TWO_NODES[1:], *elsewhere, "cluster.search.nodes=['1']")
    assert found(served, complete(), "search.index").state is FindingState.unknown
    assert "search.index" in wrong_things(node_run(*elsewhere), complete())
