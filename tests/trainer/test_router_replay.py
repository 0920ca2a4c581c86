"""Tests of routing replay: log-probs and gradients equal transformers' with the same experts forced, under any layout.

The reference is transformers' model in float64, whose routers are made to choose the given experts; autograd computes
the gradient of their weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.linalg import vector_norm
from transformers import AutoModelForCausalLM

from rlsys.algorithms.losses import policy_loss
from rlsys.config.algorithm import AlgorithmConfig, PolicyGradientLoss
from rlsys.config.schema import AdamwConfig, ParallelConfig
from rlsys.data.trajectory import Routes, Sample, unrouted
from rlsys.orchestrator.worker_groups import scores_of
from rlsys.trainer.actor import Objective
from rlsys.trainer.batches import BatchSharder
from rlsys.trainer.log_prob import LogProbWorker, ReferencePlan
from tests.support import tiny_configs
from tests.support.megatron_processes import Group, on_ranks
from tests.trainer import reference
from tests.trainer.harness import local_model, make_actor, weights_of
from tests.trainer.one_process import SAMPLES

LAYERS, EXPERTS, CHOSEN = 3, 4, 2
# A step is gradient / (|gradient| + 1), from which the gradient can be computed.
OPTIMIZER = AdamwConfig(lr=1.0, beta1=0.0, beta2=0.0, eps=1.0, clip_grad=1e9, weight_decay=0.0)
OBJECTIVE = Objective(
    policy_loss(AlgorithmConfig(policy_loss=PolicyGradientLoss(), kl_coef=0.0)), reference.TEMPERATURE
)


@dataclass(frozen=True)
class Run:
    """Layouts of the group that trains and of the group that scores, which have the same number of processes."""

    trained: ParallelConfig = field(default_factory=ParallelConfig)
    scored: ParallelConfig = field(default_factory=ParallelConfig)
    packed: bool = True
    recompute: bool = False


ALONE = (Run(), Run(packed=False, recompute=True))
PAIRS = (
    Run(ParallelConfig(ep=2), ParallelConfig(tp=2, ep=2, sequence_parallel=True)),
    Run(ParallelConfig(tp=2, sequence_parallel=True), ParallelConfig(pp=2, pp_layers=[1, 2]), packed=False),
    Run(ParallelConfig(pp=2, pp_layers=[2, 1]), ParallelConfig(cp=2), recompute=True),
)
EVERY = ParallelConfig(tp=2, pp=2, ep=2, sequence_parallel=True, pp_layers=[2, 1])
FOURS = (
    Run(ParallelConfig(tp=2, cp=2, sequence_parallel=True), ParallelConfig(cp=2, pp=2, pp_layers=[2, 1])),
    Run(ParallelConfig(pp=2, ep=2, pp_layers=[1, 2]), replace(EVERY, pp_layers=[1, 2])),
    Run(EVERY, ParallelConfig(cp=2, ep=2), recompute=True),
)


@dataclass(frozen=True)
class Result:
    """Log-probs [trained tokens] of policy and reference, in the order of the samples, and gradients by tensor."""

    policy: Tensor
    reference: Tensor
    gradients: dict[str, Tensor]


def given_routes() -> list[Sample]:
    """The samples with random experts; every fifth token, and one whole sample, have none."""
    random = np.random.default_rng(3)
    samples = []
    for number, one in enumerate(SAMPLES):
        shape = len(one.trajectory.tokens), LAYERS, EXPERTS
        routes = random.random(shape).argsort(-1)[..., :CHOSEN].astype(np.uint8)
        routes[number % 5 :: 5] = unrouted(routes)
        routes = None if number == 2 else routes
        samples.append(replace(one, trajectory=replace(one.trajectory, routes=routes)))
    return samples


@contextmanager
def forced(model: torch.nn.Module, routes: Routes | None, chose: list[Tensor]) -> Iterator[None]:
    """Let the routers of transformers' model choose `routes` as far as they are known; append what they chose."""
    config: Any = model.config

    def hook(layer: int) -> Any:
        def choose(_router: Any, _inputs: Any, found: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            logits, _, experts = found
            if routes is not None:
                given = torch.tensor(routes[:, layer].astype(np.int64))
                experts = torch.where(given == unrouted(routes), experts, given)
            chose.append(experts)
            weights = torch.softmax(logits, -1).gather(1, experts)
            if config.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights, experts

        return choose

    routers = [one for one in model.modules() if type(one).__name__ == "Qwen3MoeTopKRouter"]
    assert len(routers) == LAYERS
    hooks = [router.register_forward_hook(hook(layer)) for layer, router in enumerate(routers)]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def by_transformers(path: Path, samples: Sequence[Sample]) -> tuple[Tensor, dict[str, Tensor], list[Routes]]:
    """Return log-probs, gradients and what the routers chose for each sample."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    pieces, advantages, routes = [], [], []
    for one in samples:
        chose: list[Tensor] = []
        tokens = torch.tensor(one.trajectory.tokens, dtype=torch.int64)
        with forced(model, one.trajectory.routes, chose):
            logits = model(tokens[None]).logits[0, :-1]
        mask = torch.tensor(one.trajectory.loss_mask[1:])
        logprobs = torch.log_softmax(logits / reference.TEMPERATURE, -1).gather(1, tokens[1:, None])[:, 0]
        pieces.append(logprobs[mask])
        advantages.append(torch.tensor(one.advantages[1:]).double()[mask])
        routes.append(torch.stack(chose, dim=1).numpy().astype(np.uint8))
    policy, advantage = torch.cat(pieces), torch.cat(advantages)
    (-(advantage * policy).sum() / len(policy)).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return policy.detach(), reference.by_checkpoint_names((k, v) for k, v in gradients.items() if v is not None), routes


def in_group(group: Group, path: Path, samples: Sequence[Sample], runs: Sequence[Run]) -> list[Result]:
    return [_result(group, path, samples, run) for run in runs]


def _result(group: Group, path: Path, samples: Sequence[Sample], run: Run) -> Result:
    fixed = ReferencePlan(tau=1.0, update_period=1, reset_period=None)
    worker = LogProbWorker(group.meet(), local_model(path), run.scored, reference.TEMPERATURE, 1, fixed)
    plan, batches = BatchSharder(run.scored, group.world, 47, 0, run.packed or run.scored.cp > 1).shard(samples)
    found = worker.compute(batches[worker.coords.dp])
    answers: list[Any] = [None] * group.world
    torch.distributed.all_gather_object(answers, None if found is None else (worker.coords.dp, found))
    by_rank = [results for _, results in sorted(filter(None, answers), key=itemgetter(0))]
    scores = scores_of(plan, batches, by_rank, samples)
    samples = [one.with_scores(score) for one, score in zip(samples, scores, strict=True)]
    actor = make_actor(group, path, run.trained, OPTIMIZER, OBJECTIVE, recompute=run.recompute)
    actor.load_hf(path)
    sharder = BatchSharder(run.trained, group.world, 47, 0, run.packed or run.trained.cp > 1)
    actor.accumulate(sharder.shard(samples)[1][actor.coords.dp])
    before = {name: tensor.double() for name, tensor in weights_of(actor).items()}
    actor.apply()
    moved = {name: before[name] - tensor.double() for name, tensor in weights_of(actor).items()}
    policy, of_reference = (
        torch.cat([torch.tensor(getattr(one, name)[one.trajectory.loss_mask]) for one in samples])
        for name in ("old_logprobs", "ref_logprobs")
    )
    return Result(policy, of_reference, {name: change / (1 - change.abs()) for name, change in moved.items()})


@dataclass(frozen=True)
class World:
    """A model, samples with routes, and what transformers computes of them."""

    folder: Path
    samples: list[Sample]
    expected: Result
    """Its reference is the model's own routing."""
    own: list[Routes]
    """Experts that the model chooses by itself, for each sample."""

    def check(self, found: Result) -> None:
        """Compare what a group has computed with transformers."""
        for name in ("policy", "reference"):
            torch.testing.assert_close(
                getattr(found, name).double(), getattr(self.expected, name), rtol=2e-5, atol=2e-5
            )
        gradients = self.expected.gradients
        whole = vector_norm(torch.cat([each.flatten() for each in gradients.values()]))
        assert gradients.keys() == found.gradients.keys()
        for name, expected in gradients.items():
            error = vector_norm(found.gradients[name] - expected)
            assert error < 1e-4 * vector_norm(expected) + 1e-6 * whole, name


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = reference.make_model(tiny_configs.qwen3_moe(LAYERS), tmp_path_factory.mktemp("model"))
    samples = given_routes()
    free, _, own = by_transformers(folder, SAMPLES)
    logprobs, gradients, _ = by_transformers(folder, samples)
    assert vector_norm(logprobs - free) > 0.01 * len(free) ** 0.5, "the routes must matter"
    assert all(vector_norm(gradients[f"model.layers.{layer}.mlp.gate.weight"]) > 0 for layer in range(LAYERS))
    return World(folder, samples, Result(logprobs, free, gradients), own)


def test_one_process_routes_as_given_and_trains_the_routers(world: World) -> None:
    (found,) = on_ranks(in_group, 1, world.folder, world.samples, ALONE)
    for one in found:
        world.check(one)


def test_parallel_groups_route_as_given(world: World) -> None:
    for one in on_ranks(in_group, 2, world.folder, world.samples, PAIRS)[0]:
        world.check(one)


@pytest.mark.slow
def test_groups_of_several_kinds_of_parallelism_route_as_given(world: World) -> None:
    for one in on_ranks(in_group, 4, world.folder, world.samples, FOURS)[0]:
        world.check(one)


def test_replaying_the_models_own_routes_changes_nothing(world: World) -> None:
    """To the last bit: the weights of experts are computed from the same logits."""
    pairs = zip(SAMPLES, world.own, strict=True)
    samples = [replace(one, trajectory=replace(one.trajectory, routes=own)) for one, own in pairs]
    ((free,),), ((replayed,),) = (on_ranks(in_group, 1, world.folder, each, ALONE[:1]) for each in (SAMPLES, samples))
    assert torch.equal(free.policy, replayed.policy)
    assert free.gradients.keys() == replayed.gradients.keys()
    for name, gradient in free.gradients.items():
        assert torch.equal(gradient, replayed.gradients[name]), name
