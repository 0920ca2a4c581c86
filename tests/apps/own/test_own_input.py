"""`rlsys own`: a mistake is one sentence, before anything is made or downloaded; a damaged run goes on and is not lost."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from rlsys.apps.cli.own import commands
from rlsys.errors import UserError
from rlsys.observe.environment import Capabilities
from tests.apps.own.test_own import POLICY, World, names

HUB = "Some/Model"
"""A name that would be downloaded."""


class Downloaded(Exception):
    """The Hub was asked."""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    def ask(name: str, *, local_files_only: bool = False, **_: object) -> str:
        raise LocalEntryNotFoundError(name) if local_files_only else Downloaded(name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", ask)
    return World(tmp_path)


def refused(world: World, model: str | Path = HUB, **more: object) -> str:
    """The sentence that a wish comes to, which leaves everything as it was."""
    before = set(world.docs.parent.rglob("*"))
    with pytest.raises(UserError) as problem:
        next(commands(replace(world.wish(**more), model=model)))
    assert set(world.docs.parent.rglob("*")) == before
    (sentence,) = str(problem.value).splitlines()
    return sentence


def assert_said(pattern: str, sentence: str) -> None:
    assert re.search(pattern, sentence), sentence


def rename_documents(world: World) -> None:
    world.docs.rename(world.docs.with_name("elsewhere"))


def spoil_documents(world: World) -> None:
    (world.docs / "a.txt").write_text(" \n")
    (world.docs / "b.pdf").write_text("Kenya: capital Nairobi.")


def write_where_out_is(world: World) -> None:
    world.out.write_text("a file")


def rename_questions(world: World) -> None:
    world.questions = world.questions.rename(world.questions.with_suffix(".xlsx"))


def ask(text: str) -> Callable[[World], None]:
    def write(world: World) -> None:
        world.questions.write_text(text)

    return write


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (rename_documents, "docs does not exist: give a file or a folder"),
        (spoil_documents, "docs holds no document .*1 empty.*1 unknown kind .pdf"),
        (lambda world: world.questions.unlink(), "QUESTIONS .*q.csv does not exist: give questions"),
        (rename_questions, "QUESTIONS .*q.xlsx is of no kind that can be read"),
        (ask(""), "q.csv has no question: give"),
        (ask("question,answer\nwhat is 1?,1\n  ,2\n"), 'q.csv, line 3 has no question: "question"'),
        (ask("question,answer\nwhat?,1\nwho?,2\n"), "q.csv has 2 different questions, of which 4 cannot"),
        (write_where_out_is, "--out .*own cannot be written .*Not a directory.*: give another folder"),
    ],
)
def test_files_that_cannot_be_used(world: World, spoil: Callable[[World], None], sentence: str) -> None:
    spoil(world)
    assert_said(sentence, refused(world))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"overrides": ("trainer.stps=3",)}, r"trainer\.stps is not a key .* did you mean trainer\.steps\?"),
        ({"overrides": ("trainer.seed",)}, '"trainer.seed" is not a setting: write KEY=VALUE'),
        ({"overrides": ("task.max_turn_tokens=9999",)}, "task.max_total_tokens=.* has no room"),
        ({"config": "nosuch"}, "--config-name nosuch: there is no .* known are .*searchr1_tiny_cpu"),
        ({"kind": "fancy"}, "--kind fancy .*: give one of dense, bm25, hybrid"),
        ({"encoder": "minilm"}, "--encoder minilm has no use with --kind bm25"),
        ({"kind": "dense", "encoder": "no/such"}, "'no/such' is not 'minilm', a folder or a model in the"),
        ({"prompt": Path("no.txt")}, "--prompt no.txt cannot be read"),
        ({"tools": ("nosuch.Tool",)}, "task.tools: nosuch cannot be imported"),
        ({"heldout": Path("no.csv"), "holdout": None}, "--heldout no.csv does not exist: give questions"),
    ],
)
def test_settings_that_cannot_be_used(world: World, more: dict[str, object], sentence: str) -> None:
    assert_said(sentence, refused(world, **more))


def test_devices_that_are_not_there(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Capabilities(torch="2.9", nccl=True, sglang_kernel="1", torch_memory_saver="1")
    monkeypatch.setattr("rlsys.orchestrator.run.detect", lambda: here)
    assert_said("cluster.device=gpu, and torch 2.9, .* finds no CUDA device", refused(world, devices=4))


@pytest.mark.parametrize("sizes", [{}, dict.fromkeys(("hidden_size", "intermediate_size"), 64)])
def test_a_model_of_no_supported_family(world: World, sizes: dict[str, int]) -> None:
    folder = world.docs.with_name("gpt2")
    folder.mkdir()
    shape = {"model_type": "gpt2", "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 320}
    (folder / "config.json").write_text(json.dumps(shape | sizes))
    assert_said("gpt2/config.json", refused(world, folder))


def test_a_model_is_downloaded_once_all_else_is_sound_and_is_checked_then(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = replace(world.wish(), model=HUB)
    with pytest.raises(Downloaded, match=HUB):
        next(commands(wish))
    empty = world.docs.with_name("hub")
    empty.mkdir()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(empty))
    assert_said("hub is not a Hugging Face model folder", refused(world))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(POLICY))
    (train,) = (words for words in world.run(wish) if words[0] == "train")
    assert f"model.path={POLICY}" in train


def cut(file: Path) -> None:
    text = file.read_text()
    file.write_text(text[: len(text) // 2])


def test_a_run_that_cannot_be_read_goes_on(world: World) -> None:
    first = world.run(world.wish())
    run_dir = Path(first[-1][1])
    damages: list[tuple[str, Callable[[Path], object]]] = [
        ("summary.json", cut),
        ("summary.json", lambda file: file.write_text('{"steps": 2}')),
        ("config.yaml", Path.unlink),
        ("config.yaml", lambda file: file.write_text("")),
        ("config.yaml", lambda file: file.write_text("a: [")),
    ]
    for name, damage in damages:
        damage(run_dir / name)
        again = world.run(world.wish())
        assert names(again)[4:] == ["train", "report"], "what is evaluated stays so"
        assert again[4] == first[4]
        assert again[-1] == ("report", str(run_dir))
