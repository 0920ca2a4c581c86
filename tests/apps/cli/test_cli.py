"""Tests of the `rlsys` command: mistakes end in one sentence with a code and status 2; `eval` and `convert` work."""

import asyncio
import errno
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

from examples.searchr1.tiny.demo import prepare_world
from rlsys.apps.cli.main import app, main, run_command
from rlsys.apps.running import run_to_end
from rlsys.errors import RunError, UserError
from tests.support.hf_models import assert_same_tensors, make_model
from tests.support.runs import rlsys
from tests.support.tiny_models import POLICY

Call = Callable[..., tuple[int, str, str]]
TINY = ("-c", "searchr1_tiny_cpu")
ADAPTER = ("convert", "mg2hf", "mg", "out", "--adapter", "--hf", POLICY)
CODED = re.compile(r"[.?] \[[a-z_]+\]$")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """Function that runs `rlsys` in an empty folder and returns exit status, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rlsys", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return code or 0, *capsys.readouterr()

    return run


@pytest.mark.parametrize("command", [*get_command(app).commands])
def test_every_command_starts_as_a_process(command: str) -> None:
    done = rlsys(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f" {command} " in done.stdout


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("train", "-c", "nope"), "nope"),
        (("train", *TINY, "trainer.stepz=3"), "trainer.stepz"),
        (("eval", *TINY, "--engine", "nope"), "nope"),
        (("convert", "mg2hf", "mg", "out", "--shard-size", "5 apples"), "5 apples"),
        ((*ADAPTER, "--shard-size", "5GB"), "--shard-size"),
        ((*ADAPTER, "--processes", 1), "--processes"),
        ((*ADAPTER, "--dtype", "float8"), "float8"),
        (("convert", "hf2mg", POLICY, POLICY), str(POLICY)),
    ],
)
def test_a_mistake_is_one_sentence_and_creates_nothing(
    call: Call, tmp_path: Path, words: tuple[object, ...], named: str
) -> None:
    status, out, error = call(*words)
    assert (status, out) == (2, "")
    (line,) = error.splitlines()
    assert named in line
    assert CODED.search(line)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (UserError("steps=0 is too few.", code="out_of_range", key="steps"), 2, "steps=0 is too few. [out_of_range]"),
        (BaseExceptionGroup("stages", [KeyError("x"), RunError("actor rank 1 is gone.")]), 1, "actor rank 1 is gone."),
        (OSError(errno.ENOSPC, "No space left on device", "/a/file"), 1, "/a/file"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "A file"),
        (KeyboardInterrupt(), 130, "Interrupted"),
    ],
)
def test_each_kind_of_error_has_its_exit_status(
    capsys: pytest.CaptureFixture[str], error: BaseException, status: int, said: str
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run_command(fail)
    assert ended.value.code == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(said)


def test_an_unexpected_error_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: 1 / 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_closes_what_it_opened(number: signal.Signals) -> None:
    closed = []

    async def work() -> None:
        os.kill(os.getpid(), number)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            closed.append(True)

    with pytest.raises(SystemExit) as ended:
        run_command(lambda: run_to_end(work()))
    assert (ended.value.code, closed) == (130, [True])


def test_a_model_is_converted_back_and_forth_and_verified(call: Call, tmp_path: Path) -> None:
    model, megatron, back = make_model(tmp_path / "model"), tmp_path / "mg", tmp_path / "back"
    there = (model, megatron, "--tp", 2, "--pp", 2, "--pp-layers", "1,2", "--processes", 1)
    assert call("convert", "hf2mg", *there) == (0, f"{megatron}: 0.00 GB in 2 files\n", "")
    home = (megatron, back, "--hf", model, "--shard-size", "100KB", "--processes", 1)
    status, out, error = call("convert", "mg2hf", *home)
    assert (status, error) == (0, "")
    assert out.startswith(f"{back}: 0.00 GB in ")
    assert_same_tensors(model, back)
    status, out, error = call("convert", "verify", megatron, back)
    assert (status, error) == (0, "")
    assert "tensors: 39 of 39 identical" in out
    assert "logits: the same" in out


@pytest.fixture
def evaluate(call: Call, tmp_path: Path) -> Call:
    """Function that evaluates one question without searches; the question's row has only a prompt and an answer."""
    row = {"prompt": [{"role": "user", "content": "Who?"}], "reward_model": {"ground_truth": {"target": ["I"]}}}
    (tmp_path / "own.jsonl").write_text(json.dumps(row))
    engine = ("--engine", "transformers", "--model", POLICY, f"output_dir={tmp_path}")

    def run(*words: object) -> tuple[int, str, str]:
        return call("eval", *TINY, *engine, "--baseline", "direct", "--data", "own.jsonl", *words)

    return run


@pytest.mark.slow
def test_an_evaluation_prints_its_table_and_writes_its_files(evaluate: Call, tmp_path: Path) -> None:
    for name in ("own.jsonl", "other.jsonl"):
        (tmp_path / name).write_text('{"question": "Who?", "golden_answers": ["I"]}\n' * 3)
    status, out, _ = evaluate("other.jsonl", "--limit", 2, "--samples", 2, "--temperature", 1, "--out", "my out")
    assert status == 0
    assert "average" in out
    results = json.loads((tmp_path / "my out" / "results.json").read_text())
    assert [one["questions"] for one in results["sets"].values()] == [2, 2]
    assert len((tmp_path / "my out" / "answers.jsonl").read_text().splitlines()) == 8


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (("--samples", 3), "eval.samples"),
        (("--temperature", 1, "compat.sampled_validation=true"), "eval.temperature"),
    ],
)
def test_a_flag_is_validated_like_its_config_key(evaluate: Call, flags: tuple[object, ...], key: str) -> None:
    status, _, error = evaluate(*flags)
    assert status == 2
    assert error.startswith(key)


def test_a_failed_evaluation_removes_only_the_folder_it_created(evaluate: Call, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    before = set(tmp_path.iterdir())
    for out in (("--out", "mine"), ("--out", "made"), ()):
        assert evaluate(*out)[2].rstrip().endswith("[conflict]")
    assert set(tmp_path.iterdir()) == before


def test_existing_results_and_files_are_not_overwritten(evaluate: Call, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    for out, code in ((tmp_path / "own.jsonl", "denied"), (tmp_path, "exists")):
        assert evaluate("--out", out)[2].rstrip().endswith(f"[{code}]")
    assert (tmp_path / "results.json").read_text() == "{}"


def test_doctor_accepts_the_tiny_run_and_refuses_it_without_its_questions(tmp_path: Path) -> None:
    prepare_world(Console(quiet=True))
    words = ["doctor", "--for", "searchr1_tiny_cpu", "--json", f"output_dir={tmp_path}"]
    good = CliRunner().invoke(app, words)
    assert good.exit_code == 0, good.stdout
    assert json.loads(good.stdout)["right"]
    bad = CliRunner().invoke(app, [*words, "task.eval_path=none.jsonl", "cluster.nodes=0"])
    assert bad.exit_code == 2
    wrong = [one["what"] for one in json.loads(bad.stdout)["findings"] if one["state"] == "wrong"]
    assert wrong == ["cluster.nodes", "task.eval_path"]
    assert list(tmp_path.iterdir()) == [], "doctor writes nothing"


@pytest.mark.parametrize("words", [["--json"], ["--launched"], ["--for", "searchr1_tiny_cpu", "--strict"]])
def test_doctor_refuses_options_that_conflict(words: list[str]) -> None:
    done = CliRunner().invoke(app, ["doctor", *words])
    assert done.exit_code != 0
    assert isinstance(done.exception, SystemExit | UserError)
