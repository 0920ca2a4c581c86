"""Tests of components from outside of rlsys whose results nothing can use, or that call `exit()`: one sentence names each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlsys.algorithms import optimizers
from rlsys.algorithms.kl import KlController
from rlsys.algorithms.losses import Stats, policy_loss
from rlsys.orchestrator.pipeline.grouping import finish
from tests.extensions.hanging_toys import RELEASED
from tests.extensions.optimizer_toys import Descent
from tests.extensions.small_batches import batch, group
from tests.support.composed import composed
from tests.support.refusals import refused

HERE = "tests.extensions.test_bad_results"


def exits(*_arguments: Any) -> Any:
    raise SystemExit(3)


def failing(*_arguments: Any) -> Any:
    return 1 / 0


def nothing(*_arguments: Any) -> Any:
    return None


def too_few(episodes: Sequence[Any]) -> Any:
    return [np.zeros(len(one.trained)) for one in episodes[1:]]


def of_wrong_length(episodes: Sequence[Any]) -> Any:
    return [np.zeros(1) for _ in episodes]


def infinite(episodes: Sequence[Any]) -> Any:
    return [np.full(len(one.trained), np.inf) for one in episodes]


def texts(episodes: Sequence[Any]) -> Any:
    return [np.full(len(one.trained), "x") for one in episodes]


def with_gradient(episodes: Sequence[Any]) -> Any:
    return [torch.zeros(len(one.trained), requires_grad=True) for one in episodes]


def imaginary(episodes: Sequence[Any]) -> Any:
    return [np.full(len(one.trained), 1j) for one in episodes]


def rotated(logprobs: Tensor, inputs: Any) -> Tensor:  # noqa: ARG001
    return logprobs * 1j


def elsewhere(logprobs: Tensor, inputs: Any) -> Tensor:  # noqa: ARG001
    return torch.empty_like(logprobs, device="meta", requires_grad=True)


def steep(logprobs: Tensor, inputs: Any) -> Tensor:  # noqa: ARG001
    """Return zeros whose gradient is not a number."""
    return (logprobs - logprobs.detach()).abs().sqrt()


def constant(logprobs: Tensor, other: Any) -> Tensor:  # noqa: ARG001
    return logprobs.detach()


def not_a_number(logprobs: Tensor, inputs: Any) -> Tensor:  # noqa: ARG001
    return logprobs + float("nan")


def of_wrong_shape(logprobs: Tensor, inputs: Any) -> Tensor:  # noqa: ARG001
    return logprobs.sum()


def in_place(logprobs: Tensor, inputs: Any) -> Tensor:
    inputs.old_logprobs.view(-1)[0] -= 1.0
    return -logprobs * inputs.advantages


def of_a_group(component: str) -> None:
    finish(group(0.0, 1.0), config_of(f"algorithm.advantage={component}", "algorithm.kl_coef=0"), KlController(0.0))


def of_a_loss(component: str) -> Stats:
    return trained(f"algorithm.policy_loss={component}", "algorithm.kl_coef=0")


def of_a_divergence(component: str) -> Stats:
    return trained(f"algorithm.kl_estimator={component}", "algorithm.kl_coef=0.1")


def config_of(*overrides: str) -> Any:
    return composed(*overrides).algorithm


def trained(*overrides: str) -> Stats:
    """Compute a loss and its gradient; return the statistics."""
    logprobs, inputs = batch([1.0, -2.0])
    total, stats = policy_loss(config_of(*overrides))(logprobs, None, inputs)
    total.backward()
    return stats


ANY = ("exits", "failing", "nothing")
ADVANTAGES = ("texts", "with_gradient", "imaginary", "too_few", "of_wrong_length", "infinite")
LOSSES = ("rotated", "elsewhere", "steep", "constant", "not_a_number", "of_wrong_shape")


@pytest.mark.parametrize(
    ("key", "call", "name"),
    [
        *(("algorithm.advantage", of_a_group, name) for name in (*ANY, *ADVANTAGES)),
        *(("algorithm.policy_loss", of_a_loss, name) for name in (*ANY, *LOSSES, "in_place")),
        *(("algorithm.kl_estimator", of_a_divergence, name) for name in (*ANY, *LOSSES)),
    ],
)
def test_result_that_cannot_be_trained_is_named(key: str, call: Callable[[str], Any], name: str) -> None:
    with refused("user_code", f"{key}.kind") as caught:
        call(f"{HERE}.{name}")
    assert f"{HERE}.{name} " in str(caught.value)
    assert "\n" not in str(caught.value)


class HangsInStep(Descent):
    def move(self, weight: Tensor) -> Tensor:
        RELEASED.wait()
        return super().move(weight)


def test_optimiser_that_hangs_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "TRIAL_S", 0.05)
    with refused("user_code", "actor.optimizer.kind") as caught:
        optimizers.state_bytes(composed(f"actor.optimizer={HERE}.HangsInStep").actor.optimizer)
    assert "HangsInStep " in str(caught.value)
    RELEASED.set()
    RELEASED.clear()


def test_script_that_exits_when_it_is_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script_of_mine.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with refused("user_code", "algorithm.policy_loss.kind"):
        composed("algorithm.policy_loss=script_of_mine.loss")
