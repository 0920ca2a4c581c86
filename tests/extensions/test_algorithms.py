"""Tests of advantage estimators, policy losses and KL estimators from one file outside of rlsys, chosen by config."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlsys.algorithms.kl import KlController
from rlsys.algorithms.losses import policy_loss
from rlsys.config.compose import as_dict, differences, recorded, typed
from rlsys.config.derived import has_critic, needs_whole_mini_batch
from rlsys.config.problems import algorithm_problems
from rlsys.config.schema import RunConfig
from rlsys.data.trajectory import Group
from rlsys.errors import Code
from rlsys.orchestrator.pipeline.grouping import finish, over_mini_batch
from rlsys.weights.checkpoint.state_file import load_values, save_values
from tests.extensions.small_batches import batch, group
from tests.support.composed import composed
from tests.support.refusals import refused

FILE = """
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt, Interval, Le

from rlsys.components import needs


def scaled(logprobs, inputs, *, factor: Annotated[float, Gt(0), Le(10)] = 2.0, label: str = "x"):
    return -factor * inputs.advantages * logprobs

class Shape(Enum):
    FLAT = 0
    STEEP = 1

def of_many_types(
    logprobs, inputs, *, steps: Annotated[int, Interval(ge=1, le=4)] = 2, sizes: list[Annotated[int, Ge(0)]] = [1],
    name: int | str = "a", shape: Shape = Shape.FLAT, pair: tuple[int, float] = (1, 2.0), where: Path = Path("x"),
    power: Literal[1, 2] = 1, weights: dict[str, float] = {"a": 1.0},
):
    assert isinstance(shape, Shape) and isinstance(where, Path) and isinstance(pair, tuple)
    scale = steps * sum(sizes) * pair[1] * power * sum(weights.values()) * (10 if shape is Shape.STEEP else 1)
    return -scale * inputs.advantages * logprobs

def of_a_callable(logprobs, inputs, *, shape: Callable[[int], int] = len):
    return logprobs

def of_a_bounded_text(logprobs, inputs, *, name: Annotated[str, Ge(0)] = "a"):
    return logprobs

def with_a_bad_default(logprobs, inputs, *, factor: Annotated[float, Gt(0)] = 0.0):
    return logprobs

def of_a_taken_name(logprobs, inputs, *, needs: float = 1.0):
    return logprobs

def of_kind(logprobs, inputs, *, kind: str = "a"):
    return logprobs

def per_advantage(logprobs, inputs):
    return -(inputs.advantages / inputs.advantages.abs()) * logprobs

def must_be_told(logprobs, inputs, *, factor: float):
    return -factor * inputs.advantages * logprobs

def squared(logprobs, ref_logprobs, *, factor: float = 1.0):
    return factor * (logprobs - ref_logprobs) ** 2

def first_wins(episodes, *, prize: float = 1.0):
    return [np.full(len(one.trained), prize if place == 0 else -prize) for place, one in enumerate(episodes)]

@needs("mini_batch")
def best_of_batch(groups):
    best = max(one.score for group in groups for one in group)
    return [[np.full(len(one.trained), one.score - best) for one in group] for group in groups]

@needs("critic")
def value_error(episodes):
    return [(one.score - one.values, np.full(len(one.trained), one.score)) for one in episodes]

@needs("telescope")
def unknown_need(episodes):
    return []

def untyped(logprobs, inputs, *, factor=1.0):
    return logprobs

def one_argument(logprobs):
    return logprobs

def with_a_shared_key(logprobs, inputs, *, timeout_s: float = 1.0):
    return logprobs

number = 3
"""

Own = Callable[..., RunConfig]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Own]:
    """Write the file to a folder of PYTHONPATH, and load configs with it."""
    (tmp_path / "toys.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    yield composed
    importlib.sys.modules.pop("toys", None)


def test_policy_loss_and_kl_estimator_of_ones_own_are_trained(own: Own) -> None:
    config = own(
        "algorithm.policy_loss=toys.scaled",
        "algorithm.policy_loss.factor=3",
        "algorithm.kl_estimator={kind: toys.squared, factor: 0.5}",
        "algorithm.kl_coef=0.1",
    )
    assert list(algorithm_problems(config)) == []
    logprobs, inputs = batch([1.0, -2.0])
    total, stats = pickle.loads(pickle.dumps(policy_loss(config.algorithm)))(logprobs, None, inputs)
    total.backward()
    assert inputs.ref_logprobs is not None
    now, ref = logprobs.detach()[0].tolist(), inputs.ref_logprobs[0].tolist()
    expected = [-3.0 * a * p + 0.1 * 0.5 * (p - r) ** 2 for a, p, r in zip((1.0, -2.0), now, ref, strict=False)]
    slopes = [-3.0 * a + 0.1 * (p - r) for a, p, r in zip((1.0, -2.0), now, ref, strict=False)]
    assert float(total.detach()) == pytest.approx(sum(expected), rel=1e-5)
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([*slopes, 0.0], rel=1e-5)
    assert float(stats["clip_fraction"]) == 0


def test_settings_are_typed_bounded_recorded_and_compared_like_every_key(own: Own) -> None:
    config = own("algorithm.policy_loss=toys.scaled", "algorithm.policy_loss.factor='4'")
    assert as_dict(config)["algorithm"]["policy_loss"] == {
        **{"kind": "toys.scaled", "timeout_s": 300.0, "factor": 4.0, "label": "x"}
    }
    again = typed(recorded(as_dict(config), ["toys.scaled"]), RunConfig)
    assert again == pickle.loads(pickle.dumps(config)) == config
    other = own("algorithm.policy_loss=toys.scaled")
    assert [one.key for one in differences(as_dict(other), config)] == ["algorithm.policy_loss.factor"]
    with refused("out_of_range", "algorithm.policy_loss.factor"):
        own("algorithm.policy_loss=toys.scaled", "algorithm.policy_loss.factor=11")


def test_settings_have_the_types_and_bounds_that_the_component_declares(own: Own) -> None:
    loss = "algorithm.policy_loss"
    given = (f"{loss}.sizes=[1,2]", f"{loss}.shape=1", f"{loss}.weights={{b: 2}}", f"{loss}.pair=[3,0.5]")
    config = own(f"{loss}=toys.of_many_types", "algorithm.kl_coef=0", *given)
    assert as_dict(config)["algorithm"]["policy_loss"] == {
        **{"kind": "toys.of_many_types", "steps": 2, "sizes": [1, 2], "name": "a", "shape": 1, "pair": [3, 0.5]},
        **{"where": "x", "power": 1, "weights": {"b": 2.0}, "timeout_s": 300.0},
    }
    logprobs, inputs = batch([1.0])
    total, _ = policy_loss(config.algorithm)(logprobs, None, inputs)
    assert float(total.detach()) == pytest.approx(-2 * 3 * 0.5 * 2.0 * 10 * float(logprobs[0, 0].detach()))
    assert (
        as_dict(own(f"{loss}=toys.of_many_types", f"{loss}.weights={{}}"))["algorithm"]["policy_loss"]["weights"] == {}
    )
    for value, code in (("steps=5", "out_of_range"), ("sizes=[-5]", "out_of_range"), ("shape=2", "wrong_type")):
        with refused(code, f"{loss}.{value.partition('=')[0]}"):
            own(f"{loss}=toys.of_many_types", f"{loss}.{value}")


def test_record_of_a_run_imports_only_components_that_the_reader_names(own: Own) -> None:
    kept = {"algorithm": {"policy_loss": {"kind": "no_such_module.loss", "factor": 2.0}}}
    assert recorded(kept)["algorithm"]["policy_loss"] == kept["algorithm"]["policy_loss"]
    assert "algorithm.policy_loss.kind" in {one.key for one in differences(kept, own())}


@pytest.mark.parametrize(
    ("overrides", "code", "key"),
    [
        (["policy_loss=toys.missing"], "unknown", "policy_loss.kind"),
        (["policy_loss=no_such_module.loss"], "user_code", "policy_loss.kind"),
        (["policy_loss=pppo"], "unknown", "policy_loss.kind"),
        (["policy_loss=toys.one_argument"], "user_code", "policy_loss.kind"),
        (["policy_loss=toys.untyped"], "user_code", "policy_loss.kind"),
        (["policy_loss=toys.number"], "user_code", "policy_loss.kind"),
        (["policy_loss=toys.with_a_shared_key"], "conflict", "policy_loss.kind"),
        (["policy_loss=toys.must_be_told"], "missing", "policy_loss.factor"),
        (["policy_loss=toys.scaled", "policy_loss.factor=much"], "wrong_type", "policy_loss.factor"),
        (["policy_loss=toys.scaled", "policy_loss.clip_low=0.1"], "conflict", "policy_loss.clip_low"),
        (["policy_loss=toys.scaled", "policy_loss.facto=1"], "unknown", "policy_loss.facto"),
        (["policy_loss=toys.of_a_callable"], "user_code", "policy_loss.kind"),
        (["policy_loss=toys.of_a_bounded_text"], "user_code", "policy_loss.kind"),
        (["policy_loss=toys.with_a_bad_default"], "user_code", "policy_loss.kind"),
        (["policy_loss=toys.of_a_taken_name"], "conflict", "policy_loss.kind"),
        (["policy_loss=toys.of_kind"], "conflict", "policy_loss.kind"),
        (["advantage=toys.unknown_need"], "user_code", "advantage.kind"),
        (["kl_estimator=toys.first_wins"], "user_code", "kl_estimator.kind"),
    ],
)
def test_component_that_cannot_work_is_refused_before_the_run(
    own: Own, overrides: list[str], code: Code, key: str
) -> None:
    with refused(code, f"algorithm.{key}"):
        own(*(f"algorithm.{one}" for one in overrides))


def test_loss_may_be_anything_at_untrained_tokens(own: Own) -> None:
    loss = policy_loss(own("algorithm.policy_loss=toys.per_advantage", "algorithm.kl_coef=0").algorithm)
    logprobs, inputs = batch([3.0, -2.0])
    total, _ = loss(logprobs, None, inputs)  # 0 / 0 at the untrained token
    total.backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == [-1.0, 1.0, 0.0]


def advantages(group: Group) -> list[list[float]]:
    return [sample.advantages.tolist() for sample in group.samples]


def test_advantage_estimator_of_a_group(own: Own) -> None:
    config = own("algorithm.advantage=toys.first_wins", "algorithm.advantage.prize=2", "algorithm.kl_coef=0").algorithm
    assert (has_critic(config), needs_whole_mini_batch(config)) == (False, False)
    finished = finish(group(0.0, 1.0), config, KlController(0.0))
    assert advantages(finished) == [[0.0, 2.0, 2.0], [0.0, -2.0, -2.0]]


@dataclass(frozen=True)
class Step:
    groups: tuple[Group, ...]


def test_advantage_estimator_of_a_mini_batch_waits_for_it(own: Own, tmp_path: Path) -> None:
    config = own("algorithm.advantage=toys.best_of_batch", "algorithm.kl_coef=0").algorithm
    assert needs_whole_mini_batch(config)
    groups = [finish(group(*rewards), config, KlController(0.0)) for rewards in ((0.0, 1.0), (3.0,))]
    save_values(
        tmp_path / "groups", Step(tuple(groups))
    )  # A checkpoint may hold groups that wait for their mini-batch.
    groups = list(load_values(tmp_path / "groups", Step).groups)
    assert [advantages(one) for one in over_mini_batch(groups, config)] == [
        [[0.0, -3.0, -3.0], [0.0, -2.0, -2.0]],
        [[0.0, 0.0, 0.0]],
    ]


def test_advantage_estimator_with_a_critic_gives_its_targets(own: Own) -> None:
    config = own("algorithm.advantage=toys.value_error", "algorithm.kl_coef=0").algorithm
    assert has_critic(config)
    (found,) = finish(group(1.0), config, KlController(0.0)).samples
    assert found.advantages.tolist() == [0.0, 0.75, 0.5]
    assert found.returns is not None
    assert found.returns.tolist() == [0.0, 1.0, 1.0]


def test_examples_compute_what_they_say(own: Own) -> None:
    config = own(
        "algorithm.policy_loss={kind: examples.extend.policy_loss.parabola, width: 0.5}",
        "algorithm.advantage=examples.extend.advantage.above_median",
        "algorithm.kl_estimator=examples.extend.kl_estimator.bounded_k2",
        "algorithm.kl_coef=1",
    ).algorithm
    logprobs, inputs = batch([1.0, -2.0])
    _, stats = policy_loss(config)(logprobs, None, inputs)
    ratios = (logprobs.detach() - inputs.old_logprobs).exp()[0].tolist()
    losses = [abs(a) * (r - 1) ** 2 - r * a for a, r in zip((1.0, -2.0), ratios, strict=False)]
    assert float(stats["policy_loss"]) == pytest.approx(sum(losses), rel=1e-5)
    assert inputs.ref_logprobs is not None
    gaps = (logprobs.detach() - inputs.ref_logprobs)[0, :2].tolist()
    assert float(stats["kl"]) == pytest.approx(sum(gap**2 / 2 for gap in gaps), rel=1e-5), "no gap exceeds the limit"
    finished = finish(group(0.0, 1.0, 5.0), config, KlController(0.0))
    assert advantages(finished) == [[0.0, -1.0, -1.0], [0.0, 0.0, 0.0], [0.0, 4.0, 4.0]]
