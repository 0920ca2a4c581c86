"""Tests of optimisers from one file outside of rlsys, chosen by config: a real actor steps, saves and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from examples.extend import optimizer as example
from rlsys.algorithms.optimizers import state_bytes
from rlsys.config.schema import RunConfig
from rlsys.errors import UserError
from rlsys.orchestrator.validate import find_problems
from rlsys.trainer.actor import Actor
from tests.support import tiny_configs
from tests.support.composed import composed
from tests.support.megatron_processes import Group, on_ranks
from tests.support.refusals import refused
from tests.trainer import reference

TOYS = "tests.extensions.optimizer_toys"
LION = f"{example.__name__}.Lion"
RATE, DECAY, BETA1, BETA2 = 1e-3, 0.1, 0.8, 0.95
DEMO_FILES = {"model.path", "search.index", "task.train_path", "task.eval_path"}
"""Keys of files that only a machine with the demo has."""


def config_of(kind: str, *settings: str, group: str = "actor") -> RunConfig:
    return composed(f"{group}.optimizer={kind}", *(f"{group}.{one}" for one in settings))


def lion(model: Path | str = "none") -> RunConfig:
    config = config_of(
        LION,
        *(f"optimizer.{key}={value}" for key, value in (("lr", RATE), ("weight_decay", DECAY), ("clip_grad", 0))),
        *(f"optimizer.beta{number}={beta}" for number, beta in ((1, BETA1), (2, BETA2))),
    )
    config.model.path, config.algorithm.kl_coef = str(model), 0.0
    return config


def _step(actor: Actor, seed: int) -> dict[str, torch.Tensor]:
    """Take a step; return the divided gradients by name."""
    actor.accumulate(reference.make_batches(2, seed=seed))
    grads = {name: one.main_grad.clone() for name, one in actor._policy.parameters.items()}  # type: ignore[attr-defined]
    divisor = actor.apply().divisor
    return {name: grad / divisor for name, grad in grads.items()}


def _weights(actor: Actor) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in actor._policy.parameters.items()}


def _steps_and_resumes(group: Group, config: RunConfig, folder: Path) -> list[Any]:
    actor = Actor.from_config(config, group.meet())
    found: list[Any] = [_weights(actor)]
    for seed in range(2):
        found += [_step(actor, seed), _weights(actor)]
        actor.begin_save(folder / str(seed))
        actor.finish_save()
    _step(actor, 2)
    resumed = Actor.from_config(config, group.meet())
    resumed.load(folder / "1")
    _step(resumed, 2)
    assert all(map(torch.equal, _weights(actor).values(), _weights(resumed).values()))
    held = sum(
        one.nbytes for state in resumed._optimizer._members[0].optimizer.state.values() for one in state.values()
    )
    assert held == sum(one.numel() for one in found[0].values()) * state_bytes(config.actor.optimizer)
    return found


def test_example_named_in_the_config_trains_a_real_actor_and_resumes_exactly(tmp_path: Path) -> None:
    """The formula by hand, on the actor's own gradients: m, g -> w - lr (sign(b1 m + (1 - b1) g) + decay w)."""
    config = lion(reference.make_model(tiny_configs.qwen2(layers=2), tmp_path / "model"))
    (found,) = on_ranks(_steps_and_resumes, 1, config, tmp_path)
    weights, means = found[0], {name: torch.zeros_like(one) for name, one in found[0].items()}
    for grads, stepped in zip(found[1::2], found[2::2], strict=True):
        for name, grad in grads.items():
            decay = DECAY if grad.dim() > 1 else 0.0
            sign = torch.sign(BETA1 * means[name] + (1 - BETA1) * grad)
            weights[name] = weights[name] - RATE * (sign + decay * weights[name])
            means[name] = BETA2 * means[name] + (1 - BETA2) * grad
            torch.testing.assert_close(stepped[name], weights[name], rtol=1e-6, atol=1e-7, msg=name)


def test_settings_that_contradict_an_optimiser_are_refused() -> None:
    assert config_of(LION).actor.optimizer.min_lr == 0.0
    assert {one.key for one in find_problems(config_of(LION))} <= DEMO_FILES
    with refused("conflict", "actor.optimizer.distributed"):
        config_of(LION, "optimizer.distributed=true")
    with refused("conflict", "actor.optimizer.overlap_param_gather"):
        config_of("sgd", "optimizer.overlap_param_gather=true")
    with refused("conflict", "actor.optimizer.distributed"):
        config_of("muon", "optimizer.distributed=true")
    with refused("out_of_range", "actor.optimizer.pull"):
        config_of(f"{TOYS}.Descent", "optimizer.pull=0")
    with refused("conflict", "actor.optimizer.kind"):
        config_of(f"{TOYS}.takes_the_rate")


@pytest.mark.parametrize(
    ("kind", "nbytes"),
    [("sgd", 0.0), (LION, 4.0), ("torch.optim.RMSprop", 4.0), ("torch.optim.RAdam", 8.0), (f"{TOYS}.Descent", 0.0)],
)
def test_state_is_measured_for_the_plan(kind: str, nbytes: float) -> None:
    assert state_bytes(config_of(kind).actor.optimizer) == nbytes


SPOILT = [
    *("Fails", "NotANumber", "KeepsRows", "KeepsAFunction", "Forgets", "TakesMatrices", "HasNoRate"),
    *("CannotBegin", "nothing", "only_parameters"),
]


@pytest.mark.parametrize(("kind", "group"), [*((kind, "actor") for kind in SPOILT), ("Fails", "critic")])
def test_component_that_is_no_optimiser_is_refused_before_anything_starts(kind: str, group: str) -> None:
    with pytest.raises(UserError, match=rf"^.*{TOYS}\.{kind}\b.*$") as caught:
        state_bytes(getattr(config_of(f"{TOYS}.{kind}", group=group), group).optimizer)
    assert (caught.value.code, caught.value.key) == ("user_code", f"{group}.optimizer.kind")
    assert "\n" not in str(caught.value)


def test_problems_of_an_optimiser_are_listed_with_all_others() -> None:
    config = config_of(f"{TOYS}.Fails")
    config.algorithm.entropy_coef = -1.0
    problems = {(one.key, one.code) for one in find_problems(config)}
    assert problems >= {("actor.optimizer.kind", "user_code"), ("algorithm.entropy_coef", "out_of_range")}


def _fails_later(group: Group, model: Path) -> None:
    for kind in ("FailsLater", "RaisesLater"):
        config = config_of(f"{TOYS}.{kind}")
        state_bytes(config.actor.optimizer)
        config.model.path, config.algorithm.kl_coef = str(model), 0.0
        actor = Actor.from_config(config, group.meet())
        for seed in range(2):
            _step(actor, seed)
        actor.begin_save(model.parent / kind)
        with pytest.raises(UserError, match=rf"{TOYS}\.{kind} ") as caught:
            _step(actor, 2)
        assert (caught.value.code, caught.value.key) == ("user_code", "actor.optimizer.kind")
        actor.finish_save()
        assert Actor.from_config(config, group.meet()).load(model.parent / kind), "the checkpoint is intact"


def test_optimiser_that_fails_later_is_named_and_the_checkpoint_stays(tmp_path: Path) -> None:
    model = reference.make_model(tiny_configs.qwen2(layers=1), tmp_path / "model")
    on_ranks(_fails_later, 1, model)
