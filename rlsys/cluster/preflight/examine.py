"""Everything that a run needs, looked at before anything starts: what is wrong is said all at once.

Contract: nothing is started that stays, no weights are read, and every wait ends by itself. What is wrong with the
config already is not looked at again in the world: a path that is not there is said once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rlsys.cluster.planning.hardware import launch_problems
from rlsys.cluster.planning.placement import parse_placement
from rlsys.cluster.preflight.cluster import devices_here, elsewhere, look_at_ray, machines, ray_findings
from rlsys.cluster.preflight.estimates import plan_of
from rlsys.cluster.preflight.finding import Finding, ok, unknown, wrong
from rlsys.cluster.preflight.gpus import gpu_findings, interface_findings, nccl_findings
from rlsys.cluster.preflight.inputs import MODEL, data_findings, model_findings
from rlsys.cluster.preflight.probes import Probes
from rlsys.cluster.preflight.room import room_findings
from rlsys.cluster.preflight.search import search_findings
from rlsys.cluster.preflight.versions import version_findings
from rlsys.config.derived import has_critic
from rlsys.config.problems import Problem
from rlsys.config.schema import Device, RunConfig
from rlsys.errors import UserError
from rlsys.observe.capabilities import lacking


def examine(
    config: RunConfig, known: Sequence[Problem], probes: Probes, *, launched: bool = False
) -> Iterator[Finding]:
    """All findings for a run of `config` from the machine that `probes` look at, in the order of the table.

    `known` are the problems of the config itself. `launched`: `rlsys launch` will bring machines together and start search servers before the run.
    """
    problems = [*known, *(() if launched else launch_problems(config))]
    yield from (wrong(problem.key, problem.sentence) for problem in problems)
    if not problems:
        yield ok("config", f"{config.name}: its settings go together")
    bad = {problem.key for problem in problems}
    ranks = _ranks(config)
    ray = look_at_ray(config, probes)
    yield from version_findings(config.cluster.device, probes.version)
    yield from _devices(config, devices_here(config, ranks, ray, probes), probes)
    yield from interface_findings(probes)
    if "cluster.address" not in bad:
        yield from ray_findings(config, ranks, ray, probes)
    yield from room_findings(config, plan_of(config), probes)
    if MODEL not in bad:
        yield from model_findings(Path(config.model.path))
    question = ""
    for key, path in (("task.train_path", config.task.train_path), ("task.eval_path", config.task.eval_path)):
        if key not in bad:
            finding, first = data_findings(key, Path(path))
            question = question or (first.text if first else "")
            yield finding
    if not any(key.startswith("search.") for key in bad):
        yield from search_findings(config, question, machines(config, ray), probes)
    if not launched:  # Else each machine is looked at by itself.
        yield from elsewhere(machines(config, ray) - 1)


def _devices(config: RunConfig, wanted: int, probes: Probes) -> Iterator[Finding]:
    """Of the devices that this machine gives, and of what is installed to use them."""
    on_gpus = config.cluster.device is Device.gpu
    if on_gpus and not wanted:
        yield unknown("GPUs", "this machine gives none; those of the others are not seen from here")
        return
    if on_gpus:
        # Before torch looks: it takes memory of the cards.
        yield from gpu_findings(config, wanted, probes)
    problems = list(lacking(config, probes.capabilities()))
    yield from (wrong(problem.key, problem.sentence) for problem in problems)
    if not problems:
        yield ok("capabilities", "nothing that the settings ask for is missing")
    if on_gpus:
        yield from nccl_findings(probes.capabilities())


def _ranks(config: RunConfig) -> int:
    """Devices that the run takes; 1 where its placement cannot be read."""
    try:
        placed = parse_placement(config.cluster.placement, has_critic(config.algorithm))
    except UserError:
        return 1
    return len({rank for held in placed.values() for rank in held})
