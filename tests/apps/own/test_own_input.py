"""`rlsys own`: a mistake is one sentence, before anything is made or downloaded; a damaged run goes on and is not lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from rlsys.apps.cli.own import commands
from rlsys.errors import UserError
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


def refusal(world: World, model: str | Path = HUB, **more: object) -> UserError:
    """The error that refuses a wish and leaves everything as it was."""
    before = set(world.docs.parent.rglob("*"))
    with pytest.raises(UserError) as caught:
        next(commands(replace(world.wish(**more), model=model)))
    assert set(world.docs.parent.rglob("*")) == before
    (_,) = str(caught.value).splitlines()
    return caught.value


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
    ("spoil", "code", "key"),
    [
        (rename_documents, None, "docs"),
        (spoil_documents, "empty", "docs"),
        (lambda world: world.questions.unlink(), "not_found", "QUESTIONS"),
        (rename_questions, "unsupported", "QUESTIONS"),
        (ask(""), "empty", "q.csv"),
        (ask("question,answer\nwhat is 1?,1\n  ,2\n"), "missing", "q.csv, line 3"),
        (ask("question,answer\nwhat?,1\nwho?,2\n"), "out_of_range", "q.csv"),
        (write_where_out_is, "denied", "--out"),
    ],
)
def test_files_that_cannot_be_used(world: World, spoil: Callable[[World], None], code: str | None, key: str) -> None:
    spoil(world)
    problem = refusal(world)
    assert code in (None, problem.code)
    assert key in f"{problem.key} {problem}"


@pytest.mark.parametrize(
    ("more", "code", "key"),
    [
        ({"overrides": ("trainer.stps=3",)}, None, "trainer.stps"),
        ({"overrides": ("trainer.steps=2",), "steps": 1}, "conflict", "--steps"),
        ({"kind": "fancy"}, "unknown", "--kind"),
        ({"encoder": "minilm"}, "conflict", "--encoder"),
        ({"heldout": Path("no.csv"), "holdout": None}, "not_found", "--heldout"),
        ({"heldout": Path("no.csv")}, "conflict", "--holdout"),
        ({"overrides": ("task.max_turn_tokens=9999",)}, None, "task.max_total_tokens"),
        ({"prompt": Path("no.txt")}, None, "no.txt"),
        ({"tools": ("nosuch.Tool",)}, None, "nosuch"),
        ({"kind": "dense", "encoder": "no/such"}, None, "no/such"),
    ],
)
def test_settings_that_cannot_be_used(world: World, more: dict[str, object], code: str | None, key: str) -> None:
    problem = refusal(world, **more)
    assert code in (None, problem.code)
    assert key in f"{problem.key} {problem}"


def test_a_model_is_downloaded_once_all_else_is_sound_and_is_checked_then(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = replace(world.wish(), model=HUB)
    with pytest.raises(Downloaded, match=HUB):
        next(commands(wish))
    empty = world.docs.with_name("hub")
    empty.mkdir()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(empty))
    assert str(empty) in str(refusal(world))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(POLICY))
    (train,) = (words for words in world.run(wish) if words[0] == "train")
    assert f"model.path={POLICY}" in train


def test_a_run_that_cannot_be_read_goes_on(world: World) -> None:
    first = world.run(world.wish())
    run_dir = Path(first[-1][1])
    damages: list[tuple[str, Callable[[Path], object]]] = [
        ("summary.json", lambda file: file.write_text("{")),
        ("summary.json", lambda file: file.write_text('{"steps": 2}')),
        ("config.yaml", Path.unlink),
        ("config.yaml", lambda file: file.write_text("a: [")),
    ]
    for name, damage in damages:
        damage(run_dir / name)
        again = world.run(world.wish())
        assert names(again)[4:] == ["train", "report"], "what is evaluated stays so"
        assert again[4] == first[4]
        assert again[-1] == ("report", str(run_dir))
