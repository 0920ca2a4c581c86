"""`rlsys convert`: what people see of it, and its status."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlsys.apps.cli.convert import app, parse_size
from rlsys.apps.cli.main import run_command
from rlsys.weights.convert.conversion import hf_to_megatron
from tests.support.hf_models import assert_same_tensors, make_model
from tests.support.refusals import refused

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


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and its checkpoint."""
    folder = tmp_path_factory.mktemp("made")
    hf_to_megatron(make_model(folder / "model"), folder / "mg", processes=1)
    return folder


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


@pytest.mark.parametrize(
    "arguments",
    [
        ("mg2hf", "{}/none", "{}/out", "--hf", "{}/model"),
        ("mg2hf", "{}/mg", "{}/model"),
        ("mg2hf", "{}/mg", "{}/out", "--shard-size", "5 apples"),
        ("mg2hf", "{}/mg", "{}/out", "--dtype", "int8"),
        ("hf2mg", "{}/model", "{}/mg"),
        ("hf2mg", "{}/model", "{}/out", "--tp", "0"),
        ("hf2mg", "{}/model", "{}/out", "--pp", "2", "--pp-layers", "2;1"),
        ("verify", "{}/none", "{}/model"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(arguments: tuple[str, ...], call: Call, made: Path) -> None:
    before = sorted(made.rglob("*"))
    status, out, error = call(*(argument.format(made) for argument in arguments))
    assert (status, out) == (2, "")
    assert len(error.splitlines()) == 1, error
    assert sorted(made.rglob("*")) == before


@pytest.mark.parametrize("text", ["", "-5GB", "5TB", "0GB", "5IB", "1e9"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with refused("malformed", "--shard-size"):
        parse_size(text)
