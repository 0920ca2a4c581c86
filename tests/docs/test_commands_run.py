"""Tests that the documents' commands run, page by page, in a folder like a fresh checkout.

Training runs are planned as they are written, and the settings of all pages are trained together in a few runs, which
further settings make small. `RUN` and `OTHER` stand for existing runs. Commands that cannot run here are listed in
`NEEDS` with the reason; `test_commands_exist.py` checks that the files and flags they name exist.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, commands
from tests.support.paths import PROJECT
from tests.support.runs import PATIENT, PLAIN_ENGINE, Finished

NEEDS = {
    r"^make |^\. |mkdocs|^docker|^pip ": "is what runs this test, or sets its machine up",
    r"setup_gpu|/models/|searchr1_(qwen|llama|published)(?!.*--dry-run)|_3b|-3B|gpt-oss": "GPUs, or a model of the hub",
    r"hf download|download\.py|data prepare (all|nq)|--data nq|data/(nq|wiki18)|search web": "the network",
    r"rlsys engines ": "a run that goes on; tests/live/test_engines_join_and_leave.py has one",
    r"launch/|rlsys launch|kubectl": "several machines",
    r"^nft ": "a network to be cut off",
    r"train .*task.agent=gateway": "a program as agent; tests/live/test_gateway_run.py trains with it",
    r"-m bench\.": "minutes or hours of measuring; tests/bench runs some in small",
    r"-m pytest|warm_start|-m examples\.searchr1\.tiny\.world": "hours, or has a test of its own",
    r"infer\.py": "a server at its port; tests/examples/test_infer.py runs it",
    r"^curl |search serve|rlsys serve|rlsys watch|--web": "a reader who ends it; tests/live/test_ports.py runs each server",
    r" [A-Z]{2,}( |$|\.)|\w\|\w|\.\.\.| \[": "is a form to be filled in",
}
READS_ONLY = r"\brlsys (train.* --dry-run|eval|chat|report|audit)\b"
"""Commands that leave nothing which a later one of the page needs."""
SMALL = "trainer.steps=2 trainer.prompts_per_step=4 trainer.mini_batches=1 algorithm.n_samples=4 eval.limit=4"
SMALL += " search.index=data/tiny_world/words tracking.wandb=false tracking.tensorboard=false "
SMALL += " ".join([PLAIN_ENGINE, *PATIENT])


def to_be_run(page: Path) -> list[str]:
    """Return the commands of a page that can run here."""
    return [text for text, in_block in commands(page) if in_block and not any(re.search(p, text) for p in NEEDS)]


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A finished run, for commands that read a run's folder."""
    settings = [
        PLAIN_ENGINE,
        "trainer.steps=2",
        "eval.interval=1",
        "checkpoint.interval=1",
        "tracking.trajectories=null",
    ]
    return Finished(tmp_path_factory.mktemp("documented"), *settings)


@pytest.fixture
def reader(tmp_path: Path, finished: Finished) -> Path:
    """A folder like a fresh checkout with two runs, and with the files that a reader is asked to write."""
    for name in ("configs", "examples", "scripts", "toolkits", "rlsys", "data/tiny_world"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(PROJECT / name)
    (tmp_path / "docs").mkdir()
    shutil.copy(PROJECT / "docs" / "glossary.md", tmp_path / "docs")  # All pages would take a minute to be indexed.
    (tmp_path / "build").mkdir()
    (tmp_path / "outputs").mkdir()
    for name in ("RUN", "OTHER"):
        shutil.copytree(finished.folder, tmp_path / "outputs" / name)
    documents = tmp_path / "my_documents"
    documents.mkdir()
    for line in (PROJECT / "data" / "tiny_world" / "corpus.jsonl").read_text().splitlines()[:60]:
        row = json.loads(line)
        (documents / f"{row['id']}.txt").write_text(row["contents"])
    questions = [f"Who wrote book {number}?,author {number}" for number in range(40)]
    (tmp_path / "my_questions.csv").write_text("\n".join(["question,answer", *questions]))
    (tmp_path / "sums.jsonl").write_text('{"question": "What is 2 + 3?", "answer": "5"}\n')
    (tmp_path / "prompt.txt").write_text("Answer. {tools} Question: {question}\n")
    (tmp_path / "notes.jsonl").write_text('{"id": "1", "contents": "Mali\\nThe capital of Mali is Bamako."}\n')
    return tmp_path


def typed(command: str) -> str:
    """Return the command with sizes that suit a test, and with a step that the runs have saved."""
    text = re.sub(r"global_step_(12|100)\b", "global_step_2", command)
    text = text.replace("outputs/own/runs/RUN", "outputs/RUN")
    if re.search(r"\brlsys train -c searchr1_tiny_cpu\b", text) and "--dry-run" not in text:
        text = " ".join([text, *(one for one in SMALL.split() if one.partition("=")[0] not in text)])
    if re.search(r"\brlsys eval\b", text):
        text = re.sub(r" --limit \d+", "", text) + " --limit 4"
    if re.search(r"\brlsys (eval|chat)\b", text) and "--engine" not in text:
        text += " --engine transformers"
    return text


def run(text: str, folder: Path) -> None:
    """Run a command in a shell with the environment of this interpreter; it must succeed."""
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    process = subprocess.Popen(
        ["bash", "-c", text], cwd=folder, env=os.environ | paths, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = process.communicate()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # Ends every process that the command has started.
    assert process.returncode == 0, f"{text}\n{said[-3000:]}"


def is_merged(text: str) -> bool:
    """True for a training run whose settings are trained with those of others."""
    return "rlsys train" in text and "--dry-run" not in text and "--folder-to" not in text


def form(text: str) -> frozenset[str]:
    """Return what commands are compared by: the words of a training run, options of eval and chat, else the whole text."""
    if asks := re.search(r"\brlsys (eval|chat)\b", text):
        return frozenset([asks[0], *re.findall(r"(?<= )-[-a-z]+|(?<= )[\w.]+(?==)|/checkpoints/", text)])
    return frozenset(text.split() if "rlsys train" in text else [typed(text)])


def by_page() -> dict[str, list[str]]:
    """Return page -> its commands; merged runs are planned only, and what a later or longer command repeats is left out."""
    found = [
        (str(page.relative_to(PROJECT)), f"{text} --dry-run" if is_merged(text) else text)
        for page in PAGES
        for text in to_be_run(page)
    ]
    last = {form(text): at for at, (_, text) in enumerate(found) if re.search(READS_ONLY, text)}
    pages: dict[str, list[str]] = {}
    for at, (page, text) in enumerate(found):
        own = form(text)
        if not re.search(READS_ONLY, text) or (last[own] == at and not any(own < other for other in last)):
            pages.setdefault(page, []).append(text)
    return pages


def merged_runs() -> list[list[str]]:
    """Return the settings of a few training runs, which together have those of all merged runs."""
    runs: list[dict[str, str]] = []
    for text in (text for page in PAGES for text in to_be_run(page) if is_merged(text)):
        _, config, after = text.partition(" -c searchr1_tiny_cpu")
        assert config, text
        engine = "rollout.engine=sglang" if "lora" in text else PLAIN_ENGINE  # Only SGLang takes adapters.
        settings = {one.partition("=")[0]: one for one in [engine, *shlex.split(after)]}
        if (run := next((run for run in runs if not conflict(run, settings)), None)) is None:
            runs.append(run := {})
        run |= settings
    return [[*run.values()] for run in runs]


def conflict(run: dict[str, str], other: dict[str, str]) -> bool:
    """True if two runs set a key to different values, or one of them a key and the other one below it."""
    return any(
        run[key] != other[more] and (f"{key}.".startswith(f"{more}.") or f"{more}.".startswith(f"{key}."))
        for key, more in product(run, other)
    )


def test_no_command_of_a_page_is_lost() -> None:
    """Each is run, or one with the same words or options and more; each setting of a merged run is trained."""
    done = [form(text) for texts in by_page().values() for text in texts]
    trained = {one for run in merged_runs() for one in run}
    for page in PAGES:
        for text in to_be_run(page):
            planned = form(f"{text} --dry-run" if is_merged(text) else text)
            assert any(planned <= other for other in done), f"{page}: {text}"
            if is_merged(text):
                before, _, settings = text.partition(" -c searchr1_tiny_cpu")
                assert before in ("rlsys train", "PYTHONPATH=$PWD rlsys train"), f"{page}: {text}"
                assert trained.issuperset(shlex.split(settings)), f"{page}: {text}"


@pytest.mark.slow
@pytest.mark.parametrize("texts", [pytest.param(texts, id=page) for page, texts in by_page().items()])
def test_the_commands_of_a_page_succeed(texts: list[str], reader: Path) -> None:
    for text in texts:
        run(typed(text), reader)


@pytest.mark.slow
@pytest.mark.parametrize("settings", merged_runs())
def test_the_settings_of_the_pages_train(settings: list[str], reader: Path) -> None:
    run(typed(f"PYTHONPATH=$PWD rlsys train -c searchr1_tiny_cpu {shlex.join(settings)}"), reader)
