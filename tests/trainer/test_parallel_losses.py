"""Policy losses, aggregations and KL terms on each parallel layout equal one process: their value and their gradient.

The way is that of a run: a log-prob group scores the samples and picks tokens, another group, cut otherwise, trains on
them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import itemgetter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.linalg import vector_norm

from rlsys.algorithms.losses import reduce_stats
from rlsys.config.algorithm import Aggregation, AlgorithmConfig, KlEstimator, KlTail, PolicyLoss
from rlsys.config.schema import OptimizerConfig, ParallelConfig, RolloutConfig, RunConfig, SamplingConfig
from rlsys.data.trajectory import Sample
from rlsys.orchestrator.worker_groups import scores_of
from rlsys.trainer.actor import Actor, Objective
from rlsys.trainer.batches import Applied, BatchSharder
from rlsys.trainer.log_prob import LogProbWorker, ReferencePlan, TopkPlan
from rlsys.weights.transport import Bucket
from tests.trainer import reference
from tests.trainer.harness import Group, digest_of, export, local_model, on_ranks, weights_of
from tests.trainer.one_process import LOSS_LENGTH, SAMPLES, Expected, OneProcess, Policies, flat

# Adam without a memory: a step is gradient / (|gradient| + 1), from which the gradient follows.
OPTIMIZER = OptimizerConfig(lr=1.0, beta1=0.0, beta2=0.0, eps=1.0, clip_grad=1e9, weight_decay=0.0)
TOP_K = 12
CALLS = (slice(0, 6), slice(6, 10), slice(10, None))
"""The samples of each call of `accumulate`; the last has too few for two ranks, one of which is filled up."""


@dataclass(frozen=True)
class Run:
    """Two groups of so many processes."""

    trained: ParallelConfig
    scored: ParallelConfig
    processes: int = 2
    family: str = "qwen2"


LAYOUTS = {
    "dp2": Run(ParallelConfig(), scored=ParallelConfig(tp=2)),
    "tp2-sp": Run(ParallelConfig(tp=2, sequence_parallel=True), scored=ParallelConfig(pp=2, pp_layers=[1, 2])),
    "pp2-uneven": Run(ParallelConfig(pp=2, pp_layers=[2, 1]), scored=ParallelConfig(cp=2)),
    "cp2": Run(ParallelConfig(cp=2), scored=ParallelConfig()),
    "ep2": Run(ParallelConfig(ep=2), scored=ParallelConfig(tp=2, ep=2, sequence_parallel=True), family="qwen3_moe"),
}
MORE_LAYOUTS = {
    "tp2": Run(ParallelConfig(tp=2), scored=ParallelConfig()),
    "tp2-cp2": Run(ParallelConfig(tp=2, cp=2, sequence_parallel=True), ParallelConfig(tp=2), 4),
    "cp2-pp2": Run(ParallelConfig(cp=2, pp=2, pp_layers=[1, 2]), ParallelConfig(tp=2, cp=2, sequence_parallel=True), 4),
    "cp2-dp2": Run(ParallelConfig(cp=2), ParallelConfig(tp=2), 4),
    "cp4": Run(ParallelConfig(cp=4), ParallelConfig(tp=2), 4),
    "tp2-pp2-dp2": Run(ParallelConfig(tp=2, pp=2, pp_layers=[2, 1], sequence_parallel=True), ParallelConfig(tp=2), 8),
}


def _cases() -> Iterator[tuple[str, AlgorithmConfig]]:
    plain = AlgorithmConfig(clip_low=0.15, clip_high=0.3, kl_coef=0.0, loss_length=LOSS_LENGTH)
    losses = {
        "ppo-entropy": replace(plain, entropy_coef=0.5),
        "ppo-dual": replace(plain, dual_clip=1.25),
        "gspo": replace(plain, policy_loss=PolicyLoss.gspo, clip_low=0.04, clip_high=0.06),
        "cispo": replace(plain, policy_loss=PolicyLoss.cispo),
        "policy_gradient": replace(plain, policy_loss=PolicyLoss.policy_gradient),
    }
    for (name, loss), aggregation in product(losses.items(), Aggregation):
        yield f"{name}-{aggregation}", replace(loss, aggregation=aggregation)
    kl = replace(losses["ppo-dual"], kl_coef=0.5, aggregation=Aggregation["seq-mean-token-mean"])
    weighted: dict[str, Any] = {"use_kl_iw": True, "kl_iw_clip_lower": 0.8, "kl_iw_clip_upper": 1.2}
    for estimator in KlEstimator:
        if estimator is KlEstimator.k1:  # Has no gradient in a loss, and is refused.
            continue
        of = replace(kl, kl_estimator=estimator)
        yield f"{estimator}", of
        if not estimator.startswith("full_"):
            yield f"{estimator}-iw", replace(of, **weighted)
            continue
        top = replace(of, kl_topk_tokens=TOP_K)
        yield f"{estimator}-top-no-tail", replace(top, kl_use_tail_sampling=False)
        for tail in KlTail:
            yield f"{estimator}-top-{tail}", replace(top, kl_topk_tail=tail)
            yield f"{estimator}-top-{tail}-iw", replace(top, kl_topk_tail=tail, **weighted)


CASES = dict(_cases())
QUICK = [
    "ppo-entropy-token-mean",
    "gspo-seq-mean-token-mean",
    "cispo-fixed-length",
    "policy_gradient-seq-mean-token-sum",
    "k3-iw",
    "full_reverse",
    "full_forward",
    "full_reverse-top-exact-iw",
]
"""Each loss, each aggregation, and each way in which a KL term comes about."""


class _Actor(Actor):
    """Goes from objective to objective, and is spared being built for each."""

    def minimise(self, aim: Objective) -> None:
        self._objective = aim


def _objective_of(algorithm: AlgorithmConfig) -> Objective:
    sampling = SamplingConfig(temperature=reference.TEMPERATURE)
    return Objective.from_config(RunConfig(algorithm=algorithm, rollout=RolloutConfig(sampling=sampling)))


Result = tuple[Applied, list[dict[str, float]], dict[str, Tensor]]
"""What `apply` returned, statistics, and weights after one step."""


def _in_group(group: Group, policies: Policies, run: Run, cases: Sequence[str]) -> dict[str, Result]:
    update = _sampling_policy(group, policies)
    scored = {forward: _scored(group, policies, run, update, forward) for forward in (False, True)}
    aims = {name: _objective_of(CASES[name]) for name in cases}
    results = {}
    # An actor has a reference from its beginning to its end, or none.
    for kept in (False, True):
        names = [name for name, aim in aims.items() if (aim.reference is not None) is kept]
        if names:
            actor = _actor(group, policies, run.trained, aims[names[0]], len(names))
        for name in names:
            actor.minimise(aims[name])
            actor.load_hf(policies.current)
            results[name] = _step(actor, run, scored, CASES[name])
    return results


def _actor(group: Group, policies: Policies, cut: ParallelConfig, aim: Objective, steps: int = 1) -> _Actor:
    return _Actor(group.meet(), local_model(policies.reference), cut, OPTIMIZER, aim, total_steps=steps, seed=1)


def _sampling_policy(group: Group, policies: Policies) -> list[Bucket]:
    """Its weights as they go from group to group, on every rank."""
    actor = _actor(group, policies, ParallelConfig(), _objective_of(AlgorithmConfig(kl_coef=0.0)))
    actor.load_hf(policies.sampling)
    box = [export(actor, 50_000)]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def _scored(group: Group, policies: Policies, run: Run, update: list[Bucket], forward: bool) -> list[Sample]:
    """The samples with log-probs of both policies, and with the picks of a KL term of that direction."""
    estimator = KlEstimator.full_forward if forward else KlEstimator.full_reverse
    picks = TopkPlan.from_config(AlgorithmConfig(kl_estimator=estimator, kl_topk_tokens=TOP_K))
    fixed = ReferencePlan(tau=1.0, update_period=1, reset_period=None)
    model = local_model(policies.reference)
    worker = LogProbWorker(group.meet(), model, run.scored, reference.TEMPERATURE, 1, fixed, picks)
    worker.begin_update()
    for bucket in update:
        worker.take_bucket(bucket)
    worker.finish_update(1, digest_of(update))
    plan, batches = BatchSharder(run.scored, group.world, 47, pad_id=0, packed=True).shard(SAMPLES)
    found = worker.compute(batches[worker.place.dp])
    answers: list[Any] = [None] * group.world
    torch.distributed.all_gather_object(answers, None if found is None else (worker.place.dp, found))
    scores = scores_of(plan, batches, [results for _, results in sorted(filter(None, answers), key=itemgetter(0))])
    return [one.with_scores(score) for one, score in zip(SAMPLES, scores, strict=True)]


def _step(actor: _Actor, run: Run, scored: dict[bool, list[Sample]], config: AlgorithmConfig) -> Result:
    samples = scored[config.kl_estimator is KlEstimator.full_forward]
    if config.kl_topk_tokens is None:
        samples = [replace(one, picks=None) for one in samples]
    sharder = BatchSharder(run.trained, run.processes, 34, pad_id=0, packed=True)
    batches_of_calls = [sharder.shard(samples[call])[1] for call in CALLS]
    stats = [actor.accumulate(batches[actor.place.dp]) for batches in batches_of_calls]
    return actor.apply(), stats, weights_of(actor)


Worlds = Callable[[str], tuple[Policies, OneProcess]]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    """Policies of a family, and one process that has them."""

    @functools.cache
    def world(family: str) -> tuple[Policies, OneProcess]:
        policies = Policies.make(family, tmp_path_factory.mktemp("policies"))
        return policies, OneProcess(policies)

    return world


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradient_are_those_of_one_process(layout: str, worlds: Worlds) -> None:
    _compare(LAYOUTS[layout], QUICK, worlds)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS | MORE_LAYOUTS)
def test_every_loss_and_gradient_is_that_of_one_process(layout: str, worlds: Worlds) -> None:
    _compare((LAYOUTS | MORE_LAYOUTS)[layout], list(CASES), worlds)


def _compare(run: Run, cases: Sequence[str], worlds: Worlds) -> None:
    policies, alone = worlds(run.family)
    found = on_ranks(_in_group, run.processes, policies, run, cases)
    before = reference.named_tensors(reference.load(policies.current))
    for case in cases:
        expected = alone.expected(CASES[case])
        assert expected.figures["clip_fraction"] > 0 or "policy_gradient" in case, case
        _check(case, expected, [of_rank[case] for of_rank in found], before)


def _check(case: str, expected: Expected, ranks: list[Result], before: dict[str, Tensor]) -> None:
    figures = reduce_stats([part for _, stats, _ in ranks for part in stats if part])
    compared = {name: figures[name] for name in expected.figures}
    # Of log-probs of some 5 nats in float32, a mean of either sign is known to several units of their last place.
    assert compared == pytest.approx(expected.figures, rel=2e-5, abs=5e-6), case
    applied, _, weights = ranks[0]
    assert applied.divisor == expected.divisor, case
    norm = float(vector_norm(flat(expected.gradients)))
    assert applied.grad_norm == pytest.approx(norm, rel=2e-5), case
    for name, tensor in before.items():
        moved = (tensor - weights[name]).double()
        gradient, theirs = moved / (1 - moved.abs()), expected.gradients[name]
        assert vector_norm(gradient - theirs) < 1e-4 * vector_norm(theirs) + 1e-6 * norm, (case, name)
