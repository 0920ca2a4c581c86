"""Tests that the declared metrics, of which docs/metrics.md is made, are exactly those that a run can log.

Logged names come from a run with every feature, and from the keys of dictionaries in the source.
"""

import ast
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import rlsys
from rlsys.algorithms.losses import DIVISOR, LossInputs, ValueLoss, policy_loss
from rlsys.config.algorithm import AlgorithmConfig, LldsConfig, TeacherConfig
from rlsys.config.compose import typed
from rlsys.config.schema import CustomMetric, RunConfig, SourceConfig, TaskConfig, TrackingConfig
from rlsys.data.trajectory import Action, Branch, Group, Turn
from rlsys.observe.records import read_metrics
from rlsys.observe.status import Progress
from rlsys.orchestrator.evaluation.heldout import Answered, Evaluation
from rlsys.orchestrator.evaluation.scores import scores_of
from rlsys.orchestrator.run import METRIC_TABLES
from rlsys.orchestrator.run_logger import RunLogger
from rlsys.orchestrator.worker_groups import ActorGroup, CriticGroup
from rlsys.weights.flops import Flops
from scripts.metrics_reference import COMMAND, with_tables
from tests.support.trajectories import question, rewarded, trajectory

SOURCE = Path(rlsys.__file__).parent
DOCUMENT = SOURCE.parent / "docs/metrics.md"
KEY = re.compile(r"[a-z]+(/[a-z0-9_*]+)+")
NOT_METRICS = {"search", "config", "cli", "evaluation"}
"""Rooms with keys that have a slash but are not metrics; an evaluation's names get their first part from the logger."""
SPANS = (
    ("rollout", "rollout.group"),
    ("driver", "sync.transfer"),
    ("driver", "reward.score"),
    ("driver", "switch.acquire"),
    ("inference", "logprob.compute"),
    ("actor", "train.apply"),
    ("critic", "values.compute"),
    ("actor", "checkpoint.finish"),
)
DECLARED = [metric for table in METRIC_TABLES.values() for metric in table]


def documented() -> set[str]:
    """Names in the document's tables, with braces expanded and `<x>` replaced by a star."""
    names: set[str] = set()
    for row in re.findall(r"^\| (`.*?) \|", DOCUMENT.read_text(), re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", row):
            head, brace, rest = name.partition("{")
            ends = rest.rstrip("}").split(",") if brace else [""]
            names |= {re.sub(r"<[\w ]+>", "*", head + end) for end in ends}
    return names


def covers(name: str, key: str) -> bool:
    """Tell if a documented name matches `key`: a star stands for one part, dots for any number of parts."""
    pattern = re.escape(name).replace(r"\*", "[^/]+").replace(r"\.\.\.", ".+")
    return re.fullmatch(pattern, key) is not None


def in_source() -> set[str]:
    """Keys with a slash of all dictionaries in the source, with a star for each inserted value."""
    files = [file for file in SOURCE.rglob("*.py") if not NOT_METRICS & {*file.relative_to(SOURCE).parts}]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    return {key for node in nodes for key in map(spelled, keys(node)) if KEY.fullmatch(key)}


def keys(node: ast.AST) -> Iterable[ast.expr | None]:
    return node.keys if isinstance(node, ast.Dict) else [node.key] if isinstance(node, ast.DictComp) else []


def spelled(key: ast.expr | None) -> str:
    parts = key.values if isinstance(key, ast.JoinedStr) else [key]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts)


def updates() -> dict[str, float]:
    """Metrics of actor and critic for one optimiser step."""
    two = torch.tensor([[-1.0, -2.0]])
    mask, alone = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2, dtype=torch.int64)
    inputs = LossInputs(two, two, -two, mask, torch.ones(1, 2), alone, turns=alone)
    _, actor = policy_loss(AlgorithmConfig(llds=LldsConfig(0.2)))(two, two, inputs)
    _, critic = ValueLoss(0.5)(two, two, torch.tensor([[0.0, 1.0]]), mask)
    applied = {"grad_norm": 1.0, "lr": 1e-6}
    groups = {"actor": ActorGroup, "critic": CriticGroup}
    stats = {"actor": actor | {DIVISOR: torch.tensor(2)}, "critic": critic}
    found = {name: group(*[None] * 3)._figures([stats[name]]) for name, group in groups.items()}  # type: ignore
    return {f"{group}/{name}": value for group in groups for name, value in (found[group] | applied).items()}


def full_group() -> Group:
    """A prompt group of a run with a critic, a reference whose KL is in the reward, and off-policy weights."""
    turn = Turn("<answer>yes</answer>", Action.ANSWER, "yes", "", 2, 1, 0, 0.1, 0.0)
    one = rewarded(trajectory(range(3), turns=[turn], rollout_logprobs=[float("nan"), -1.0, -1.0]), 1.0)
    some = np.array([0.0, -1.0, -2.0], dtype=np.float32)
    arrays = dict.fromkeys(("old_logprobs", "ref_logprobs", "weights", "values", "returns"), some)
    branched = replace(one.trajectory, branches=(Branch(0, "first"),))
    full = replace(one, trajectory=branched, parts={"f1": 1.0}, kl_sum=0.5, **arrays)
    return Group(replace(question(1), source="nq"), (full, full))


def asked(step: int) -> Evaluation:
    """An evaluation with every metric: two data sources, one of them with numbers of hops."""
    sources = (("nq", {}), ("hotpotqa", {"hops": 2}))
    questions = [replace(question(1), data_source=source, extra=extra) for source, extra in sources]
    return Evaluation(step, tuple(Answered(one, trajectory(), scores_of("yes", ("yes",))) for one in questions))


@pytest.fixture
def logged(tmp_path: Path) -> set[str]:
    """Names that a run with every feature logs, both in its row and to its trackers."""
    own = typed(["examples.extend.metric.answer_words"], list[CustomMetric], CustomMetric.key)
    task = TaskConfig(sources={"nq": SourceConfig()})
    config = RunConfig(tracking=TrackingConfig(metrics=own, wandb=False), task=task)
    record = RunLogger(config, tmp_path, Progress(), Flops(per_token=1.0), declared=DECLARED)
    record.actor_peak = 1e15
    record.begin_step()
    for group, name in SPANS:
        with record.tracers[group].span(name):
            pass
    record.step(1, [full_group()], [updates()], {})
    record.evaluation(asked(1))
    record.reference_evaluation(asked(1))
    record.close()
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    units = json.loads((tmp_path / "units.json").read_text())
    assert units.keys() == row.keys() - {"step", "time"}
    assert units["time/step"] == ["s", "the step, without evaluations and checkpoints"]
    assert units["kl/k1"][1].endswith("by each estimator"), "without the link"
    words = "Return the mean number of words of an answer, and the share of answers with more than long words."
    assert [units[f"own/answer_words/{key}"] for key in ("mean", "long_share")] == [["words", words], ["share", words]]
    scalars = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()["scalars"]
    return {*row, *scalars, *with_a_teacher(tmp_path / "taught")} - {"step", "time"}


def with_a_teacher(folder: Path) -> set[str]:
    """Names that a run logs whose reference is a teacher; it has no guard of the KL."""
    folder.mkdir()
    algorithm = AlgorithmConfig(teacher=TeacherConfig("/models/teacher"))
    off = TrackingConfig(wandb=False, tensorboard=False)
    record = RunLogger(RunConfig(algorithm=algorithm, tracking=off), folder, Progress(), Flops(1.0), declared=DECLARED)
    record.begin_step()
    record.step(1, [full_group()], [updates()], {})
    record.close()
    (row,) = read_metrics(folder / "metrics.jsonl")
    assert "guard/kl" not in row
    assert "guard/entropy" in row
    return {*row}


def test_page_is_up_to_date() -> None:
    page = DOCUMENT.read_text()
    assert with_tables(page) == page, f"run `{COMMAND}`"
    with pytest.raises(LookupError):
        with_tables(page.replace("## Guards", "## Alarms"))


def test_metrics_document_lists_exactly_what_is_logged(logged: set[str]) -> None:
    names, known = documented(), in_source()
    assert {key for key in logged if not any(covers(name, key) for name in names)} == set()
    assert {key for key in known if "*" not in key} - names == set()
    # The row of a run with engines is checked in tests/live/test_full_loop.py.
    of_engines = {name for name in names if covers("engine/*/*", name)}
    unlogged = {name for name in names - of_engines if not any(covers(name, key) for key in logged)}
    assert unlogged - known == set()
    # A composed key, such as dropped_*, must match a documented name.
    families = {key for key in known if "*" in key}
    assert {key for key in families if not any(covers(key, name.replace("*", "x")) for name in names)} == set()
