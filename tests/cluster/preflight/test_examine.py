"""Tests of the preflight: each requirement of a run missing in turn, and all at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import zeros

from rlsys.cluster.planning.resolve import make_plan
from rlsys.cluster.preflight.examine import (
    REQUIREMENTS,
    Finding,
    FindingState,
    data_findings,
    examine,
    is_right,
    model_findings,
    read_requirements,
)
from rlsys.cluster.preflight.machine import (
    Disk,
    Gpu,
    GpuProcess,
    Gpus,
    RayCluster,
    RayMachine,
    SearchAnswer,
    ThisMachine,
    Unseen,
)
from rlsys.config.schema import RunConfig, SearchConfig
from rlsys.observe.environment import Capabilities
from rlsys.orchestrator.validate import find_problems
from rlsys.weights.hf_io import INDEX
from rlsys.weights.weight_map import WeightMap, read_architecture
from tests.config.conftest import SHAPE
from tests.support.capabilities import H100
from tests.support.composed import composed

URL = "http://127.0.0.1:8000"
BARE_H100 = replace(H100, flash_attn_4=None, apex=False)
"""An H100 without the optional packages of the gpu profile."""

_PROFILE = {
    pin.name: next(iter(pin.specifier)).version
    for pin in read_requirements(REQUIREMENTS / "gpu.txt")
    if len(pin.specifier) == 1
}
PINNED = _PROFILE | {
    needed.name: _PROFILE[name]
    for needed in read_requirements(REQUIREMENTS / "base.txt")
    for name in (needed.name, needed.name.replace("_", "-").lower())
    if name in _PROFILE
}
"""Packages in the versions that requirements/gpu.txt pins."""


def cards(count: int, used_gib: float = 0.0, total_gib: float = 79.6) -> tuple[Gpu, ...]:
    return tuple(Gpu(index, f"GPU-{index}", "H100", total_gib, used_gib) for index in range(count))


ALL_CARDS, NO_CLUSTER = Gpus("580.82", cards(8)), Unseen("there is no listener")


def machine(
    found: Gpus | Unseen = ALL_CARDS,
    here: Capabilities = BARE_H100,
    packages: Mapping[str, str] = PINNED,
    free_gib: Mapping[str, float] = {},
    memory_gib: float = 2000.0,
    environment: Mapping[str, str] = {},
    cluster: RayCluster | Unseen = NO_CLUSTER,
    answers: Mapping[str, SearchAnswer] = {},
    differs: str = "",
    cudnn: Sequence[Path] | Unseen = (),
    memory_saver: str = "",
) -> Mock:
    """Return mock probes of a node of eight H100 that lacks nothing by default.

    `free_gib` is by path; other paths have 1000 of 2000 GiB free. `answers` is by address of a search server.
    """
    made = Mock(spec=ThisMachine, capabilities=here, version=packages.get, variable=environment.get)
    made.gpus = Mock(side_effect=found) if isinstance(found, Unseen) else Mock(return_value=found)
    made.memory_gib.return_value = memory_gib
    made.disk = lambda path: Disk(path, 2000.0, free_gib.get(str(path), 1000.0), writable=True)
    made.interfaces.return_value = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"]}
    made.port_is_free.return_value = True
    made.ray.return_value = cluster
    made.search_differs.return_value = differs
    made.memory_saver_failure.return_value = memory_saver
    made.foreign_cudnn = Mock(side_effect=cudnn) if isinstance(cudnn, Unseen) else Mock(return_value=list(cudnn))

    def search(settings: SearchConfig, _question: str) -> tuple[SearchAnswer, ...]:
        urls = [url for url in [settings.url, *settings.replicas] if url]
        return tuple(answers.get(url, SearchAnswer(url, settings.topk)) for url in urls)

    made.search.side_effect = search
    return made


ROW = {"prompt": "Who?", "question": "Who wrote it?", "solutions": ["me"]}
Compose = Callable[..., RunConfig]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write weights of zeros in two files with an index, and a tokenizer; return their folder."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE | {"max_position_embeddings": 8192}))
    entries = WeightMap(read_architecture(folder)).entries()
    sent = {name: shape for entry in entries for name, shape in zip(entry.hf, entry.rule.shapes, strict=True)}
    where = {name: f"model-{number % 2 + 1:05d}-of-00002.safetensors" for number, name in enumerate(sorted(sent))}
    for file in set(where.values()):
        save_file({name: zeros(sent[name]) for name in where if where[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a"}))
    return folder


@pytest.fixture
def node_run(tmp_path: Path, model: Path) -> Compose:
    """Return a function that composes the run of one node of eight GPUs with further overrides."""
    (tmp_path / "questions.jsonl").write_text(json.dumps(ROW) + "\n")
    files = [
        f"model.path={model}",
        f"output_dir={tmp_path / 'outputs'}",
        f"task.train_path={tmp_path / 'questions.jsonl'}",
        f"task.eval_path={tmp_path / 'questions.jsonl'}",
    ]
    return lambda *overrides: composed(*files, *overrides, name="searchr1_qwen2.5_3b_1node")


def findings_of(config: RunConfig, machine: Mock) -> dict[str, Finding]:
    """Return one finding for each examined thing: a finding in the state `wrong` if there is one."""
    findings = examine(config, list(find_problems(config)), machine)
    return {one.what: one for one in sorted(findings, key=lambda one: one.state is FindingState.wrong)}


def wrong_findings(config: RunConfig, machine: Mock) -> dict[str, Finding]:
    return {what: one for what, one in findings_of(config, machine).items() if one.state is FindingState.wrong}


def test_complete_machine_has_no_wrong_finding(node_run: Compose) -> None:
    here = machine()
    assert wrong_findings(node_run(), here) == {}
    assert here.search.call_args.args[1] == "Who wrote it?", "the server is asked the first question of the run"


@pytest.mark.parametrize(
    ("here", "overrides", "named"),
    [
        (H100, [], ["cuDNN"]),
        (H100, ["model.attention=fused"], ["cuDNN"]),
        (H100, ["model.attention=flash"], []),
        (H100, ["model.layers=local"], []),
    ],
)
def test_second_cudnn_is_wrong_for_layers_that_use_cudnn(
    node_run: Compose, here: Capabilities, overrides: list[str], named: list[str]
) -> None:
    library = Path("/usr/lib/x86_64-linux-gnu/libcudnn_engines_tensor_ir.so.9")
    wrong = wrong_findings(node_run(*overrides), machine(here=here, cudnn=[library]))
    assert list(wrong) == named
    assert all(str(library) in finding.found and finding.fix for finding in wrong.values())
    assert wrong_findings(node_run(*overrides), machine(here=here)) == {}
    found = findings_of(node_run(*overrides), machine(here=here, cudnn=Unseen("ldconfig did not respond")))
    assert [what for what, finding in found.items() if finding.state is FindingState.unknown] == named


def test_memory_saver_that_does_not_start_is_wrong_for_engines_that_sleep(node_run: Compose) -> None:
    colocated = node_run("cluster=one_node_8_colocated", "trainer.schedule.kind=sequential")
    said = "true: error while loading shared libraries: libcudart.so.13"
    ((named, finding),) = wrong_findings(colocated, machine(memory_saver=said)).items()
    assert (named, finding.found) == ("memory saver", said)
    assert finding.fix
    assert wrong_findings(colocated, machine()) == {}
    assert wrong_findings(node_run(), machine(memory_saver=said)) == {}
    absent = machine(here=replace(BARE_H100, torch_memory_saver=None), memory_saver=said)
    assert "memory saver" not in wrong_findings(colocated, absent), "the package is missing, and named"


OTHER_PROCESS = GpuProcess("GPU-0", 7, "python", 69.0)


@pytest.mark.parametrize(
    ("machine", "what", "says"),
    [
        (machine(Gpus("580.82", cards(4))), "GPUs", "4 of 8"),
        (machine(Gpus("570.1", cards(8))), "CUDA driver", "580"),
        (machine(Gpus("580.82", cards(8, total_gib=0.001))), "GPU memory", "of 0.0 GiB"),
        (machine(Gpus("580.82", cards(8, 70), (OTHER_PROCESS,))), "GPU 0 in use", "python (process 7, 69.0 GiB)"),
        (machine(environment={"NCCL_SOCKET_IFNAME": "ib"}), "NCCL_SOCKET_IFNAME", "eth0, lo"),
        (machine(free_gib={"/dev/shm": 0.06}), "/dev/shm", "0.1 GiB"),
        (machine(free_gib={"/tmp": 80.0}), "disk for Ray", "96% full"),
        (machine(answers={URL: SearchAnswer(URL, 1)}), "search server", "1 of search.topk=3"),
        (machine(packages={**PINNED, "megatron-core": "0.15.0"}), "versions", "megatron-core 0.15.0"),
    ],
)
def test_missing_requirement_is_the_only_wrong_finding(
    node_run: Compose, monkeypatch: pytest.MonkeyPatch, machine: Mock, what: str, says: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    wrong = wrong_findings(node_run(), machine)
    assert {key for key in wrong if not key.startswith("GPU ") or key == what} == {what}
    assert says in wrong[what].found
    assert wrong[what].fix


def test_host_memory_below_the_plan_is_wrong(node_run: Compose) -> None:
    """Checkpoints need room, and engines that stage in host memory more; /dev/shm is for NCCL alone."""
    needs = make_plan(node_run())["host_gib"]
    needed = needs["saved"] + needs["pushed"]
    assert set(wrong_findings(node_run(), machine(memory_gib=needed - 0.1 * needs["pushed"]))) == {"memory"}
    short = machine(free_gib={"/dev/shm": 1.0}, memory_gib=1.1 * needed)
    assert wrong_findings(node_run(), short) == {}
    colocated = ["cluster=one_node_8_colocated", "trainer.schedule.kind=sequential"]
    for overrides in (["cluster.sync_mode=tensor"], colocated):
        assert set(wrong_findings(node_run(*overrides), short)) == {"memory"}
        assert wrong_findings(node_run(*overrides), machine()) == {}


def test_memory_of_an_engine_is_a_share_of_the_actual_card(node_run: Compose) -> None:
    """The GPUs have 40 GiB each, less than `cluster.device_memory_gib`; two CUDA contexts take 1 GiB."""
    small = machine(Gpus("580.82", cards(8, total_gib=40.0)))
    engine = [f"rollout.engine.{one}" for one in ("memory_fraction=0.8", "cuda_graphs=false", "max_running=1")]
    memory = findings_of(node_run(*engine), small)["GPU memory"]
    assert memory.state is FindingState.ok
    assert "33.0 of 40.0 GiB" in memory.found


def test_all_missing_requirements_are_found_at_once(node_run: Compose, tmp_path: Path) -> None:
    config = node_run(f"model.path={tmp_path / 'none'}", "task.eval_path=none.jsonl", "cluster.address=10.0.0.9:6379")
    bare = machine(Unseen("no driver"), Capabilities(), packages={}, answers={URL: SearchAnswer(URL, 0, "refused")})
    expected = {"model.path", "task.eval_path", "Ray", "GPUs", "versions", "search server", "cluster.device"}
    assert set(wrong_findings(config, bare)) == expected | {"model.layers"}


def test_disk_for_checkpoints_is_counted_and_the_fix_fits(node_run: Compose, tmp_path: Path) -> None:
    """A checkpoint has 2 + 12 bytes of each weight, and 2 + 4 with an optimiser without a state.

    The embedding has 320*64 weights. Each layer has q 64*64+64, k and v 2*(32*64+32), o 64*64, MLP 3*64*96 and two
    norms of 64. One more norm follows the last layer.
    """
    layer = 64 * 64 + 64 + 2 * (32 * 64 + 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64
    one, outputs = (320 * 64 + 4 * layer + 64) * 14 / 2**30, str(tmp_path / "outputs")
    often = ["trainer.steps=105", "checkpoint.interval=10"]
    enough, half = (machine(free_gib={outputs: 1.0 + count * one}) for count in (11.001, 5.5))
    assert not wrong_findings(node_run(*often), enough)
    for best, kept in (("checkpoint.keep_best=false", 4), ("checkpoint.keep_best=true", 3)):
        (short,) = wrong_findings(node_run(*often, "checkpoint.keep_last=9", best), half).values()
        assert f"set checkpoint.keep_last={kept}," in short.fix
        assert wrong_findings(node_run(*often, f"checkpoint.keep_last={kept}", best), half) == {}
    stateless = node_run(*often, "actor.optimizer=sgd")
    assert wrong_findings(stateless, machine(free_gib={outputs: 1.0 + 11.001 * one * 6 / 14})) == {}
    assert wrong_findings(stateless, machine(free_gib={outputs: 1.0 + 10.9 * one * 6 / 14})) != {}


MACHINES = RayMachine("10.0.0.1", {"GPU": 8.0}), RayMachine("10.0.0.2", {"GPU": 8.0})
CLUSTER = RayCluster(MACHINES, {"GPU": 16.0, "CPU": 64.0})
TWO_NODES = [
    "cluster.address=10.0.0.1:6379",
    "cluster.nodes=2",
    "cluster.devices_per_node=8",
    "cluster.placement={actor: 0-7, inference: 8-9, rollout: 10-15}",
    "cluster.sync_mode=broadcast",
    "search.url=http://10.0.0.7:8000",
]


def test_fitting_cluster_is_right_and_other_machines_are_unknown(node_run: Compose) -> None:
    seen = findings_of(node_run(*TWO_NODES), machine(cluster=CLUSTER))
    assert FindingState.wrong not in {one.state for one in seen.values()}
    assert seen["1 other machine"].state is FindingState.unknown


@pytest.mark.parametrize(
    ("cluster", "what", "says"),
    [
        (RayCluster(CLUSTER.nodes[:1], {"GPU": 8.0}), "Ray", "1 of 2 machines"),
        (RayCluster(CLUSTER.nodes, {"GPU": 4.0}), "Ray's GPUs", "4 of 16 are free"),
        (
            RayCluster((RayMachine("10.0.0.1", {"GPU": 12.0}), RayMachine("10.0.0.2", {"GPU": 4.0})), {"GPU": 16.0}),
            "Ray's GPUs",
            "10.0.0.2",
        ),
    ],
)
def test_cluster_without_the_machines_or_gpus_is_wrong(
    node_run: Compose, cluster: RayCluster, what: str, says: str
) -> None:
    wrong = wrong_findings(node_run(*TWO_NODES), machine(cluster=cluster))
    assert says in wrong[what].found


def test_services_of_the_launcher_are_wrong_without_it(node_run: Compose) -> None:
    config = node_run(*TWO_NODES[1:-1], "search.url=null", "search.index=none", "cluster.search.nodes=['1']")
    wrong = wrong_findings(config, machine())
    assert set(wrong) == {"cluster.address", "cluster.search.nodes"}
    assert is_right(examine(config, list(find_problems(config)), machine(), launched=True))
    added = ("cluster.address=10.0.0.1:6379", "search.url=http://10.0.0.2:8000")
    launched = node_run(*TWO_NODES[1:-1], "search.index=none", "cluster.search.nodes=['1']", *added)
    assert wrong_findings(launched, machine(cluster=CLUSTER)) == {}


def test_loopback_url_on_a_cluster_and_servers_that_differ_are_wrong(node_run: Compose) -> None:
    assert set(wrong_findings(node_run(*TWO_NODES[:-1]), machine(cluster=CLUSTER))) == {"search server"}
    config = node_run("search.replicas=[http://10.0.0.2:8000]")
    wrong = wrong_findings(config, machine(differs="they serve different things"))
    assert wrong["search server"].found == "they serve different things"


def test_truncated_index_is_wrong(node_run: Compose, tmp_path: Path) -> None:
    index = tmp_path / "index"
    index.mkdir()
    (index / "manifest.json").write_text(json.dumps({"format": 2, "kind": "bm25", "rows": 5}))
    (index / "postings").write_bytes(b"")
    config = node_run("search.url=null", f"search.index={index}")
    assert "postings is empty" in wrong_findings(config, machine())["search.index"].found
    (index / "postings").write_bytes(b"1")
    assert wrong_findings(config, machine()) == {}


def test_index_that_is_not_served_here_need_not_exist(node_run: Compose, tmp_path: Path) -> None:
    elsewhere = ["search.url=null", f"search.index={tmp_path / 'none'}"]
    assert "search.index" in wrong_findings(node_run(*elsewhere), machine())
    off = ["search.enabled=false", "task.agent.invalid_message=no"]
    assert wrong_findings(node_run(*elsewhere, *off), machine()) == {}
    served = node_run(*TWO_NODES[1:], *elsewhere, "cluster.search.nodes=['1']")
    assert findings_of(served, machine())["search.index"].state is FindingState.unknown


def wrong_of_model(folder: Path) -> list[str]:
    return [one.found for one in model_findings(folder) if one.state is FindingState.wrong]


def test_missing_and_truncated_files_are_named_together(model: Path) -> None:
    assert wrong_of_model(model) == []
    first, second = sorted(model.glob("*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    (model / "tokenizer.json").unlink()
    lacking, short, tokenizer = wrong_of_model(model)
    assert first.name in lacking
    assert second.name in short
    assert "tokenizer.json" in tokenizer
    for file in (second, model / INDEX):
        file.unlink()
    assert len(wrong_of_model(model)) == 2, "all weights, and the tokenizer"


def test_damaged_index_of_weights_is_named(model: Path) -> None:
    for text in ("{", '{"weight_map": 3}'):
        (model / INDEX).write_text(text)
        (damaged,) = wrong_of_model(model)
        assert str(model / INDEX) in damaged


@pytest.mark.parametrize(
    ("other", "says"), [({"intermediate_size": 128}, "128"), ({"num_hidden_layers": 5}, "12 tensors")]
)
def test_weights_of_another_model_are_wrong(model: Path, other: dict[str, int], says: str) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | other))
    (lacking,) = wrong_of_model(model)
    assert says in lacking


def test_tokenizer_without_an_end_token_is_wrong(model: Path) -> None:
    (model / "tokenizer_config.json").write_text("{}")
    (endless,) = wrong_of_model(model)
    assert str(model / "tokenizer_config.json") in endless
    (model / "special_tokens_map.json").write_text('{"eos_token": "a"}')
    assert wrong_of_model(model) == []


def test_first_row_is_read_as_the_run_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"prompt": "Who?"}\n')
    finding, question = data_findings("task.train_path", file)
    assert (finding.state, question) == (FindingState.wrong, None)
    file.write_text('{"prompt": "Who?", "solutions": ["me"]}\n{')
    finding, question = data_findings("task.train_path", file)
    assert (finding.state, question is None) == (FindingState.ok, False)
