"""Writes the driver's part of a checkpoint, and finds the checkpoint from which a run resumes.

    global_step_N/data/state.npz          state of the pipeline, the prompt source, the KL controller and the logs
    global_step_N/data/config.yaml        config of the run
    global_step_N/data/environment.json   machine and package versions

Nothing here is unpickled. `find_origin` returns an intact checkpoint that fits the config, or raises UserError; it
skips damaged checkpoints only with `checkpoint.fall_back`.

A run that resumes from its newest checkpoint continues in its own folder. A run that resumes from an earlier checkpoint
branches: it gets a new folder, which starts with the records up to that checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from rlsys.config.compose import as_dict, differences
from rlsys.config.derived import train_files
from rlsys.config.schema import RunConfig
from rlsys.data.prompt_source import SourceState
from rlsys.errors import UserError, disk_error
from rlsys.files import Claimed, claim, read_yaml, sha256_of, write_atomically
from rlsys.observe.environment import RUN, changes, environment
from rlsys.observe.kept import copy_trajectories
from rlsys.observe.run_folder import EVALUATIONS
from rlsys.orchestrator.pipeline.rollout_pipeline import PipelineState
from rlsys.orchestrator.run_logger import EVALUATED, LOGS, History, new_run_dir
from rlsys.weights.checkpoint.state_file import ADDED, load_values, save_values
from rlsys.weights.checkpoint.store import MANIFEST, CheckpointStore, SavedCheckpoint, check, step_of

CHECKPOINTS = "checkpoints"
_DATA, _STATE, _ENVIRONMENT = "data", "state.npz", "environment.json"
RUN_CONFIG = Path(_DATA) / "config.yaml"
"""Path of the run's config within a checkpoint."""
_STARTED = r"\d{8}-\d{6}(-\d+)?"
"""Pattern of the time stamp that follows the run's name in a folder name."""


@dataclass(frozen=True, slots=True)
class RunState:
    """State of the driver after `step` steps."""

    step: int
    pipeline: PipelineState
    prompts: SourceState
    kl: Mapping[str, float]
    history: History
    questions_sha256: str
    """SHA-256 of the training file; empty for a task with sources."""
    sources_sha256: Mapping[str, str] = field(default_factory=dict, metadata={ADDED: True})
    """SHA-256 of the training file of each source."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Checkpoint from which a run resumes."""

    checkpoint: SavedCheckpoint
    run_dir: Path
    """Folder of the run that saved the checkpoint."""
    newest: bool
    """True if it is the newest checkpoint of that run."""
    state: RunState
    changed: tuple[str, ...]
    """Packages whose version has changed since the checkpoint, each as `NAME OLD -> NEW`."""

    @property
    def history(self) -> History:
        """Records up to the checkpoint. A branch gets no tracker ids, so that trackers show it as a new run."""
        return self.state.history if self.newest else replace(self.state.history, trackers={})


def write_state(checkpoint: Path, state: RunState, config: RunConfig) -> None:
    """Write the `data` folder of a checkpoint."""
    folder = checkpoint / _DATA
    folder.mkdir()
    save_values(folder / _STATE, state)
    write_atomically(checkpoint / RUN_CONFIG, yaml.safe_dump(as_dict(config), sort_keys=False))
    write_atomically(folder / _ENVIRONMENT, json.dumps(environment(), indent=2) + "\n")


def find_origin(config: RunConfig, note: Callable[[str], None]) -> Origin | None:
    """Return the checkpoint that `resume` names; None for a new run.

    `note` is called for each damaged checkpoint that is skipped and for each log that has lost rows.
    """
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
                    f"{str(damage).rstrip('.')}, or set checkpoint.fall_back=true to resume from the newest intact "
                    "one.",
                    code=damage.code,
                    key=damage.key,
                ) from damage
            note(f"{damage} It is skipped because of checkpoint.fall_back=true.")
        else:
            _report_lost_rows(origin, note)
            return origin
    raise UserError(
        f"resume={config.resume}: none of the checkpoints in {run_dir / CHECKPOINTS} is intact; give another run, or "
        "start a new one with resume=none.",
        code="malformed",
        key="resume",
    )


def folder_of(config: RunConfig, origin: Origin | None) -> Path:
    """Return the folder of the run that `origin` continues, or a new folder for a new run or a branch.

    Raises RunError if the records cannot be copied to the folder of a branch.
    """
    if origin is not None and origin.newest:
        return origin.run_dir
    run_dir = new_run_dir(config)
    if origin is not None:
        try:
            _copy_history(origin, run_dir)
        except OSError as problem:
            raise disk_error(problem, problem.filename or run_dir) from problem
    return run_dir


class _Damaged(UserError):
    """Raised for a damaged checkpoint."""


def _candidates(config: RunConfig) -> tuple[Path, int, Sequence[SavedCheckpoint]] | None:
    """Return the run's folder, the step of its newest checkpoint, and the candidates to resume from, newest first.

    Return None if a new run begins.
    """
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
    # First try the path without resolving links, because a run's `checkpoints` may be a link to another disk.
    for path in (Path(os.path.abspath(config.resume)), Path(config.resume).resolve()):
        step = step_of(path)
        run_dir = path if step is None else path.parent.parent
        saved = _recovered(run_dir) if config.resume else []  # "" would mean the working directory.
        if saved and (step is None or path in (known.folder for known in saved)):
            return run_dir, saved[-1].step, [known for known in saved[::-1] if step is None or known.step <= step]
    raise UserError(
        f"resume={config.resume} has no checkpoint: give the folder of a run or one of its "
        f"{CHECKPOINTS}/global_step_N, auto for the newest run of this name, or none.",
        code="not_found",
        key="resume",
    )


def _published_ns(saved: SavedCheckpoint) -> int:
    """Return the publication time: the mtime of the manifest, because later files change the mtime of the folder."""
    manifest = saved.folder / MANIFEST
    return manifest.stat().st_mtime_ns if manifest.is_file() else 0


def _recovered(run_dir: Path) -> list[SavedCheckpoint]:
    """Return the checkpoints of a run. First clean up after a killed process, unless the run is active or read-only."""
    store = CheckpointStore(run_dir / CHECKPOINTS)
    if store.folder.is_dir():
        with suppress(Claimed, OSError), claim(run_dir):
            store.recover()
    return store.saved()


def _origin(config: RunConfig, run_dir: Path, saved: SavedCheckpoint, newest: bool) -> Origin:
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
            f"{saved.folder} holds step {state.step}: restore its name, or use another checkpoint.",
            code="mismatch",
            key=str(saved.folder),
        )
    _refuse_differences(config, before, {"": state.questions_sha256, **state.sources_sha256}, saved.folder)
    if config.trainer.steps < state.step:
        raise UserError(
            f"trainer.steps={config.trainer.steps} is below the step of {saved.folder}: raise it, or resume from an "
            "earlier one.",
            code="mismatch",
            key="trainer.steps",
        )
    return Origin(saved, run_dir, newest, state, tuple(changes(versions, environment())))


def _mapping(file: Path) -> dict[str, Any]:
    """Return the mapping in a YAML or JSON file. Raises UserError if the file is damaged."""
    with suppress(ValueError):
        if isinstance(found := read_yaml(file), dict):
            return found
    raise UserError(f"{file} is damaged: take an earlier checkpoint.", code="malformed", key=str(file))


def _refuse_differences(
    config: RunConfig, before: Mapping[str, Any], questions_sha256: Mapping[str, str], folder: Path
) -> None:
    """Raise UserError if the config or a training file has changed since `folder` was saved.

    `questions_sha256` maps each source to the SHA-256 of its training file.
    """
    allowed = config.checkpoint.may_differ
    found = [change for change in differences(before, config) if change.key not in allowed]
    if found:
        listed = "; ".join(f"{change.key} was {change.before}, and is {change.now}" for change in found)
        keys = ",".join(change.key for change in found)
        raise UserError(
            f"{folder} was saved with another config ({listed}): undo these changes, or allow them with "
            f"'checkpoint.may_differ=[{keys}]'.",
            code="mismatch",
            key=found[0].key,
        )
    for source, key, path in train_files(config.task):
        was = questions_sha256.get(source, "")
        if key not in allowed and (now := sha256_of(path)) != was:
            raise UserError(
                f"{key}={path} has changed since {folder} was saved (its SHA-256 was {was[:12]} and is {now[:12]}): "
                f"restore the old file, or allow this one with 'checkpoint.may_differ=[{key}]'.",
                code="mismatch",
                key=key,
            )


def _report_lost_rows(origin: Origin, note: Callable[[str], None]) -> None:
    """Report the logs that are shorter now than when the checkpoint was saved."""
    known = origin.state.history
    for name in LOGS:
        size = known.logs.get(name, 0)
        file = origin.run_dir / name
        found = file.stat().st_size if file.is_file() else 0
        if found < size:
            note(
                f"{file} has {found} bytes, but had {size} at step {origin.state.step}: rows are lost, and the run "
                "continues without them."
            )


def _copy_history(origin: Origin, run_dir: Path) -> None:
    """Copy the records up to the checkpoint to `run_dir`."""
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
    copy_trajectories(origin.run_dir, run_dir, known.step)
    if (file := origin.run_dir / RUN).is_file():
        shutil.copyfile(file, run_dir / RUN)
