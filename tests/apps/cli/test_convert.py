"""`rlsys convert`: what people see of it, and its status."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlsys.apps.cli.convert import app, parse_size
from rlsys.apps.cli.main import run_command
from rlsys.errors import UserError
from tests.weights.convert.models import assert_same_tensors, make_model

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run `rlsys convert` in this process: exit status, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["convert", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            run_command(app)
        code = exit_.value.code
        assert code is None or isinstance(code, int)
        return code or 0, *capsys.readouterr()

    return run


def test_there_and_back_and_the_same(call: Call, tmp_path: Path) -> None:
    model, megatron, back = make_model(tmp_path / "model"), tmp_path / "mg", tmp_path / "back"
    status, out, error = call("hf2mg", model, megatron, "--tp", 2, "--pp", 2, "--pp-layers", "1,2", "--processes", 1)
    assert (status, error) == (0, "")
    assert out == f"{megatron}: 0.00 GB in 2 files\n"
    status, out, error = call("mg2hf", megatron, back, "--hf", model, "--shard-size", "100KB", "--processes", 1)
    assert (status, error) == (0, "")
    assert out.startswith(f"{back}: 0.00 GB in ")
    assert_same_tensors(model, back)
    for first, second in ((model, back), (megatron, back), (model, megatron)):
        status, out, error = call("verify", first, second)
        assert (status, error) == (0, "")
        assert "tensors: 39 of 39 the same" in out
        assert "logits: the same" in out


def test_what_differs_is_a_table_and_status_1(call: Call, tmp_path: Path) -> None:
    model, other = make_model(tmp_path / "model"), make_model(tmp_path / "other", seed=1)
    status, out, error = call("verify", model, other, "--no-logits")
    assert (status, error) == (1, "")
    rows = [line for line in out.splitlines() if "│" in line]
    assert len(rows) == 20
    assert "lm_head.weight" in rows[0]
    assert "bytes" in rows[0]
    assert "and 19 more" in out
    assert "tensors: 0 of 39 the same" in out
    assert "logits" not in out


def test_info_for_people_and_for_programs(call: Call, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    status, out, error = call("info", model)
    assert (status, error) == (0, "")
    rows = dict([cell.strip() for cell in line.split("│")[1:3]] for line in out.splitlines() if line.startswith("│"))
    assert rows["format"] == "hugging face"
    assert rows["family"] == "llama"
    assert rows["dtypes"].startswith("bfloat16 (")
    assert "tokenizer.json" in rows["also"]
    status, out, error = call("info", model, "--json")
    assert (status, error) == (0, "")
    found = json.loads(out)
    assert f"{found['parameters']:,}" == rows["parameters"]
    assert found["architecture"]["rope"]["factor"] == 8.0


def test_a_missing_tokenizer_is_said_on_standard_error(call: Call, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", tokenizer=False)
    status, out, error = call("hf2mg", model, tmp_path / "mg", "--values")
    assert status == 0
    assert "has no tokenizer" in error
    assert len(error.splitlines()) == len(out.splitlines()) == 1
    assert "kind" in call("info", tmp_path / "mg")[1]
    assert json.loads(call("info", tmp_path / "mg", "--json")[1])["critic"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("mg2hf", "{}/none", "{}/out", "--hf", "{}/model"),
        ("mg2hf", "{}/model", "{}/out", "--hf", "{}/model"),
        ("mg2hf", "{}/mg", "{}/out", "--hf", "{}/none"),
        ("mg2hf", "{}/mg", "{}/model"),
        ("mg2hf", "{}/mg", "{}/out", "--shard-size", "5 apples"),
        ("mg2hf", "{}/mg", "{}/out", "--dtype", "int8"),
        ("mg2hf", "{}/mg", "{}/out", "--processes", "0"),
        ("hf2mg", "{}/none", "{}/out"),
        ("hf2mg", "{}/mg", "{}/out"),
        ("hf2mg", "{}/model", "{}/mg"),
        ("hf2mg", "{}/model", "{}/out", "--tp", "7"),
        ("hf2mg", "{}/model", "{}/out", "--tp", "0"),
        ("hf2mg", "{}/model", "{}/out", "--pp", "2"),
        ("hf2mg", "{}/model", "{}/out", "--ep", "2"),
        ("hf2mg", "{}/model", "{}/out", "--pp", "2", "--pp-layers", "2;1"),
        ("verify", "{}/none", "{}/model"),
        ("verify", "{}/model", "{}/none"),
        ("info", "{}/none"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(arguments: tuple[str, ...], call: Call, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    call("hf2mg", model, tmp_path / "mg")
    before = sorted(tmp_path.rglob("*"))
    status, out, error = call(*(argument.format(tmp_path) for argument in arguments))
    assert (status, out) == (2, "")
    assert len(error.splitlines()) == 1, error
    assert "Traceback" not in error
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5GB", 5 * 10**9),
        ("500 mb", 5 * 10**8),
        ("1.5GiB", 3 * 2**29),
        ("2G", 2 * 10**9),
        ("10KB", 10_000),
        ("123", 123),
        ("7B", 7),
    ],
)
def test_sizes_are_read(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "5TB", "0", "0GB", "0.5", "5IB", "1e9", "5 G B"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--shard-size is"):
        parse_size(text)


def test_a_terminal_shows_bytes(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    code = "from rlsys.apps.cli.convert import app; app()"
    command = [sys.executable, "-c", code, "hf2mg", str(model), str(tmp_path / "mg"), "--processes", "1"]
    here, there = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    done = subprocess.run(command, stderr=there, stdout=subprocess.PIPE, env=environment, check=True)
    os.close(there)
    shown = os.read(here, 100_000).decode()
    os.close(here)
    assert "written" in shown
    assert "kB" in shown
    assert done.stdout.decode().startswith(str(tmp_path / "mg"))
