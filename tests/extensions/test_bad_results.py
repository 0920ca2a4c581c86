"""Tests of components from outside of rlsys whose results nothing can use, or that call `exit()`: one sentence names each."""

from __future__ import annotations

import asyncio
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
from rlsys.data.trajectory import Finish
from rlsys.orchestrator.pipeline.grouping import finish
from rlsys.rollout.agent.episode import EpisodeTools, run_episode
from tests.extensions.hanging_toys import RELEASED
from tests.extensions.optimizer_toys import Descent
from tests.extensions.test_algorithms import batch, group
from tests.rollout.agent.scripted import CODEC, DRAWN, QUESTION, Script
from tests.support.composed import composed
from tests.support.refusals import refused

HERE = "tests.extensions.test_bad_results"


def exits(*_arguments: Any) -> Any:
    raise SystemExit(3)


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


def constant(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    return (logprobs - ref_logprobs).square().detach()


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


@pytest.mark.parametrize(
    ("key", "call", "name"),
    [
        *(("algorithm.advantage", of_a_group, name) for name in ("texts", "with_gradient", "imaginary", "exits")),
        *(("algorithm.policy_loss", of_a_loss, name) for name in ("rotated", "elsewhere", "steep", "exits")),
        *(("algorithm.kl_estimator", of_a_divergence, name) for name in ("rotated", "constant", "steep", "exits")),
    ],
)
def test_result_that_cannot_be_trained_is_named(key: str, call: Callable[[str], Any], name: str) -> None:
    with refused("user_code", f"{key}.kind") as caught:
        call(f"{HERE}.{name}")
    assert f"{HERE}.{name} " in str(caught.value)
    assert "\n" not in str(caught.value)


async def leaves(question: Any, tools: Any, recorder: Any) -> Finish:  # noqa: ARG001
    raise SystemExit(3)


def test_agent_that_exits_is_named() -> None:
    config, script = composed(f"task.agent={HERE}.leaves").task, Script(["one"])
    with refused("user_code", "task.agent.kind"):
        asyncio.run(run_episode(QUESTION, 3, EpisodeTools(script, script, CODEC, config), DRAWN))


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
