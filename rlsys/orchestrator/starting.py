"""What every way to start a run does first: refuse what cannot run here, find where it goes on, choose its folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlsys.cluster.planning.placement import launch_problems
from rlsys.config.algorithm_checks import algorithm_notes
from rlsys.config.schema import RunConfig
from rlsys.errors import UserError
from rlsys.observe.capabilities import detect, lacking
from rlsys.orchestrator.resume import Origin, find_origin, folder_of
from rlsys.orchestrator.serving import require_named, silent


def ready_to_start(config: RunConfig, note: Callable[[str], None]) -> tuple[Path, Origin | None]:
    """The folder of a valid `config`'s run, and the checkpoint that it goes on from; `note` is told what is worth knowing.

    Raises UserError for all at once that this machine lacks, and where the run cannot go on as `resume` says, RunError
    where the search server that it names does not answer: before there is a folder, or anything is started.
    """
    missing = list(launch_problems(config))
    if config.cluster.address is None:  # Else other machines do the work, of which this one knows nothing.
        missing += lacking(config, detect())
    if missing:
        raise UserError("\n".join(problem.sentence for problem in missing))
    for sentence in algorithm_notes(config):
        note(sentence)
    origin = find_origin(config, note)
    if origin is not None:
        note(f"The run goes on after step {origin.state.step}, from {origin.checkpoint.folder}.")
        for change in origin.changed:
            note(f"Another version since then: {change}.")
    with silent("rlsys.search"):
        require_named(config.search)
    return folder_of(config, origin), origin
