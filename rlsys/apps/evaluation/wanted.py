"""What an evaluation needs: questions, a model, search. All that is missing is said at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rlsys.apps.evaluation.baselines import SEARCHING, Baseline
from rlsys.apps.evaluation.model import Model, find_model
from rlsys.apps.evaluation.sets import Source, find_sources
from rlsys.config.schema import RunConfig
from rlsys.errors import RunError, UserError
from rlsys.orchestrator.search_server import Serving, silent
from rlsys.orchestrator.validate import Problem, find_problems

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was found."""

    sources: Sequence[Source]
    model: Model
    config: RunConfig
    """The one that was given, but with the folder that says what model it is, for what reads that before the model itself
    is there."""


async def find_wanted(
    config: RunConfig,
    baseline: Baseline,
    names: Sequence[str],
    data_dir: Path,
    model: Path | None,
    hf: Path | None,
) -> Wanted:
    """What the flags and `config` name, once nothing is missing; without `names` the set that the config holds out.

    Raises UserError with a line for everything that is missing or wrong, RunError if that is an unreachable search server
    alone.
    """
    problems: list[str] = []
    ignored = ["task.train_path"]  # Nothing is trained.
    sources = [Source(config.task.eval_path, Path(config.task.eval_path))]
    if names:
        ignored.append("task.eval_path")
        sources = _attempt(lambda: find_sources(names, data_dir), problems) or []
    given = f"model.path={config.model.path}" if model is None else f"--model {model}"
    found = _attempt(lambda: find_model(model or Path(config.model.path), hf, given), problems)
    if found is None:
        ignored.append("model.path")
    else:
        config = replace(config, model=replace(config.model, path=str(found.shape)))
    if baseline not in SEARCHING:
        ignored.append("search")
    elif baseline is not Baseline.none and not config.search.enabled:
        problems.append(f"--baseline {baseline} searches, and search.enabled=false: set it to true, or leave it out.")
    in_config = [problem for problem in find_problems(config) if not _is_about(problem, *ignored)]
    problems += [problem.sentence for problem in in_config]
    unreachable = ""
    if baseline in SEARCHING and not any(_is_about(problem, "search") for problem in in_config):
        unreachable = await _unreachable(config)
    if unreachable and not problems:
        raise RunError(unreachable)
    if problems or found is None:
        raise UserError("\n".join([*problems, *([unreachable] if unreachable else [])]))
    return Wanted(sources, found, config)


def _attempt(find: Callable[[], T], problems: list[str]) -> T | None:
    """What `find` finds; None where it raises UserError, whose sentence is added to `problems`."""
    try:
        return find()
    except UserError as problem:
        problems.append(str(problem))
        return None


def _is_about(problem: Problem, *keys: str) -> bool:
    """Whether it is a problem of one of `keys`, or of what is in one that is a group."""
    return any(f"{problem.key}.".startswith(f"{key}.") for key in keys)


async def _unreachable(config: RunConfig) -> str:
    """Why the search server that `config` names cannot be asked; empty where it can, or none is named."""
    if config.search.url is None:
        return ""
    try:
        with silent("rlsys.search"):
            await Serving(replace(config.search, retries=1), None).require()
    except RunError as problem:
        return str(problem)
    return ""
