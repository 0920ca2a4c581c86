"""`rlsys convert`: what people see of it, and its status."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.apps.cli.convert import parse_size
from tests.apps.cli.conftest import Call
from tests.support.refusals import refused
from tests.weights.convert.models import assert_same_tensors, make_model


def test_there_and_back_and_the_same(call: Call, tmp_path: Path) -> None:
    model, megatron, back = make_model(tmp_path / "model"), tmp_path / "mg", tmp_path / "back"
    there = ("hf2mg", model, megatron, "--tp", 2, "--pp", 2, "--pp-layers", "1,2", "--processes", 1)
    assert call("convert", *there) == (0, f"{megatron}: 0.00 GB in 2 files\n", "")
    home = ("mg2hf", megatron, back, "--hf", model, "--shard-size", "100KB", "--processes", 1)
    status, out, error = call("convert", *home)
    assert (status, error) == (0, "")
    assert out.startswith(f"{back}: 0.00 GB in ")
    assert_same_tensors(model, back)
    status, out, error = call("convert", "verify", megatron, back)
    assert (status, error) == (0, "")
    assert "tensors: 39 of 39 the same" in out
    assert "logits: the same" in out


def test_a_mistake_is_one_sentence_and_leaves_nothing(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = make_model(tmp_path / "model")
    before = sorted(tmp_path.rglob("*"))
    for words in (
        ("mg2hf", "none", "out", "--hf", model),
        ("mg2hf", "none", "out", "--shard-size", "5 apples"),
        ("mg2hf", "none", "out", "--dtype", "int8"),
        ("hf2mg", model, model),
        ("hf2mg", model, "out", "--pp", "2", "--pp-layers", "2;1"),
        ("verify", "none", model),
    ):
        status, out, error = call("convert", *words)
        assert (status, out, len(error.splitlines())) == (2, "", 1), error
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("text", ["", "-5GB", "0GB", "5IB", "1e9"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with refused("malformed", "--shard-size"):
        parse_size(text)
