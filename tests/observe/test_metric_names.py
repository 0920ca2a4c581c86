"""docs/metrics.md lists every name that a run can log, and no other.

The names are gathered from a row of a run that has everything, and from the keys of dictionaries in the source.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import torch

import rlsys
from rlsys.algorithms.losses import DIVISOR, LossInputs, ValueLoss, policy_loss
from rlsys.config.algorithm import AlgorithmConfig
from rlsys.orchestrator.worker_groups import ActorGroup, CriticGroup

SOURCE = Path(rlsys.__file__).parent
DOCUMENT = SOURCE.parent / "docs/metrics.md"
KEY = re.compile(r"[a-z]+(/[a-z0-9_*]+)+")
NOT_METRICS = {"search", "config", "cli", "evaluation"}
"""Packages whose dictionaries have other keys with a slash; figures of an evaluation get the first part of their name
from the record."""


def documented() -> set[str]:
    """The names of the document's tables, braces spelled out; <x> stands for anything, here a star."""
    names: set[str] = set()
    for row in re.findall(r"^\| (`.*?) \|", DOCUMENT.read_text(), re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", row):
            head, brace, rest = name.partition("{")
            ends = rest.rstrip("}").split(",") if brace else [""]
            names |= {re.sub(r"<[\w ]+>", "*", head + end) for end in ends}
    return names


def covers(name: str, key: str) -> bool:
    """Whether a documented name stands for `key`: a star is one part of it, dots are any."""
    pattern = re.escape(name).replace(r"\*", "[^/]+").replace(r"\.\.\.", ".+")
    return re.fullmatch(pattern, key) is not None


def in_source() -> set[str]:
    """Keys with a slash of all dictionaries in the source, with a star where something is filled in."""
    files = [file for file in SOURCE.rglob("*.py") if not NOT_METRICS & {*file.relative_to(SOURCE).parts}]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    return {key for node in nodes for key in map(spelled, keys(node)) if KEY.fullmatch(key)}


def keys(node: ast.AST) -> Iterable[ast.expr | None]:
    return node.keys if isinstance(node, ast.Dict) else [node.key] if isinstance(node, ast.DictComp) else []


def spelled(key: ast.expr | None) -> str:
    parts = key.values if isinstance(key, ast.JoinedStr) else [key]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts)


def updates() -> dict[str, float]:
    """Figures of actor and critic for an optimiser step."""
    two = torch.tensor([[-1.0, -2.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    inputs = LossInputs(two, two, two, mask, torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.int64))
    _, actor = policy_loss(AlgorithmConfig())(two, two, inputs)
    _, critic = ValueLoss(0.5)(two, two, torch.tensor([[0.0, 1.0]]), mask)
    applied = {"grad_norm": 1.0, "lr": 1e-6}
    groups = {"actor": ActorGroup, "critic": CriticGroup}
    stats = {"actor": actor | {DIVISOR: torch.tensor(2)}, "critic": critic}
    found = {name: group(*[None] * 3)._figures([stats[name]]) for name, group in groups.items()}  # type: ignore
    return {f"{group}/{name}": value for group in groups for name, value in (found[group] | applied).items()}


def test_the_document_lists_what_is_logged_and_nothing_else() -> None:
    names, known, figures = documented(), in_source(), updates()
    assert {key for key in figures if not any(covers(name, key) for name in names)} == set()
    # A key that is put together, such as dropped_*, has a name in the document that it can become.
    families = {key for key in known if "*" in key}
    assert known - families - names == set()
    assert {key for key in families if not any(covers(key, name.replace("*", "x")) for name in names)} == set()
    made = {name for name in names if any(covers(key, name.replace("*", "x")) for key in (*known, *figures))}
    assert names - made == set()
