"""Writes the driver's part of a checkpoint, and finds the checkpoint that a run goes on from.

A checkpoint's `data` folder has the state of the pipeline and of all that the driver keeps (`state.npz`), the config and
the environment that it was saved under. Nothing of it is unpickled.

`find_origin` returns a checkpoint that is whole and fits the config, or raises UserError; damage is
passed over only with `checkpoint.fall_back`. A run that goes on from its newest checkpoint does so in its own folder;
from an earlier one it branches: it gets a folder of its own, with what was recorded up to there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from rlsys.config.compose import as_dict, differences
from rlsys.config.schema import RunConfig
from rlsys.data.question import SourceState
from rlsys.errors import RunError, UserError
from rlsys.files import Claimed, claim, read_yaml, sha256_of, write_atomically
from rlsys.observe.environment import RUN, changes, environment
from rlsys.observe.kept import copy_kept
from rlsys.observe.run_folder import EVALUATIONS
from rlsys.orchestrator.pipeline.rollout_pipeline import PipelineState
from rlsys.orchestrator.run_logger import EVALUATED, LOGS, History, new_run_dir
from rlsys.weights.checkpoint.state_file import load_values, save_values
from rlsys.weights.checkpoint.store import MANIFEST, CheckpointStore, Saved, check, step_of

CHECKPOINTS = "checkpoints"
_DATA, _STATE, _ENVIRONMENT = "data", "state.npz", "environment.json"
RUN_CONFIG = Path(_DATA) / "config.yaml"
"""Where a checkpoint has the config of its run."""
_QUESTIONS = "task.train_path"
_STARTED = r"\d{8}-\d{6}(-\d+)?"
"""How the name of a run's folder ends, after the run's name."""


@dataclass(frozen=True, slots=True)
class RunState:
    """All that the driver knows between two steps, of which `step` were done."""

    step: int
    pipeline: PipelineState
    prompts: SourceState
    kl: Mapping[str, float]
    history: History
    questions_sha256: str
    """SHA-256 of the file that the questions are from."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The checkpoint that a resumed run goes on from."""

    checkpoint: Saved
    run_dir: Path
    """Folder of the run that saved it."""
    newest: bool
    """Whether that run has saved nothing later."""
    state: RunState
    changed: tuple[str, ...]
    """Packages that have another version now."""

    @property
    def history(self) -> History:
        """What was recorded before; a branch is another run to whoever tracks it."""
        return self.state.history if self.newest else replace(self.state.history, trackers={})


def write_state(checkpoint: Path, state: RunState, config: RunConfig) -> None:
    """Write the `data` of a checkpoint."""
    folder = checkpoint / _DATA
    folder.mkdir()
    save_values(folder / _STATE, state)
    write_atomically(checkpoint / RUN_CONFIG, yaml.safe_dump(as_dict(config), sort_keys=False))
    write_atomically(folder / _ENVIRONMENT, json.dumps(environment(), indent=2) + "\n")


def find_origin(config: RunConfig, note: Callable[[str], None]) -> Origin | None:
    """What `resume` names; None for a run that begins. `note` is told what is passed over, and what is lost."""
    found = _candidates(config)
    if found is None:
        return None
    run_dir, newest, candidates = found
    for saved in candidates:
        try:
            origin = _origin(config, run_dir, saved, saved.step == newest)
        except _Damaged as damage:
            if not config.checkpoint.fall_back:
                raise UserError(
                    f"{str(damage).rstrip('.')}, or set checkpoint.fall_back=true to go on from the newest one that is whole.",
                    code=damage.code,
                    key=damage.key,
                ) from damage
            note(f"{damage} It is passed over, as checkpoint.fall_back=true says.")
        else:
            _tell_lost_rows(origin, note)
            return origin
    raise UserError(
        f"resume={config.resume}: none of the checkpoints in {run_dir / CHECKPOINTS} is whole; give another run, or "
        "begin anew with resume=none.",
        code="malformed",
        key="resume",
    )


def folder_of(config: RunConfig, origin: Origin | None) -> Path:
    """The folder that a run writes to: the resumed run's own, or a new one. Raises RunError if there can be none."""
    if origin is not None and origin.newest:
        return origin.run_dir
    run_dir = new_run_dir(config)
    if origin is not None:
        try:
            _copy_history(origin, run_dir)
        except OSError as problem:
            raise RunError(f"{run_dir} cannot have the history of {origin.run_dir}: {problem}.") from problem
    return run_dir


class _Damaged(UserError):
    """A checkpoint that is not whole."""


def _candidates(config: RunConfig) -> tuple[Path, int, Sequence[Saved]] | None:
    """The run, the step of its newest checkpoint, and the checkpoints that come into question, the best first."""
    if config.resume == "none":
        return None
    if config.resume == "auto":
        stem = Path(config.output_dir) / config.name
        name = re.compile(f"{re.escape(stem.name)}-{_STARTED}")
        runs = [path for path in stem.parent.glob("*") if name.fullmatch(path.name)]
        newest = [saved[-1] for run in runs if (saved := CheckpointStore(run / CHECKPOINTS).saved())]
        if not newest:
            return None
        run_dir = max(newest, key=_published_ns).folder.parent.parent
        saved = _recovered(run_dir)
        return run_dir, saved[-1].step, saved[::-1]
    # As it is spelt, for a run's `checkpoints` may be a link to another disk; then where links lead to.
    for path in (Path(os.path.abspath(config.resume)), Path(config.resume).resolve()):
        step = step_of(path)
        run_dir = path if step is None else path.parent.parent
        saved = _recovered(run_dir) if config.resume else []  # Not the working directory, which "" would be.
        if saved and (step is None or path in (known.folder for known in saved)):
            return run_dir, saved[-1].step, [known for known in saved[::-1] if step is None or known.step <= step]
    raise UserError(
        f"resume={config.resume} has no checkpoint: give the folder of a run or one of its "
        f"{CHECKPOINTS}/global_step_N, auto for the newest run of this name, or none.",
        code="not_found",
        key="resume",
    )


def _published_ns(saved: Saved) -> int:
    """When a checkpoint was published. Its folder's own time changes with whatever is put there later."""
    manifest = saved.folder / MANIFEST
    return manifest.stat().st_mtime_ns if manifest.is_file() else 0


def _recovered(run_dir: Path) -> list[Saved]:
    """Checkpoints of a run, with what a kill left half done put right, unless it still goes on or is not ours."""
    store = CheckpointStore(run_dir / CHECKPOINTS)
    if store.folder.is_dir():
        with suppress(Claimed, OSError), claim(run_dir):
            store.recover()
    return store.saved()


def _origin(config: RunConfig, run_dir: Path, saved: Saved, newest: bool) -> Origin:
    data = saved.folder / _DATA
    try:
        check(saved.folder)
        state = load_values(data / _STATE, RunState)
        before, versions = _mapping(saved.folder / RUN_CONFIG), _mapping(data / _ENVIRONMENT)
    except UserError as problem:
        raise _Damaged(str(problem), code=problem.code, key=problem.key) from problem
    except OSError as problem:
        raise _Damaged(
            f"{saved.folder} cannot be read ({problem}): take an earlier checkpoint.",
            code="malformed",
            key=str(saved.folder),
        ) from problem
    if state.step != saved.step:
        raise _Damaged(
            f"{saved.folder} is of step {state.step}: give it its name back, or take another one.",
            code="mismatch",
            key=str(saved.folder),
        )
    _refuse_differences(config, before, state.questions_sha256, saved.folder)
    if config.trainer.steps < state.step:
        raise UserError(
            f"trainer.steps={config.trainer.steps} lies before {saved.folder}: raise it, or resume from an earlier one.",
            code="mismatch",
            key="trainer.steps",
        )
    return Origin(saved, run_dir, newest, state, tuple(changes(versions, environment())))


def _mapping(file: Path) -> dict[str, Any]:
    """The mapping in a file of YAML, or of JSON, which is YAML too."""
    with suppress(ValueError):
        if isinstance(found := read_yaml(file), dict):
            return found
    raise UserError(f"{file} is damaged: take an earlier checkpoint.", code="malformed", key=str(file))


def _refuse_differences(config: RunConfig, before: Mapping[str, Any], questions_sha256: str, folder: Path) -> None:
    """Raise UserError where the config, or the training file, is another than when `folder` was saved."""
    allowed = config.checkpoint.may_differ
    found = [change for change in differences(before, config) if change.key not in allowed]
    if found:
        listed = "; ".join(f"{change.key} was {change.before}, and is {change.now}" for change in found)
        keys = ",".join(change.key for change in found)
        raise UserError(
            f"{folder} was saved by a run that learns otherwise ({listed}): take these changes back, or allow them with "
            f"'checkpoint.may_differ=[{keys}]'.",
            code="mismatch",
            key=found[0].key,
        )
    path = config.task.train_path
    if _QUESTIONS not in allowed and (now := sha256_of(path)) != questions_sha256:
        raise UserError(
            f"{_QUESTIONS}={path} is another file than when {folder} was saved (its SHA-256 was {questions_sha256[:12]}, "
            f"and is {now[:12]}): bring that one back, or allow this one with 'checkpoint.may_differ=[{_QUESTIONS}]'.",
            code="mismatch",
            key=_QUESTIONS,
        )


def _tell_lost_rows(origin: Origin, note: Callable[[str], None]) -> None:
    """Say where the run's own records have less than they had when it was saved."""
    known = origin.state.history
    for name in LOGS:
        size = known.logs.get(name, 0)
        file = origin.run_dir / name
        found = file.stat().st_size if file.is_file() else 0
        if found < size:
            note(
                f"{file} has {found} bytes and not the {size} it had at step {origin.state.step}: rows are lost, and the "
                "run goes on without them."
            )


def _copy_history(origin: Origin, run_dir: Path) -> None:
    """What was recorded up to the checkpoint."""
    known = origin.state.history
    for name in LOGS:
        if (file := origin.run_dir / name).is_file():
            with file.open("rb") as old:
                (run_dir / name).write_bytes(old.read(known.logs.get(name, 0)))
    (run_dir / EVALUATIONS).mkdir()
    for file in (origin.run_dir / EVALUATIONS).glob("*"):
        found = EVALUATED.fullmatch(file.name)
        if found and int(found[1]) <= known.step:
            shutil.copyfile(file, run_dir / EVALUATIONS / file.name)
    copy_kept(origin.run_dir, run_dir, known.step)
    if (file := origin.run_dir / RUN).is_file():
        shutil.copyfile(file, run_dir / RUN)
