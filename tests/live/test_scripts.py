"""Tests of the shell scripts: shellcheck, use from any directory, and RLinf's published walk-through.

The walk-through (RLinf's page on Search-R1) has the commands of a user: index, server, training, conversion and
evaluation. It runs with the same file names, flags and keys, on a small world and two CPU cores.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from examples.searchr1.tiny.demo import WORLD, prepare_world
from rlsys.config.compose import load_config
from tests.support.jsonl import read_rows
from tests.support.paths import PROJECT
from tests.support.scripts import run_script, served

EXAMPLE = PROJECT / "examples" / "searchr1"
POLICY = EXAMPLE / "tiny" / "policy"
LIBRARIES = {"common.sh", "published.sh"}
RUNNERS = sorted(file.name for file in EXAMPLE.glob("*.sh") if file.name not in LIBRARIES)


def scripts() -> list[Path]:
    """All shell scripts of the repository, recognised by name or first line."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=PROJECT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    files = [PROJECT / name for name in listed.stdout.split("\0") if name]
    return [file for file in files if file.is_file() and _is_shell(file)]


def _is_shell(file: Path) -> bool:
    if file.suffix in (".sh", ".sbatch"):
        return True
    with file.open("rb") as content:
        return re.match(rb"#!.*\b(ba|da)?sh\b", content.readline(200)) is not None


Finished = subprocess.CompletedProcess[str]


def run(script: str, *arguments: str | Path, cwd: Path, shell: str = "bash", **settings: str) -> Finished:
    return run_script(EXAMPLE / script, *arguments, cwd=cwd, shell=shell, **settings)


def test_every_script_passes_shellcheck() -> None:
    checker = Path(sys.executable).with_name("shellcheck")
    found = shutil.which(str(checker)) or shutil.which("shellcheck")
    assert found, "shellcheck is missing: run `make setup`"
    files = scripts()
    assert {"run_main_searchr1_single.sh", "mg2hf_3b.sh", "setup.sh"} <= {file.name for file in files}
    done = subprocess.run([found, "-x", *map(str, files)], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", RUNNERS)
def test_help_needs_no_environment_and_no_bash(script: str, tmp_path: Path) -> None:
    done = run(script, "--help", cwd=tmp_path, shell="sh", PYTHON="/bin/false")
    assert script in done.stdout
    assert done.stderr.startswith("PYTHON=/bin/false lacks what rlsys needs")
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("script", "arguments", "sentence"),
    [
        ("run_main_searchr1_single.sh", ["nope", "--dry-run"], "--config-name nope: there is no"),
        ("run_main_searchr1_multi_node.sh", ["no where/mine.yaml"], "no where/mine.yaml does not exist"),
        ("run_main_searchr1_multi_node.sh", ["searchr1_tiny_cpu", "2"], '"2" is not a setting'),
        ("train_ppo.sh", ["--config-dir"], "--config-dir needs a value"),
    ],
)
def test_user_mistake_is_reported_in_one_sentence(
    script: str, arguments: list[str], sentence: str, tmp_path: Path
) -> None:
    done = run(script, *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def stand_in(folder: Path, script: str) -> str:
    """Path of an interpreter that has what rlsys needs, and runs the shell script `script` for all other commands."""
    python = folder / "my python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit 0\n{script}\n')
    python.chmod(0o755)
    return str(python)


@pytest.mark.parametrize("script", ["run_main_searchr1_single.sh", "train_ppo.sh"])
def test_nothing_starts_if_the_preflight_fails(script: str, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    python = stand_in(tmp_path, f'echo "$3 $4 $5" >> "{asked}"\nexit 2')
    done = run(script, "trainer.steps=2", cwd=tmp_path, PYTHON=python)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("Nothing was started")
    (only,) = asked.read_text().splitlines()
    assert only.startswith("doctor --for ")


def asked_for(tmp_path: Path, script: str, *arguments: str, cwd: Path, **settings: str) -> list[list[str]]:
    """Arguments of each `rlsys` call of a script; a stand-in interpreter records them and succeeds."""
    asked = tmp_path / "asked"
    asked.unlink(missing_ok=True)
    python = stand_in(tmp_path, f'shift 2\nprintf "%s\\n" "$@" "" >> "{asked}"')
    done = run(script, *arguments, cwd=cwd, PYTHON=python, **settings)
    assert done.returncode == 0, done.stderr
    return [call.splitlines() for call in asked.read_text().removesuffix("\n\n").split("\n\n")]


@pytest.mark.parametrize("name", ["it's (für), {all}=#1", 'of "both" it\'s', "to [the] end\\"])
def test_current_directory_may_have_any_name(name: str, tmp_path: Path) -> None:
    here = tmp_path / name
    here.mkdir()
    (here / "train.jsonl").write_text("")
    words = ("searchr1_tiny_cpu", "task.train_path=train.jsonl", "output_dir=out")
    scripts = ("run_main_searchr1_single.sh", "run_main_searchr1_multi_node.sh")
    (settings,) = {(*call[-2:],) for script in scripts for call in asked_for(tmp_path, script, *words, cwd=here)}
    config = load_config("searchr1_tiny_cpu", settings)
    assert (config.task.train_path, config.output_dir) == (f"{here}/train.jsonl", f"{here}/out")


@pytest.mark.parametrize(
    ("script", "experiment"),
    [
        ("train_ppo.sh", "searchr1_published_ppo"),
        ("train_grpo.sh", "searchr1_published_grpo"),
        ("train_grpo_ema_pg.sh", "ema_pg_published"),
    ],
)
def test_published_variables_may_have_any_characters(script: str, experiment: str, tmp_path: Path) -> None:
    here = tmp_path / "it's (a) place"
    (here / "my, data").mkdir(parents=True)
    (here / "my, data" / "train.parquet").write_text("")
    named = {"DATA_DIR": "my, data", "BASE_MODEL": "/no/model (3B)", "EXPERIMENT_NAME": "a=b, #1"}
    calls = asked_for(tmp_path, script, cwd=here, **named)
    assert all(experiment in call for call in calls)
    (settings,) = {(*(word for word in call if "=" in word),) for call in calls}
    config = load_config(experiment, settings)
    assert config.task.train_path == f"{here}/my, data/train.parquet"
    assert config.task.eval_path == "my, data/test.parquet"
    assert (config.model.path, config.name) == (named["BASE_MODEL"], named["EXPERIMENT_NAME"])


@pytest.mark.parametrize(
    ("given", "passed_on"),
    [
        ('["a.jsonl"]', "'{here}/a.jsonl'"),
        ("'a.jsonl'", "'{here}/a.jsonl'"),
        ('["a.jsonl","b.jsonl"]', '["a.jsonl","b.jsonl"]'),
        ("[no.jsonl]", "[no.jsonl]"),
    ],
)
def test_single_existing_path_is_resolved_and_other_lists_are_unchanged(
    given: str, passed_on: str, tmp_path: Path
) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("")
    words = ("searchr1_tiny_cpu", f"data.train_data_paths={given}")
    for call in asked_for(tmp_path, "run_main_searchr1_single.sh", *words, cwd=tmp_path):
        assert call[-1] == "data.train_data_paths=" + passed_on.format(here=tmp_path)


def test_every_path_in_settings_starts_at_the_current_directory(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("")
    keys = ("model.path", "model.family", "algorithm.teacher.model", "algorithm.teacher.family")
    keys += ("task.eval_path", "search.index", "search.pages", "resume")
    words = [f"{key}=a.yaml" for key in keys]
    for call in asked_for(tmp_path, "run_main_searchr1_single.sh", "mine", *words, "model.family=glm4", cwd=tmp_path):
        assert call[-len(keys) - 1 :] == [*(f"{key}='{tmp_path}/a.yaml'" for key in keys), "model.family=glm4"]


def test_paths_in_flags_start_at_the_current_directory(tmp_path: Path) -> None:
    (tmp_path / "my configs").mkdir()
    folder = str(tmp_path / "my configs")
    for given in (["--config-dir", "my configs"], ["--config-dir=my configs"]):
        for script in ("run_main_searchr1_single.sh", "run_main_searchr1_multi_node.sh"):
            for call in asked_for(tmp_path, script, "mine", *given, "trainer.steps=5", cwd=tmp_path):
                assert " ".join(call).replace("=", " ").count(f"--config-dir {folder} trainer.steps 5") == 1
    doctor, train = asked_for(
        tmp_path, "run_main_searchr1_single.sh", "mine", "--folder-to", "note", "--json", cwd=tmp_path
    )
    assert doctor == ["doctor", "--for", "mine"]
    assert train[3:] == ["--folder-to", str(tmp_path / "note"), "--json"]
    launch = asked_for(tmp_path, "run_main_searchr1_multi_node.sh", "mine", "--nodes", "2", cwd=tmp_path)
    assert launch == [["launch", "--nodes", "2", "--config-name", "mine"]]


def test_default_config_is_rlinfs_once_its_paths_are_filled_in(tmp_path: Path) -> None:
    """The script runs in a copy of the examples, whose config is edited as in the walk-through."""
    copy = tmp_path / "a copy"
    shutil.copytree(EXAMPLE, copy / "examples" / "searchr1", ignore=shutil.ignore_patterns("tiny", "__pycache__"))
    python = stand_in(tmp_path, "exit 0")
    script = copy / "examples" / "searchr1" / "run_main_searchr1_single.sh"
    file = script.with_name("config") / "qwen2.5-3b-tool-1node.yaml"
    before = run(str(script), cwd=tmp_path, PYTHON=python)
    assert "The config is searchr1_qwen2.5_3b_1node." in before.stderr
    file.write_text(file.read_text().replace("/path/to/", "/data/"))
    after = run(str(script), cwd=tmp_path, PYTHON=python)
    assert f"The config is {file}." in after.stderr


CPU = (
    *("profile=cpu", "actor.model.precision=fp32", "actor.optim.bf16=False"),
    *("rollout.sglang.attention_backend=auto", "runner.seq_length=1024", "data.max_prompt_length=96"),
    *("algorithm.sampling_params.max_new_tokens=64", "agentloop.max_tool_response_length=256"),
)
"""Overrides that shrink a config for 8 GPUs to a run on two cores."""
SMALL = (
    *("cluster.component_placement={actor: 0, inference: 1, rollout: 2}", "cluster.devices_per_node=null"),
    *("runner.max_steps=2", "runner.val_check_interval=-1", "runner.save_interval=-1", "eval.limit=4"),
    *("data.rollout_batch_size=4", "actor.lr_sched.lr_warmup_fraction=0", "tracking.tensorboard=false"),
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the files that the walk-through downloads: passages, pages, and questions in RLinf's format."""
    prepare_world(Console(quiet=True))
    folder = tmp_path_factory.mktemp("the path to save")
    passages = (PROJECT / WORLD / "corpus.jsonl").read_text().splitlines()[:200]
    (folder / "wiki_corpus.jsonl").write_text("\n".join(passages) + "\n")
    pages = [{"url": json.loads(line)["id"], "contents": "A page."} for line in passages]
    (folder / "wiki_webpages.jsonl").write_text("".join(json.dumps(page) + "\n" for page in pages))
    for name, source, count in (("train", "train", 40), ("eval", "heldout", 6)):
        rows = map(json.loads, (PROJECT / WORLD / f"{source}.jsonl").read_text().splitlines()[:count])
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(_of_rlinf(row)) + "\n" for row in rows))
    return folder


def _of_rlinf(row: dict) -> dict:
    return {"prompt": row["prompt"][0]["content"], "solutions": row["reward_model"]["ground_truth"]["target"]}


@pytest.fixture(scope="module")
def server(world: Path) -> Iterator[str]:
    """HOST:PORT of the local search server, whose index and process come from the walk-through's scripts."""
    encoder = {"RETRIEVER_NAME": "minilm", "RETRIEVER_MODEL": "minilm"}
    built = run("build_index.sh", cwd=world, CORPUS_PATH="wiki_corpus.jsonl", SAVE_DIR="e5.index", **encoder)
    assert built.returncode == 0, built.stderr
    flags = ("--index_path", "e5.index", "--corpus_path", "wiki_corpus.jsonl", "--pages_path", "wiki_webpages.jsonl")
    encoding = ("--topk", "3", "--retriever_name", "minilm", "--retriever_model", "minilm", "--port", "0")
    with served(EXAMPLE / "launch_local_server.sh", *flags, *encoding, cwd=world) as address:
        yield address.removeprefix("http://")


def filled_in(name: str, world: Path, **paths: str) -> Path:
    """Copy of the config `name` with its paths filled in, as in the walk-through."""
    text = (EXAMPLE / "config" / name).read_text()
    for place, path in paths.items():
        text = re.sub(rf"({place}: \[?\"?)/path/to/[^\"\]\s]+", rf"\g<1>{path}", text)
    file = world / name
    file.write_text(text)
    return file


@pytest.mark.slow
def test_rlinfs_walk_through_runs_to_the_end(world: Path, server: str) -> None:
    paths = {"train_data_paths": f"{world}/train.jsonl", "val_data_paths": f"{world}/train.jsonl"}
    config = filled_in("qwen2.5-3b-tool-1node.yaml", world, model_path=str(POLICY), **paths)
    search = f"tools.search.server_addr={server}"
    trained = run(
        *("run_main_searchr1_single.sh", config.name, search, "runner.output_dir=my results", *CPU, *SMALL), cwd=world
    )
    assert trained.returncode == 0, trained.stdout[-3000:] + trained.stderr[-3000:]
    (folder,) = (world / "my results").glob("searchr1-grpo-qwen2.5-3b-ins*")
    assert read_rows(folder / "metrics.jsonl")[-1]["step"] == 2

    checkpoint = folder / "checkpoints" / "global_step_2" / "actor"
    converted = run_script(
        PROJECT / "toolkits/ckpt_convertor/mg2hf_3b.sh", checkpoint, world / "hf model", POLICY, cwd=PROJECT
    )
    assert converted.returncode == 0, converted.stderr

    config = filled_in(
        *("qwen2.5-3b-tool-1node-eval.yaml", world),
        model_path=str(world / "hf model"),
        val_data_paths=str(world / "eval.jsonl"),
    )
    place = "cluster.component_placement={rollout: 0}"
    evaluated = run(
        *("run_main_searchr1_single_eval.sh", config.name, search, "--out", "my eval", *CPU[0:1], *CPU[3:], place),
        *("rollout.model.precision=fp32",),
        cwd=world,
    )
    assert evaluated.returncode == 0, evaluated.stdout[-3000:] + evaluated.stderr[-3000:]
    results = json.loads((world / "my eval" / "results.json").read_text())
    assert len((world / "my eval" / "answers.jsonl").read_text().splitlines()) == 6
    assert results["settings"]["config"]["task"]["eval_path"] == str(world / "eval.jsonl")
