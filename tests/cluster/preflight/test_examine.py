"""All that a run needs, each thing taken away in turn; and all of it at once."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from rlsys.cluster.preflight.examine import Finding, FindingState, examine, is_right
from rlsys.cluster.preflight.machine import GpuProcess, Gpus, RayCluster, RayMachine, SearchAnswer, Unseen
from rlsys.config.schema import RunConfig
from rlsys.observe.environment import Capabilities
from rlsys.orchestrator.validate import find_problems
from tests.cluster.preflight.conftest import Compose
from tests.cluster.preflight.machine import PINNED, cards, machine

URL = "http://127.0.0.1:8000"


def all_things(config: RunConfig, machine: Mock) -> dict[str, Finding]:
    """Findings by what was looked at; of several of one thing, one that is wrong."""
    findings = examine(config, list(find_problems(config)), machine)
    return {one.what: one for one in sorted(findings, key=lambda one: one.state is FindingState.wrong)}


def wrong_things(config: RunConfig, machine: Mock) -> dict[str, Finding]:
    return {what: one for what, one in all_things(config, machine).items() if one.state is FindingState.wrong}


def test_where_all_is_there_nothing_is_wrong(node_run: Compose) -> None:
    here = machine()
    assert wrong_things(node_run(), here) == {}
    assert here.search.call_args.args[1] == "Who wrote it?", "a server is asked a question of the run's own"


TENANT = GpuProcess("GPU-0", 7, "python", 69.0)


@pytest.mark.parametrize(
    ("machine", "what", "says"),
    [
        (machine(Gpus("580.82", cards(4))), "GPUs", "4 of 8"),
        (machine(Unseen("no driver")), "GPUs", "no driver"),
        (machine(Gpus("570.1", cards(8))), "CUDA driver", "580"),
        (machine(Gpus("580.82", cards(8, total_gib=0.001))), "GPU memory", "of 0.0 GiB"),
        (machine(Gpus("580.82", cards(8, 70), (TENANT,))), "GPU 0 in use", "python (process 7, 69.0 GiB)"),
        (machine(environment={"NCCL_SOCKET_IFNAME": "ib"}), "NCCL_SOCKET_IFNAME", "eth0, lo"),
        (machine(free_gib={"/dev/shm": 0.06}), "/dev/shm", "0.1 GiB"),
        (machine(free_gib={"/tmp": 80.0}), "disk for Ray", "96% full"),
        (machine(answers={URL: SearchAnswer(URL, 0, "refused")}), "search server", "refused"),
        (machine(answers={URL: SearchAnswer(URL, 1)}), "search server", "1 of search.topk=3"),
        (machine(packages={**PINNED, "megatron-core": "0.15.0"}), "versions", "megatron-core 0.15.0"),
    ],
)
def test_the_thing_that_is_missing_is_the_one_thing_that_is_wrong(
    node_run: Compose, monkeypatch: pytest.MonkeyPatch, machine: Mock, what: str, says: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    wrong = wrong_things(node_run(), machine)
    assert {key for key in wrong if not key.startswith("GPU ") or key == what} == {what}
    assert says in wrong[what].found
    assert wrong[what].fix


def test_an_engine_fills_its_part_of_the_card_that_is_there(node_run: Compose) -> None:
    """Of a card of 40 GiB, not of the stated 80."""
    small = machine(Gpus("580.82", cards(8, total_gib=40.0)))
    assert wrong_things(node_run("rollout.engine.memory_fraction=0.8"), small) == {}
    told = all_things(node_run("rollout.engine.memory_fraction=0.8"), small)["GPU memory"].found
    assert "32.0 of 40.0 GiB" in told
    assert "cluster.device_memory_gib=80" in told


def test_all_that_is_missing_is_said_at_once(node_run: Compose, tmp_path: Path) -> None:
    config = node_run(f"model.path={tmp_path / 'none'}", "task.eval_path=none.jsonl", "cluster.address=10.0.0.9:6379")
    bare = machine(Unseen("no driver"), Capabilities(), packages={}, answers={URL: SearchAnswer(URL, 0, "refused")})
    expected = {"model.path", "task.eval_path", "Ray", "GPUs", "versions", "search server", "cluster.device"}
    assert set(wrong_things(config, bare)) == expected


def test_disk_for_checkpoints_is_counted_and_the_fix_fits(node_run: Compose, tmp_path: Path) -> None:
    """By hand: the model has E = 320*64 embedding, a layer q 64*64+64, k, v 2*(32*64+32), o 64*64, MLP 3*64*96, two
    norms of 64, and one norm at the end; a checkpoint has 2 + 12 bytes of each."""
    layer = 64 * 64 + 64 + 2 * (32 * 64 + 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64
    one = (320 * 64 + 4 * layer + 64) * 14 / 2**30
    outputs = str(tmp_path / "outputs")
    config = node_run("trainer.steps=105", "checkpoint.interval=10")
    enough, half = (machine(free_gib={outputs: 1.0 + count * one}) for count in (11.001, 5.5))
    assert wrong_things(config, enough) == {}
    (short,) = wrong_things(config, half).values()
    assert "set checkpoint.keep_last=4" in short.fix
    assert wrong_things(node_run("trainer.steps=105", "checkpoint.interval=10", "checkpoint.keep_last=4"), half) == {}


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
    seen = all_things(node_run(*TWO_NODES), machine(cluster=CLUSTER))
    assert FindingState.wrong not in {one.state for one in seen.values()}
    assert seen["1 other machine"].state is FindingState.unknown


@pytest.mark.parametrize(
    ("cluster", "what", "says"),
    [
        (RayCluster(CLUSTER.nodes[:1], {"GPU": 8.0}), "Ray", "1 of 2 machines"),
        (RayCluster(CLUSTER.nodes, {"GPU": 4.0}), "Ray's GPUs", "4 are free"),
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
    wrong = wrong_things(node_run(*TWO_NODES), machine(cluster=cluster))
    assert says in wrong[what].found


def test_what_the_launcher_alone_starts_is_wrong_without_it(node_run: Compose) -> None:
    config = node_run(*TWO_NODES[1:-1], "search.url=null", "search.index=none", "cluster.search.nodes=['1']")
    wrong = wrong_things(config, machine())
    assert set(wrong) == {"cluster.address", "cluster.search.nodes"}
    assert is_right(examine(config, list(find_problems(config)), machine(), launched=True))
    # What the launcher adds.
    added = ("cluster.address=10.0.0.1:6379", "search.url=http://10.0.0.2:8000")
    launched = node_run(*TWO_NODES[1:-1], "search.index=none", "cluster.search.nodes=['1']", *added)
    assert wrong_things(launched, machine(cluster=CLUSTER)) == {}


def test_servers_that_differ_or_are_another_machine_elsewhere_are_wrong(node_run: Compose) -> None:
    assert set(wrong_things(node_run(*TWO_NODES[:-1]), machine(cluster=CLUSTER))) == {"search server"}
    config = node_run("search.replicas=[http://10.0.0.2:8000]")
    wrong = wrong_things(config, machine(differs="they serve different things"))
    assert wrong["search server"].found == "they serve different things"


def test_an_index_that_is_cut_short_is_found(node_run: Compose, tmp_path: Path) -> None:
    index = tmp_path / "index"
    index.mkdir()
    (index / "manifest.json").write_text(json.dumps({"format": 2, "kind": "bm25", "rows": 5}))
    (index / "postings").write_bytes(b"")
    config = node_run("search.url=null", f"search.index={index}")
    assert "postings is empty" in wrong_things(config, machine())["search.index"].found
    (index / "postings").write_bytes(b"1")
    assert wrong_things(config, machine()) == {}


def test_an_index_that_nobody_serves_here_need_not_be_here(node_run: Compose, tmp_path: Path) -> None:
    elsewhere = ["search.url=null", f"search.index={tmp_path / 'none'}"]
    assert "search.index" in wrong_things(node_run(*elsewhere), machine())
    assert wrong_things(node_run(*elsewhere, "search.enabled=false", "task.invalid_message=no"), machine()) == {}
    served = node_run(*TWO_NODES[1:], *elsewhere, "cluster.search.nodes=['1']")
    assert all_things(served, machine())["search.index"].state is FindingState.unknown
