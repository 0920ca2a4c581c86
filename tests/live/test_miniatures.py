"""Tests of every experiment for GPUs: its config, checks and plan, and real runs of its placement in miniature."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from examples.searchr1.tiny.demo import prepare_world
from rlsys.apps.cli import training
from rlsys.apps.cli.main import app
from rlsys.cluster.planning.placement import parse_placement
from rlsys.config.compose import PROJECT_CONFIGS, as_dict
from rlsys.config.derived import has_critic, megatron_groups
from rlsys.config.schema import RunConfig
from rlsys.search.index.folder import BM25, write_manifest
from rlsys.weights.weight_map import read_architecture
from tests.live.miniature_run import tiny_run, train_two_steps
from tests.support.composed import composed
from tests.support.miniature import miniature
from tests.support.tiny_models import LAYERS, ON_SGLANG, tiny_model

SHAPES = PROJECT_CONFIGS / "model" / "shapes"
EXPERIMENTS = sorted({path.stem for path in PROJECT_CONFIGS.glob("*.yaml")} - {"searchr1_tiny_cpu"})
BILLIONS = {
    "qwen2.5-1.5b-instruct": 1.54,
    "qwen2.5-3b-instruct": 3.09,
    "qwen2.5-7b-instruct": 7.62,
    "qwen2.5-14b-instruct": 14.77,
    "qwen2.5-32b-instruct": 32.76,
    "llama-3.2-3b-instruct": 3.21,
    "qwen3-30b-a3b": 30.53,
}
"""Model -> billions of parameters, from its model card."""


def shape_of(experiment: str) -> Path:
    """Folder with the config.json of an experiment's model."""
    name = composed(name=experiment).model.path.lower()
    return next(folder for folder in (SHAPES / name, SHAPES / f"{name}-instruct") if folder.is_dir())


def family_of(experiment: str) -> str:
    return read_architecture(shape_of(experiment)).family


@pytest.fixture
def elsewhere(tmp_path: Path) -> list[str]:
    """Overrides that replace data and index, because only the experiment's own machines have them."""
    (tmp_path / "questions.jsonl").write_text("{}\n")
    (tmp_path / "index").mkdir()
    write_manifest(tmp_path / "index", BM25, {})
    paths = [f"task.{which}_path={tmp_path / 'questions.jsonl'}" for which in ("train", "eval")]
    return [*paths, f"search.index={tmp_path / 'index'}"]


@pytest.fixture(scope="module")
def tiny_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RunConfig]:
    """Function from a model family to the config of a tiny run; it writes the tiny world and a tiny model."""
    prepare_world(Console(quiet=True))
    return cache(lambda family: tiny_run(tiny_model(family, tmp_path_factory.mktemp(family))))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_fits_its_machines_and_has_a_plan(
    experiment: str, elsewhere: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "load_config", lambda name, overrides, _: composed(*overrides, name=name))
    shape = shape_of(experiment)
    settings = [f"model.path={shape}", *elsewhere]
    done = CliRunner().invoke(app, ["train", "-c", experiment, *settings, "--dry-run", "--json"])
    assert done.exit_code == 0, done.output
    plan, cluster = json.loads(done.stdout), composed(name=experiment).cluster
    assert plan["device"] == "gpu"
    assert plan["model"]["parameters"] / 1e9 == pytest.approx(BILLIONS[shape.name], rel=0.005)
    assert cluster.devices_per_node is not None, "the experiment must state its machines"
    assert cluster.device_memory_gib is not None
    assert plan["world_size"] == cluster.nodes * cluster.devices_per_node, "every device must be used"
    for name, group in plan["groups"].items():
        degrees = (
            [group["engines"], group["tp"]] if name == "rollout" else [group[key] for key in ("tp", "pp", "cp", "dp")]
        )
        assert prod(degrees) == len(group["ranks"])
        assert 0 < group["memory_gib_per_rank"] < cluster.device_memory_gib


def placed(config: RunConfig) -> dict[str, tuple[int, ...]]:
    return parse_placement(config.cluster.placement, has_critic(config.algorithm))


def kinds(config: RunConfig) -> set[tuple[str, str]]:
    """All settings of a miniature but the path of its model; for its placement, the groups that share ranks and the degrees of DP."""

    def leaves(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
        for key, value in tree.items():
            yield from leaves(value, f"{above}{key}.") if isinstance(value, dict) else [(above + key, str(value))]

    ranks = placed(config)
    model, cluster = replace(config.model, path=""), replace(config.cluster, placement={})
    found = set(leaves(as_dict(replace(config, name="", model=model, cluster=cluster))))
    found |= {(f"sharing {name}", str([one for one in ranks if ranks[one] == ranks[name]])) for name in ranks}
    for name, settings in megatron_groups(config).items():
        parallel = settings.parallel
        found.add((f"{name} dp", str(len(ranks[name]) // (parallel.tp * parallel.pp * parallel.cp))))
    return found


def combined(settings: set[tuple[str, str]]) -> set[Any]:
    """All settings, and all pairs of settings that place and connect processes."""
    layout = [one for one in sorted(settings) if re.match(r"sharing |cluster\.|\w+( dp$|\.parallel\.)", one[0])]
    return {*settings, *combinations(layout, 2)}


def covering(pairs: Mapping[str, set[Any]]) -> list[str]:
    """Keys whose sets have every element of all sets; the next is always the one with most that are still missing."""
    missing, chosen = set().union(*pairs.values()), list[str]()
    while missing:
        chosen.append(max(pairs, key=lambda name: len(pairs[name] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(0)  # Each of the runs has a time limit.
def test_every_setting_trains_and_every_two_of_a_layout_train_together(
    tiny_of: Callable[[str], RunConfig], tmp_path: Path
) -> None:
    """An experiment whose settings and pairs all train in miniatures of other experiments is not run itself."""
    families = {name: family_of(name) for name in EXPERIMENTS}
    small = {name: miniature(composed(name=name), tiny_of(families[name]), LAYERS) for name in EXPERIMENTS}
    trains = {name: combined(kinds(one)) | ({families[name]} - {*ON_SGLANG}) for name, one in small.items()}
    failed: dict[str, AssertionError] = {}
    for experiment in covering(trains):
        try:
            train_two_steps(small[experiment], tmp_path / experiment)
        except AssertionError as error:
            failed[experiment] = error
    assert not failed
