"""The contract of the `rlsys` command: a mistake is one sentence and status 2, never a traceback."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlsys.apps.cli.main import main, run_command
from rlsys.apps.running import run_to_end
from rlsys.errors import RunError, UserError
from tests.config.conftest import SHAPE

Call = Callable[..., tuple[int, str, str]]
TINY = ["-c", "searchr1_tiny_cpu"]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run the command in this process: exit status, standard output, standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rlsys", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        code = exit_.value.code
        assert isinstance(code, int)
        return code, *capsys.readouterr()

    return run


def subprocess_of(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlsys.apps.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def is_one_sentence(text: str) -> bool:
    return len(text.strip().splitlines()) == 1 and "Traceback" not in text and "Error" not in text


def test_a_process_ends_with_the_sentence_alone() -> None:
    done = subprocess_of("train", *TINY, "trainer.stepz=3")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "trainer.stepz is not a key of the configuration: did you mean trainer.steps?\n"


def test_converting_what_is_no_checkpoint_is_one_sentence_without_libraries_warnings(tmp_path: Path) -> None:
    done = subprocess_of("convert", "mg2hf", str(tmp_path), str(tmp_path / "out"), "--hf", str(tmp_path))
    assert done.returncode == 2
    assert is_one_sentence(done.stderr), done.stderr
    assert done.stderr.startswith(f"{tmp_path} holds no checkpoint of Megatron's")
    assert not (tmp_path / "out").exists()


def test_an_unknown_config_is_one_sentence(call: Call) -> None:
    status, out, error = call("train", "-c", "nope")
    assert (status, out) == (2, "")
    assert is_one_sentence(error)
    assert "searchr1_tiny_cpu" in error


def test_problems_are_a_line_each(call: Call, tmp_path: Path) -> None:
    status, _, error = call("train", *TINY, "--dry-run", f"model.path={tmp_path}", "trainer.steps=0")
    assert status == 2
    lines = error.strip().splitlines()
    assert [line for line in lines if line.startswith("trainer.steps=0")]
    assert [line for line in lines if line.startswith(f"model.path={tmp_path} ")]
    assert "Traceback" not in error


def test_an_unknown_engine_is_one_sentence(call: Call, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    rows = tmp_path / "questions.jsonl"
    rows.write_text("{}\n")
    data = [f"task.train_path={rows}", f"task.eval_path={rows}", "search.url=http://127.0.0.1:9"]
    status, _, error = call("eval", *TINY, "--engine", "nope", "--model", str(tmp_path), *data)
    assert status == 2
    assert error == "--engine nope is not known: give one of sglang, transformers.\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(("serve", "{}/none"), "is not an index"), (("index", "{}/none", "{}/out"), "is not a file")],
)
def test_search_names_a_folder_that_is_missing(
    call: Call, tmp_path: Path, arguments: tuple[str, ...], named: str
) -> None:
    status, _, error = call("search", *(argument.format(tmp_path) for argument in arguments))
    assert status == 2
    assert is_one_sentence(error)
    assert f"{tmp_path}/none" in error
    assert named in error


def test_a_cassette_is_summed_up(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    rows: list[dict[str, object]] = [{"rlsys_cassette": 1, "topk": 3, "server": {"encoder": "[bold]mini"}}]
    passage = {"id": "1", "contents": "x", "score": 0.5}
    rows += [{"query": "Mali", "latency_s": 0.001 * (100 - call), "passages": [passage]} for call in range(98)]
    rows += [{"query": query, "latency_s": latency, "error": "no"} for query, latency in (("a", 0.001), ("b", 0.002))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, out, error = call("search", "cassette", str(path))
    assert (status, error) == (0, "")
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    assert [line for line in lines if line] == [
        ["topk", "3"],
        ["encoder", "[bold]mini"],
        ["queries", "3"],
        ["calls", "100"],
        ["errors", "2"],
        ["latency p50", "50.0 ms"],
        ["latency p90", "90.0 ms"],
        ["latency p99", "99.0 ms"],
        ["latency max", "100.0 ms"],
    ]


def test_what_is_no_cassette_is_one_sentence(call: Call, tmp_path: Path) -> None:
    for path, named in (
        (tmp_path / "none.jsonl", "there is no cassette at"),
        (Path(__file__), "is not a cassette"),
    ):
        status, out, error = call("search", "cassette", str(path))
        assert (status, out) == (2, "")
        assert is_one_sentence(error)
        assert named in error
        assert str(path) in error


@pytest.mark.parametrize("arguments", [("train",), ("train", *TINY, "--json"), ("train", *TINY, "--nope"), ("nope",)])
def test_a_wrong_use_of_the_command_has_status_2(call: Call, arguments: tuple[str, ...]) -> None:
    status, _, error = call(*arguments)
    assert status == 2
    assert "Usage" in error
    assert "Traceback" not in error


def test_doctor_says_what_the_cpu_profile_needs(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    status, out, _ = call("doctor")
    assert status == 0
    rows = [[cell.strip() for cell in line.split("│")] for line in out.splitlines()]
    found = {cells[2]: cells for cells in rows if len(cells) > 2}
    for package in ("torch", "megatron-core", "sglang", "ray", "transformers", "faiss-cpu"):
        assert found[package][1] == "ok"
        assert found[package][3] == importlib.metadata.version(package)
    (verdict,) = [line for line in out.splitlines() if line.startswith("The ")]
    assert verdict.startswith(f"The {'gpu' if torch.cuda.is_available() else 'cpu'} profile ")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UserError("a mistake."), 2),
        (RunError("actor rank 1 is gone."), 1),
        (BaseExceptionGroup("stages", [KeyError("x"), RunError("actor rank 1 is gone.")]), 1),
    ],
)
def test_each_kind_of_end_has_its_status(capsys: pytest.CaptureFixture[str], error: BaseException, status: int) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(SystemExit) as exit_:
        run_command(fail)
    assert exit_.value.code == status
    assert is_one_sentence(capsys.readouterr().err)


def test_a_mistake_of_the_program_keeps_its_traceback() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_command(fail)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_closes_what_it_opened(capsys: pytest.CaptureFixture[str], number: signal.Signals) -> None:
    closed = []

    async def work() -> None:
        os.kill(os.getpid(), number)
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0)
            closed.append(True)

    with pytest.raises(SystemExit) as exit_:
        run_command(lambda: run_to_end(work()))
    assert exit_.value.code == 130
    assert closed == [True]
    assert capsys.readouterr().err.startswith("Interrupted")
