"""Tests of `rlsys own`: the commands that run, those that a repeated call skips, and mistakes found before any work."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from typer import Exit
from typer.testing import CliRunner

from rlsys.apps.cli import own
from rlsys.apps.cli.main import app
from rlsys.apps.cli.own import OwnOptions, Words, _run, commands
from rlsys.config.compose import load_config
from rlsys.errors import Interrupted, RunError, UserError
from rlsys.observe.status import Progress
from rlsys.orchestrator.run_logger import RunLogger
from tests.support.composed import composed
from tests.support.jsonl import read_rows
from tests.support.tiny_models import POLICY

HUB = "Some/Model"
"""Name of a model that would be downloaded."""


class World:
    """Documents and questions; trainings and evaluations are replaced by writing their results at once."""

    def __init__(self, folder: Path) -> None:
        self.killed = False
        """True if a training is killed soon after its start."""
        self.docs, self.questions, self.out = folder / "docs", folder / "q.csv", folder / "own"
        self.docs.mkdir()
        (self.docs / "a.txt").write_text("Kenya: capital Nairobi.")
        self.questions.write_text("question,answer\n" + "".join(f"what is {n}?,{n}\n" for n in range(20)))

    def wish(self, **more: object) -> OwnOptions:
        given = {"kind": "bm25", "devices": "cpu", "config": "searchr1_tiny_cpu", "holdout": 4} | more
        quiet = ("tracking.wandb=false", "tracking.tensorboard=false")
        given["overrides"] = (*quiet, *given.get("overrides", ()))  # type: ignore[misc]
        return OwnOptions(self.docs, self.questions, POLICY, self.out, **given)  # type: ignore[arg-type]

    def run(self, wish: OwnOptions) -> list[Words]:
        """Run all commands and return them; trainings and evaluations are replaced."""
        done = []
        for words in commands(wish):
            done.append(words)
            self.carry_out(words)
        return done

    def carry_out(self, words: Words) -> None:
        match words:
            case ("train", "-c", name, "--folder-to", note, *settings):
                self.train(name, Path(note), settings)
            case ("eval", *rest):
                out = Path(rest[rest.index("--out") + 1])
                out.mkdir()
                (out / "results.json").write_text("{}")
            case ("report", run_dir):
                assert (Path(run_dir) / "summary.json").is_file()
            case _:
                result = CliRunner().invoke(app, words)
                assert result.exit_code == 0, result.output

    def train(self, name: str, note: Path, settings: list[str]) -> None:
        config = composed(*settings, name=name)
        run_dir = Path(config.output_dir) / f"{config.name}-20250101-000000"  # `folder_of` looks for this name.
        checkpoint = run_dir / "checkpoints" / f"global_step_{config.trainer.steps}" / "actor"
        note.write_text(str(run_dir))
        run_dir.mkdir(parents=True, exist_ok=True)
        RunLogger(config, run_dir, Progress()).close()
        if self.killed:
            raise KeyboardInterrupt
        checkpoint.mkdir(parents=True, exist_ok=True)
        summary = {"checkpoint": str(checkpoint), "steps": config.trainer.steps}
        (run_dir / "summary.json").write_text(json.dumps(summary))


class Downloaded(Exception):
    """Raised in place of a download from the Hub."""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    def ask(name: str, *, local_files_only: bool = False, **_: object) -> str:
        raise LocalEntryNotFoundError(name) if local_files_only else Downloaded(name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", ask)
    monkeypatch.setattr(own, "load_config", lambda name, overrides=(): composed(*overrides, name=name))
    return World(tmp_path)


def names(done: list[Words]) -> list[str]:
    return [" ".join(words[:2]) if words[0] in ("search", "data") else words[0] for words in done]


def test_documents_and_questions_lead_to_a_report_and_finished_work_is_not_repeated(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "load_config", load_config)
    wish = world.wish(steps=3, overrides=("trainer.seed=5",))
    done = world.run(wish)
    assert names(done) == [
        "search ingest", "search index", "data prepare", "data split", "train", "eval", "report",
    ]  # fmt: skip
    settings = done[4][5:]
    config = load_config("searchr1_tiny_cpu", settings)
    assert (config.trainer.steps, config.trainer.seed) == (3, 5)
    assert config.trainer.prompts_per_step == 16, "no more than the training questions"
    assert Path(config.task.train_path).read_text().count("\n") == 16
    assert Path(config.task.eval_path).read_text().count("\n") == 4
    assert (Path(config.search.index or "") / "manifest.json").is_file()
    assert done[5][-len(settings) :] == settings, "the evaluation has the settings of the training"
    run_dir = Path(done[-1][1])
    for name, damage in (("summary.json", "{"), ("config.yaml", "a: [")):
        (run_dir / name).write_text(damage)
    again = world.run(wish)
    assert names(again)[4:] == ["train", "report"], "a damaged run is continued; the evaluation is not repeated"
    assert again[4] == done[4]
    assert again[-1] == ("report", str(run_dir))


def test_an_interrupted_run_continues_and_is_evaluated_again_after_more_steps(world: World) -> None:
    world.killed = True
    with pytest.raises(KeyboardInterrupt):
        world.run(world.wish(steps=2))
    world.killed = False
    asked = []
    for steps in (2, 4):
        done = world.run(world.wish(steps=steps))
        assert names(done)[4:] == ["train", "eval", "report"]
        assert "resume=auto" in done[4]
        asked.append(Path(done[5][done[5].index("--out") + 1]))
    assert asked[0].parent == asked[1].parent, "one run, which was continued"
    assert [folder.name.rpartition("-")[0][-1] for folder in asked] == ["2", "4"], "the steps of each checkpoint"


def test_other_documents_or_questions_start_another_training(world: World) -> None:
    def more_questions() -> None:
        world.questions.write_text("question,answer\n" + "".join(f"who is {n}?,{n}\n" for n in range(9)))

    runs = []
    for change in (lambda: None, lambda: (world.docs / "b.txt").write_text("Mali: capital Bamako."), more_questions):
        change()
        done = world.run(world.wish())
        assert names(done)[4:] == ["train", "eval", "report"]
        runs.append(done[-1])
        assert names(world.run(world.wish()))[4:] == ["report"], "the unchanged is not done again"
    assert len(set(runs)) == 3


def test_other_settings_are_trained_and_evaluated_again(world: World) -> None:
    asked = []
    for overrides in ((), ("eval.limit=3",)):
        done = world.run(world.wish(overrides=overrides))
        assert names(done)[4:] == ["train", "eval", "report"]
        asked.append(done[5][done[5].index("--out") + 1])
    assert len(set(asked)) == 2


@pytest.mark.parametrize(("status", "kind"), [(1, RunError), (2, Exit), (130, Interrupted), (-9, RunError)])
def test_a_failed_command_ends_the_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, kind: type[Exception]
) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n" + (f"exit {status}\n" if status > 0 else f"kill {status} $$\n"))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(kind) as ended:
        _run(("report", "nowhere"))
    assert kind is not Exit or ended.value.exit_code == status  # type: ignore[attr-defined]


def test_own_heldout_questions_prompt_and_tools_are_passed_on(world: World, tmp_path: Path) -> None:
    prompt, heldout = tmp_path / "prompt.txt", tmp_path / "h.csv"
    prompt.write_text("Find out: {question}\n")
    heldout.write_text("question,answer\nWhat is 0?,0\nwhat is love?,nobody knows\n")
    done = world.run(world.wish(heldout=heldout, holdout=None, prompt=prompt))
    assert names(done)[2:6] == ["data prepare", "data prepare", "data split", "train"]
    task = composed(*done[5][5:]).task
    trained, held = (read_rows(Path(file)) for file in (task.train_path, task.eval_path))
    assert held[0]["prompt"][0]["content"].startswith("Find out: What is 0?")
    assert held[0]["extra_info"]["split"] == "test"
    assert [row["question"] for row in trained] == [f"what is {n}?" for n in range(1, 20)], "0 is held out"
    tools = ("rlsys.rollout.tools.calculator.Calculator",)
    words = next(one for one in commands(world.wish(tools=tools)) if one[:2] == ("data", "prepare"))
    assert words[3:5] == ("--tool", tools[0])


def refusal(world: World, model: str | Path = HUB, **more: object) -> UserError:
    """Return the error that refuses the options, after checking that no file was created or removed."""
    before = set(world.docs.parent.rglob("*"))
    with pytest.raises(UserError) as caught:
        next(commands(replace(world.wish(**more), model=model)))
    assert set(world.docs.parent.rglob("*")) == before
    assert "\n" not in str(caught.value)
    return caught.value


def of_questions(text: str) -> Callable[[World], object]:
    return lambda world: world.questions.write_text(text)


@pytest.mark.parametrize(
    ("change", "code", "key"),
    [
        (lambda world: world.docs.rename(world.docs.with_name("elsewhere")), None, "docs"),
        (lambda world: world.questions.unlink(), "not_found", "QUESTIONS"),
        (of_questions("question,answer\nwhat is 1?,1\n  ,2\n"), "missing", "q.csv, line 3"),
        (lambda world: world.out.write_text("a file"), "denied", "--out"),
        ({"overrides": ("trainer.stps=3",)}, None, "trainer.stps"),
        ({"heldout": Path("no.csv")}, "conflict", "--holdout"),
    ],
)
def test_unusable_inputs_are_refused_before_any_file_is_written(
    world: World, change: Callable[[World], object] | dict[str, object], code: str | None, key: str
) -> None:
    more = change if isinstance(change, dict) else {}
    if callable(change):
        change(world)
    problem = refusal(world, **more)
    assert code in (None, problem.code)
    assert key in f"{problem.key} {problem}"


def test_a_model_is_downloaded_only_after_all_other_checks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
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
