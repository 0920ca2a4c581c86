"""Every policy loss, aggregation and KL on each parallel layout equals one process: its value and its gradient.

The way is that of a run: a log-prob group scores the samples and picks tokens, another group, cut otherwise, trains on
them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.linalg import vector_norm

from rlsys.algorithms.losses import reduce_stats
from rlsys.config.algorithm import Aggregation, AlgorithmConfig, KlEstimator, KlTail, PolicyLoss
from rlsys.config.schema import (
    Dtype,
    Layers,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
)
from rlsys.data.trajectory import Sample
from rlsys.orchestrator.worker_groups import scores_of
from rlsys.trainer import mesh
from rlsys.trainer.actor import Actor, Objective
from rlsys.trainer.batches import Applied, BatchSharder
from rlsys.trainer.log_prob import LogProbWorker, ReferencePlan, TopkPlan
from rlsys.weights.transport import Bucket
from tests.support.ports import free_port
from tests.trainer import reference
from tests.trainer.harness import digest_of, export, rendezvous, run_group, weights_of
from tests.trainer.one_process import LOSS_LENGTH, SAMPLES, Expected, OneProcess, Policies, flat

# Adam without a memory: a step is gradient / (|gradient| + 1), from which the gradient follows.
OPTIMIZER = OptimizerConfig(lr=1.0, beta1=0.0, beta2=0.0, eps=1.0, clip_grad=1e9, weight_decay=0.0)
TOP_K = 12
SCORED_UNDER = {
    2: ParallelConfig(tp=2),
    4: ParallelConfig(tp=2, cp=2, sequence_parallel=True),
    8: ParallelConfig(tp=2),
}
"""Processes -> how their log-prob group is cut."""
LAYOUTS = {
    "tp2": (2, ParallelConfig(tp=2)),
    "tp2-sp": (2, ParallelConfig(tp=2, sequence_parallel=True)),
    "pp2": (2, ParallelConfig(pp=2)),
    "dp2": (2, ParallelConfig()),
    "cp2": (2, ParallelConfig(cp=2)),
    "tp2-cp2": (4, ParallelConfig(tp=2, cp=2, sequence_parallel=True)),
    "cp2-pp2": (4, ParallelConfig(cp=2, pp=2)),
    "cp2-dp2": (4, ParallelConfig(cp=2)),
    "cp4": (4, ParallelConfig(cp=4)),
    "tp2-pp2-dp2": (8, ParallelConfig(tp=2, pp=2, sequence_parallel=True)),
}
"""Name -> processes, and how they are cut."""


def _layouts_of(world: int) -> list[str]:
    return [name for name, (processes, _) in LAYOUTS.items() if processes == world]


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
CALLS = (slice(0, 6), slice(6, 10), slice(10, None))
"""What `accumulate` is called with; the last is too little for two ranks, one of which is filled up."""


class _Actor(Actor):
    """Goes from objective to objective, and is spared being built for each."""

    def minimise(self, aim: Objective) -> None:
        self._objective = aim


def _sharder(parallel: ParallelConfig, world: int, budget: int) -> BatchSharder:
    return BatchSharder(parallel, world, budget, pad_id=0, packed=True)


def _actors_sharder(layout: str) -> BatchSharder:
    world, parallel = LAYOUTS[layout]
    return _sharder(parallel, world, 34)


def _model(path: Path) -> ModelConfig:
    return ModelConfig(str(path), Layers.local, Dtype.float32)


def _objective_of(algorithm: AlgorithmConfig) -> Objective:
    sampling = SamplingConfig(temperature=reference.TEMPERATURE)
    return Objective.from_config(RunConfig(algorithm=algorithm, rollout=RolloutConfig(sampling=sampling)))


def _leave(meeting: mesh.Rendezvous) -> mesh.Rendezvous:
    """Leave the group; where to meet next. A port that was found free long before may be taken by then."""
    box = [free_port()]
    torch.distributed.broadcast_object_list(box, src=0)
    mesh.stop()
    return replace(meeting, master_port=box[0])


def _in_group(rank: int, world: int, policies: Policies, out: Path, port: int) -> None:
    """Every case on every layout of `world` processes."""
    meeting = rendezvous(rank, world, port)
    update = _sampling_policy(policies, meeting)
    scored = {}
    for forward in (False, True):
        meeting = _leave(meeting)
        scored[forward] = _scored(policies, meeting, update, forward)
    aims = {name: _objective_of(config) for name, config in CASES.items()}
    for layout in _layouts_of(world):
        # An actor has a reference from its beginning to its end, or none.
        results = {}
        for kept in (False, True):
            names = [name for name, aim in aims.items() if (aim.reference is not None) is kept]
            meeting = _leave(meeting)
            actor = _actor(policies, meeting, LAYOUTS[layout][1], [aims[name] for name in names])
            for name in names:
                results[name] = _step(actor, policies, layout, scored, aims[name], CASES[name])
        torch.save(results, out / f"{layout}-{rank}.pt")
    mesh.stop()


def _actor(policies: Policies, meeting: mesh.Rendezvous, parallel: ParallelConfig, aims: Sequence[Objective]) -> _Actor:
    model = _model(policies.reference)
    return _Actor(meeting, model, parallel, OPTIMIZER, aims[0], total_steps=len(aims), seed=1)


def _sampling_policy(policies: Policies, meeting: mesh.Rendezvous) -> list[Bucket]:
    """Its weights as they go from group to group, on every rank."""
    actor = _actor(policies, meeting, ParallelConfig(), [_objective_of(AlgorithmConfig(kl_coef=0.0))])
    actor.load_hf(policies.sampling)
    box = [export(actor, 50_000)]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def _scored(policies: Policies, meeting: mesh.Rendezvous, update: list[Bucket], forward: bool) -> list[Sample]:
    """The samples with log-probs of both policies, and with the picks of a KL term of that direction."""
    estimator = KlEstimator.full_forward if forward else KlEstimator.full_reverse
    picks = TopkPlan.from_config(AlgorithmConfig(kl_estimator=estimator, kl_topk_tokens=TOP_K))
    fixed = ReferencePlan(tau=1.0, update_period=1, reset_period=None)
    model, temperature = _model(policies.reference), reference.TEMPERATURE
    cut = SCORED_UNDER[meeting.world_size]
    worker = LogProbWorker(meeting, model, cut, temperature, 1, fixed, picks)
    worker.begin_update()
    for bucket in update:
        worker.take_bucket(bucket)
    worker.finish_update(1, digest_of(update))
    plan, batches = _sharder(cut, meeting.world_size, 47).shard(SAMPLES)
    found = worker.compute(batches[worker.place.dp])
    answers: list[Any] = [None] * meeting.world_size
    torch.distributed.all_gather_object(answers, None if found is None else (worker.place.dp, found))
    scores = scores_of(plan, batches, [results for _, results in sorted(filter(None, answers), key=itemgetter(0))])
    return [one.with_scores(score) for one, score in zip(SAMPLES, scores, strict=True)]


def _step(
    actor: _Actor,
    policies: Policies,
    layout: str,
    scored: dict[bool, list[Sample]],
    aim: Objective,
    config: AlgorithmConfig,
) -> tuple[Applied, list[dict[str, float]], dict[str, Tensor]]:
    """(what `apply` returned, statistics, weights) of one step."""
    samples = scored[config.kl_estimator is KlEstimator.full_forward]
    if config.kl_topk_tokens is None:
        samples = [replace(one, picks=None) for one in samples]
    actor.minimise(aim)
    actor.load_hf(policies.current)
    sharder = _actors_sharder(layout)
    batches_of_calls = [sharder.shard(samples[call])[1] for call in CALLS]
    stats = [actor.accumulate(batches[actor.place.dp]) for batches in batches_of_calls]
    return actor.apply(), stats, weights_of(actor)


Truth = Callable[[str], Expected]


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return Policies.make(tmp_path_factory.mktemp("policies"))


@pytest.fixture(scope="module")
def truth(policies: Policies) -> Truth:
    alone = OneProcess(policies)
    return functools.cache(lambda case: alone.expected(CASES[case]))


def _ran(world: int, policies: Policies, out: Path) -> Path:
    run_group(_in_group, world, policies, out, free_port())
    return out


@pytest.fixture(scope="module")
def processes2(policies: Policies, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of all layouts of two processes, which take longer to start than to work."""
    return _ran(2, policies, tmp_path_factory.mktemp("processes2"))


@pytest.fixture(scope="module")
def processes4(policies: Policies, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _ran(4, policies, tmp_path_factory.mktemp("processes4"))


@pytest.fixture(scope="module")
def processes8(policies: Policies, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _ran(8, policies, tmp_path_factory.mktemp("processes8"))


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Of a layout, each rank's results of every case."""
    world = LAYOUTS[request.param][0]
    out = request.getfixturevalue(f"processes{world}")
    return [torch.load(out / f"{request.param}-{rank}.pt", weights_only=False) for rank in range(world)]


@pytest.mark.parametrize("case", CASES)
def test_what_a_case_is_about_happens(case: str, truth: Truth) -> None:
    expected = truth(case)
    assert all(expected.score_batch_size.values()), expected.score_batch_size
    assert min(expected.terms.values()) > 0.05 * max(expected.terms.values()), expected.terms


def test_no_two_cases_are_alike(truth: Truth) -> None:
    """Those of k2 and k4 have one gradient, and differ in value."""
    rows = [(flat(one.gradients), one.figures.get("kl_loss", 0.0)) for one in map(truth, CASES)]
    wholes = torch.stack([torch.cat([gradient, torch.tensor([kl])]) for gradient, kl in rows])
    apart = torch.cdist(wholes, wholes).fill_diagonal_(torch.inf)
    assert apart.min() > 0.01


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_groups_cut_otherwise(layout: str) -> None:
    plans = [_actors_sharder(layout).shard(SAMPLES[call])[0] for call in CALLS]
    world = LAYOUTS[layout][0]
    scored, _ = _sharder(SCORED_UNDER[world], world, 47).shard(SAMPLES)
    sizes = [len(batch) for plan in plans for rank in plan for batch in rank]
    assert len(set(sizes)) > 1
    assert len(sizes) > 4
    assert (0 in sizes) is layout.endswith("dp2")
    assert any(batch not in [one for rank in scored for one in rank] for rank in plans[0] for batch in rank)


LAYOUT_PARAMS = [
    pytest.param(name, marks=pytest.mark.slow) if processes > 2 else name for name, (processes, _) in LAYOUTS.items()
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("found", LAYOUT_PARAMS, indirect=True)
def test_loss_and_gradient_are_those_of_one_process(
    case: str, found: list[dict[str, Any]], truth: Truth, policies: Policies
) -> None:
    expected, ranks = truth(case), [of_rank[case] for of_rank in found]
    figures = reduce_stats([part for _, stats, _ in ranks for part in stats if part])
    compared = {name: figures[name] for name in expected.figures}
    assert compared == pytest.approx(expected.figures, rel=2e-5, abs=1e-6)
    applied, _, weights = ranks[0]
    assert applied.divisor == expected.divisor
    norm = float(vector_norm(flat(expected.gradients)))
    assert applied.grad_norm == pytest.approx(norm, rel=2e-5)
    for name, before in reference.named_tensors(reference.load(policies.current)).items():
        moved = (before - weights[name]).double()
        gradient, theirs = moved / (1 - moved.abs()), expected.gradients[name]
        assert vector_norm(gradient - theirs) < 1e-4 * vector_norm(theirs) + 1e-6 * norm, name
