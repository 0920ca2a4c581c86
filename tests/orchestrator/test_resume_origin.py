"""Tests of finding the checkpoint to resume from: choice, damage, differences, branches."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlsys.config.algorithm import AlgorithmConfig
from rlsys.config.derived import train_files
from rlsys.config.schema import CheckpointConfig, RunConfig, SourceConfig, TaskConfig, TrainerConfig
from rlsys.data.prompt_source import SourceState
from rlsys.errors import UserError
from rlsys.files import claim, sha256_of
from rlsys.observe.environment import environment
from rlsys.observe.guards import GuardsState
from rlsys.observe.kept import trajectory_steps, write_trajectories
from rlsys.orchestrator.pipeline.rollout_pipeline import PipelineState
from rlsys.orchestrator.pipeline.scheduler import StalenessScheduler
from rlsys.orchestrator.resume import CHECKPOINTS, Origin, RunState, find_origin, folder_of, write_state
from rlsys.orchestrator.run_logger import LOGS, History
from rlsys.weights.checkpoint.store import CheckpointStore
from tests.support.refusals import refused
from tests.support.trajectories import question

STEPS = 9
FIRST, SECOND = "run-20250101-120000", "run-20250102-120000"


class Outputs:
    """A folder of runs, whose checkpoints hold the driver's part and one more file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.questions = folder / "questions.jsonl"
        folder.mkdir()
        self.questions.write_text("{}\n")
        self.task = TaskConfig(train_path=str(self.questions))
        self._age = 0

    def config(self, resume: str = "auto", fall_back: bool = False, *may_differ: str) -> RunConfig:
        return RunConfig(
            output_dir=str(self.folder),
            resume=resume,
            task=self.task,
            trainer=TrainerConfig(steps=STEPS),
            checkpoint=CheckpointConfig(fall_back=fall_back, may_differ=list(may_differ)),
        )

    def run(self, name: str, *steps: int) -> Path:
        """Create a run with one row of each log and one evaluation per step, and checkpoints at `steps`."""
        run_dir = self.folder / name
        (run_dir / "evaluations").mkdir(parents=True)
        for step in range(1, max(steps, default=0) + 1):
            for file in LOGS:
                with (run_dir / file).open("a") as rows:
                    rows.write(json.dumps({"step": step}) + "\n")
            for stem in ("step", "reference_step"):
                for kind in ("json", "jsonl"):
                    (run_dir / "evaluations" / f"{stem}_{step:06d}.{kind}").write_text(f"{step}\n")
            write_trajectories(run_dir, step, ())
            if step in steps:
                self.save(run_dir, step)
        (run_dir / "run.json").write_text('{"lives": []}')
        return run_dir

    def save(self, run_dir: Path, step: int) -> Path:
        """Save a checkpoint that is newer than all earlier ones."""
        store = CheckpointStore(run_dir / CHECKPOINTS)
        folder = store.begin(step)
        write_state(folder, self.state(run_dir, step), self.config("none"))
        (folder / "actor").mkdir()
        (folder / "actor" / "part").write_text("weights")
        published = store.publish(step)
        self._age += 1
        os.utime(published / "manifest.json", ns=(self._age * 10**9, self._age * 10**9))
        return published

    def state(self, run_dir: Path, step: int) -> RunState:
        logs = {name: (run_dir / name).stat().st_size for name in LOGS}
        digests = {file.source: sha256_of(Path(file.path)) for file in train_files(self.task)}
        return RunState(
            step=step,
            pipeline=PipelineState(StalenessScheduler(1, 0).state(), {}, {}, {}, {}),
            prompts=SourceState(3 * step, (question(1),)),
            kl={"coef": 0.25},
            history=History(step, logs, {"wandb": "abc"}, GuardsState({"kl": 2}, ("kl",)), ()),
            questions_sha256=digests.pop("", ""),
            sources_sha256=digests,
        )


@pytest.fixture
def outputs(tmp_path: Path) -> Outputs:
    return Outputs(tmp_path / "outputs")


def found(config: RunConfig) -> Origin:
    """Return the origin; fail if there is none or if a note is printed."""
    notes: list[str] = []
    origin = find_origin(config, notes.append)
    assert origin is not None
    assert notes == []
    return origin


def checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / CHECKPOINTS / f"global_step_{step}"


def test_auto_starts_a_new_run_if_none_of_its_name_has_a_checkpoint(outputs: Outputs, tmp_path: Path) -> None:
    assert find_origin(replace(outputs.config(), output_dir=str(tmp_path / "nowhere")), print) is None
    assert find_origin(outputs.config(), print) is None
    outputs.run(FIRST)
    for other in ("run-large-20250103-120000", "run-20250103-120000-old", "another-20250103-120000", "run-x"):
        outputs.run(other, 1)
    assert find_origin(outputs.config(), print) is None


def test_auto_takes_the_checkpoint_saved_last(outputs: Outputs) -> None:
    first, second = outputs.run(FIRST, 1, 2), outputs.run(f"{SECOND}-1", 1)
    origin = found(outputs.config())
    assert (origin.run_dir, origin.checkpoint.step, origin.newest) == (second, 1, True)
    outputs.run("run-20250103-120000")
    outputs.save(first, 3)
    origin = found(outputs.config())
    assert (origin.run_dir, origin.checkpoint.folder) == (first, checkpoint(first, 3))


def test_path_may_be_relative_or_a_link(outputs: Outputs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_dir = outputs.run(FIRST, 1, 2)
    (tmp_path / "link").symlink_to(run_dir)
    monkeypatch.chdir(checkpoint(run_dir, 1))
    for path, step in ((".", 1), ("../global_step_2/../global_step_2", 2), (str(tmp_path / "link"), 2)):
        origin = found(outputs.config(path))
        assert origin.checkpoint.folder.resolve() == checkpoint(run_dir, step)
        assert (origin.run_dir.resolve(), origin.newest) == (run_dir, step == 2)


def test_checkpoints_may_be_a_link_to_another_disk(outputs: Outputs, tmp_path: Path) -> None:
    run_dir = outputs.run(FIRST, 1, 2)
    shutil.move(run_dir / CHECKPOINTS, tmp_path / "disk")
    (run_dir / CHECKPOINTS).symlink_to(tmp_path / "disk")
    for path in (run_dir, checkpoint(run_dir, 2), "auto"):
        assert found(outputs.config(str(path))).run_dir == run_dir
    assert not found(outputs.config(str(checkpoint(run_dir, 1)))).newest


@pytest.mark.parametrize("kind", ["file", "empty run", "no such step", "elsewhere", "empty"])
def test_path_without_a_checkpoint_is_refused(
    kind: str, outputs: Outputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = outputs.run(FIRST, 1)
    shutil.copytree(checkpoint(run_dir, 1), tmp_path / "global_step_1")
    path: str | Path = {
        "file": outputs.questions,
        "empty run": outputs.run(SECOND),
        "no such step": checkpoint(run_dir, 7),
        "elsewhere": tmp_path / "global_step_1",
        "empty": "",
    }[kind]
    monkeypatch.chdir(run_dir)
    with refused("not_found", "resume"):
        find_origin(outputs.config(str(path)), print)
    assert not [*tmp_path.glob(".*")], "no lock file is left where no run is"


def seal(folder: Path, file: str, content: bytes) -> None:
    """Replace a file and adapt the manifest, so that size and checksum show no difference."""
    (folder / file).write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][file] = len(content)
    del manifest["sha256"][file]
    (folder / "manifest.json").write_text(json.dumps(manifest))


def renamed(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("global_step_2"), folder)


def forgotten(folder: Path) -> None:
    shutil.rmtree(folder / "data")
    (folder / "manifest.json").write_text('{"files": {}, "sha256": {}}')


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "cut part": lambda folder: os.truncate(folder / "actor" / "part", 3),
    "garbage state": lambda folder: seal(folder, "data/state.npz", b"PK\x03\x04 garbage"),
    "manifest that lacks files": forgotten,
    "config that is no YAML": lambda folder: seal(folder, "data/config.yaml", b"a: [1\n b: }"),
    "renamed": renamed,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_checkpoint_is_named_and_skipped_only_with_fall_back(
    damage: Callable[[Path], Any], outputs: Outputs
) -> None:
    run_dir = outputs.run(FIRST, 2, 4)
    damage(checkpoint(run_dir, 4))
    with pytest.raises(UserError, match=re.escape(str(checkpoint(run_dir, 4)))):
        find_origin(outputs.config(), print)
    notes: list[str] = []
    origin = find_origin(outputs.config("auto", True), notes.append)
    assert origin is not None
    assert (origin.checkpoint.step, origin.newest) == (2, False)
    (note,) = notes
    assert str(checkpoint(run_dir, 4)) in note


def test_run_without_an_intact_checkpoint_is_refused(outputs: Outputs) -> None:
    run_dir = outputs.run(FIRST, 1, 2)
    for step in (1, 2):
        (checkpoint(run_dir, step) / "actor" / "part").unlink()
    notes: list[str] = []
    with refused("malformed", "resume"):
        find_origin(outputs.config("auto", True), notes.append)
    assert all(f"global_step_{step}/actor/part" in note for step, note in zip((2, 1), notes, strict=True))


def test_active_run_may_be_branched_from_but_not_resumed(outputs: Outputs) -> None:
    run_dir = outputs.run(FIRST, 1, 2)
    saving = CheckpointStore(run_dir / CHECKPOINTS).begin(3)
    with claim(run_dir):
        origin = found(outputs.config(str(checkpoint(run_dir, 1))))
        assert saving.is_dir()
        assert folder_of(outputs.config(), origin) != run_dir
        origin = found(outputs.config(str(run_dir)))
        folder = folder_of(outputs.config(), origin)
        with pytest.raises(UserError), claim(folder):
            pass
    with claim(run_dir):
        found(outputs.config(str(checkpoint(run_dir, 1))))
    found(outputs.config(str(run_dir)))
    assert not saving.is_dir()


def with_other_settings(outputs: Outputs, *may_differ: str) -> RunConfig:
    return replace(
        outputs.config("auto", False, *may_differ),
        algorithm=AlgorithmConfig(kl_coef=0.75),
        trainer=TrainerConfig(steps=STEPS, seed=77),
    )


def test_changed_learning_settings_are_refused_with_each_key(outputs: Outputs) -> None:
    """`fall_back` does not help, because the checkpoint is not damaged."""
    outputs.run(FIRST, 1, 2)
    config = with_other_settings(outputs)
    config.checkpoint.fall_back = True
    with refused("mismatch", "algorithm.kl_coef") as caught:
        find_origin(config, print)
    assert "[algorithm.kl_coef,trainer.seed]" in str(caught.value)
    with refused("mismatch", "algorithm.kl_coef") as caught:
        find_origin(with_other_settings(outputs, "trainer.seed"), print)
    assert "trainer.seed" not in str(caught.value)
    assert found(with_other_settings(outputs, "trainer.seed", "algorithm.kl_coef")).checkpoint.step == 2


def test_changed_training_file_is_refused(outputs: Outputs) -> None:
    outputs.run(FIRST, 1)
    outputs.questions.write_text("{} \n")
    with refused("mismatch", "task.train_path"):
        find_origin(outputs.config(), print)
    assert found(outputs.config("auto", False, "task.train_path")).checkpoint.step == 1


def test_changed_file_of_a_source_is_refused_by_its_key(outputs: Outputs) -> None:
    other = outputs.folder / "other.jsonl"
    other.write_text("{}\n")
    outputs.task = TaskConfig(sources={"one": SourceConfig(str(outputs.questions)), "two": SourceConfig(str(other))})
    outputs.run(FIRST, 1)
    assert found(outputs.config()).checkpoint.step == 1
    other.write_text("{} \n")
    with refused("mismatch", "task.sources.two.train_path"):
        find_origin(outputs.config(), print)
    assert found(outputs.config("auto", False, "task.sources.two.train_path")).checkpoint.step == 1


def test_fewer_steps_than_the_checkpoint_has_are_refused(outputs: Outputs) -> None:
    outputs.run(FIRST, 2, 5)
    with refused("mismatch", "trainer.steps"):
        find_origin(replace(outputs.config(), trainer=TrainerConfig(steps=4)), print)
    assert found(replace(outputs.config(), trainer=TrainerConfig(steps=5))).checkpoint.step == 5


def test_changed_package_versions_are_reported(outputs: Outputs) -> None:
    run_dir = outputs.run(FIRST, 1)
    before = environment() | {"torch": "0.1", "host": "elsewhere"}
    seal(checkpoint(run_dir, 1), "data/environment.json", json.dumps(before).encode())
    assert found(outputs.config()).changed == (f"torch 0.1 -> {environment()['torch']}",)


def snapshot(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_earlier_checkpoint_starts_a_branch_with_the_records_up_to_it(outputs: Outputs) -> None:
    run_dir = outputs.run(FIRST, 2, 4)
    before = snapshot(run_dir)
    config = outputs.config(str(checkpoint(run_dir, 2)))
    origin = found(config)
    branch = folder_of(config, origin)
    assert branch.parent == outputs.folder
    assert branch != run_dir
    for name in LOGS:
        assert (branch / name).read_text() == '{"step": 1}\n{"step": 2}\n'
    assert {path.name for path in (branch / "evaluations").iterdir()} == {
        f"{stem}_00000{step}.{kind}" for stem in ("step", "reference_step") for step in (1, 2) for kind in ("json", "jsonl")
    }  # fmt: skip
    assert trajectory_steps(branch) == [1, 2]
    assert (branch / "run.json").read_text() == (run_dir / "run.json").read_text(), "the earlier lives"
    assert not (branch / CHECKPOINTS).exists()
    assert origin.history == replace(origin.state.history, trackers={})
    assert origin.state.history.trackers == {"wandb": "abc"}
    assert snapshot(run_dir) == before


def test_lost_rows_are_reported_and_do_not_end_the_run(outputs: Outputs) -> None:
    run_dir = outputs.run(FIRST, 2, 4)
    os.truncate(run_dir / LOGS[0], 16)
    (run_dir / LOGS[1]).unlink()
    config, notes = outputs.config(str(checkpoint(run_dir, 2))), list[str]()
    branch = folder_of(config, find_origin(config, notes.append))
    assert [str(run_dir / name) in note for name, note in zip(LOGS[:2], notes, strict=True)] == [True, True]
    assert (branch / LOGS[0]).stat().st_size == 16
    assert not (branch / LOGS[1]).exists()
