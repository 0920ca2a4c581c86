"""Tests of policy losses, aggregations and KL terms on parallel layouts against one process, in value and gradient.

As in a run, one group scores the samples and picks tokens, and another group with a different layout trains on them.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.linalg import vector_norm

from rlsys.algorithms.losses import POLICY_LOSSES, reduce_stats
from rlsys.config.algorithm import (
    Aggregation,
    AlgorithmConfig,
    CispoLoss,
    CustomLoss,
    FullKl,
    GspoLoss,
    KlPlace,
    KlTail,
    LldsConfig,
    LldsGate,
    OldLogprobs,
    PolicyGradientLoss,
    PpoLoss,
    SampledKl,
    SapoLoss,
)
from rlsys.config.custom import custom_variant
from rlsys.config.derived import kl_topk_tokens
from rlsys.config.schema import AdamwConfig, ModelConfig, ParallelConfig, RolloutConfig, RunConfig, SamplingConfig
from rlsys.data.trajectory import Sample
from rlsys.orchestrator.worker_groups import scores_of
from rlsys.trainer.actor import Actor, Objective
from rlsys.trainer.batches import Accumulated, BatchSharder, OptimizerStep
from rlsys.trainer.log_prob import LogProbWorker, ReferencePlan, ReferencePolicy, Teacher, TopkPlan
from rlsys.weights.hf_io import HfReader
from tests.support import tiny_configs
from tests.support.megatron_processes import Group, on_ranks
from tests.support.tensors import digest_of, pack
from tests.trainer import reference
from tests.trainer.harness import local_model, weights_of
from tests.trainer.one_process import LOSS_LENGTH, SAMPLES, Expected, OneProcess, Policies, flat

# Without momentum a step is gradient / (|gradient| + 1), from which the gradient can be computed.
OPTIMIZER = AdamwConfig(lr=1.0, beta1=0.0, beta2=0.0, eps=1.0, clip_grad=1e9, weight_decay=0.0)
CALLS = (slice(0, 6), slice(6, 10), slice(10, None))
"""Samples of each call of `accumulate`; in the last call, one of the two ranks has no sample."""


@dataclass(frozen=True)
class Run:
    """Layouts of the two groups, which have the same number of processes."""

    trained: ParallelConfig
    scored: ParallelConfig
    processes: int = 2
    family: str = "qwen2"
    teacher: str | None = None
    """Family of a teacher of four layers in the place of the reference policy; None without a teacher."""

    def reference_of(self, policies: Policies, pp_layers: list[int] | None = None) -> tuple[ModelConfig, ReferencePlan]:
        """Return the model of a group's policy, and the plan of its reference."""
        fixed, held = ReferencePlan(tau=1.0, update_period=1, reset_period=None), local_model(policies.reference)
        if self.teacher is None:
            return held, fixed
        return local_model(policies.sampling), replace(fixed, teacher=Teacher(held, pp_layers))


LAYOUTS = {
    "dp2": Run(ParallelConfig(), scored=ParallelConfig(tp=2)),
    "tp2-sp-teacher": Run(
        ParallelConfig(tp=2, sequence_parallel=True), scored=ParallelConfig(pp=2, pp_layers=[1, 2]), teacher="llama"
    ),
    "pp2-uneven": Run(ParallelConfig(pp=2, pp_layers=[2, 1]), scored=ParallelConfig(cp=2)),
    "cp2": Run(ParallelConfig(cp=2), scored=ParallelConfig()),
    "ep2": Run(ParallelConfig(ep=2), scored=ParallelConfig(tp=2, ep=2, sequence_parallel=True), family="qwen3_moe"),
}
MORE_LAYOUTS = {
    "tp2-cp2": Run(ParallelConfig(tp=2, cp=2, sequence_parallel=True), ParallelConfig(tp=2), 4),
    "cp2-pp2": Run(ParallelConfig(cp=2, pp=2, pp_layers=[1, 2]), ParallelConfig(tp=2, cp=2, sequence_parallel=True), 4),
    "tp2-pp2-dp2": Run(ParallelConfig(tp=2, pp=2, pp_layers=[2, 1], sequence_parallel=True), ParallelConfig(tp=2), 8),
}
PPO = PpoLoss(clip_low=0.15, clip_high=0.3)
PLAIN = AlgorithmConfig(policy_loss=PPO, kl_coef=0.0, loss_length=LOSS_LENGTH)
DUAL = replace(
    PLAIN, policy_loss=replace(PPO, dual_clip=1.25), aggregation=Aggregation["seq-mean-token-mean"], kl_coef=0.5
)
WEIGHTED: dict[str, Any] = {"use_kl_iw": True, "kl_iw_clip_lower": 0.8, "kl_iw_clip_upper": 1.2}
REVERSE, FORWARD = FullKl("full_reverse"), FullKl("full_forward")
PARABOLA = custom_variant(CustomLoss, "examples.extend.policy_loss.parabola")
CASES = {
    "ppo-entropy": replace(PLAIN, entropy_coef=0.5),
    "gspo": replace(
        PLAIN,
        policy_loss=GspoLoss(clip_low=0.04, clip_high=0.06),
        aggregation=Aggregation["seq-mean-token-mean"],
        llds=LldsConfig(0.7, LldsGate.trajectory),
    ),
    "cispo": replace(
        PLAIN, policy_loss=CispoLoss(clip_low=0.15, clip_high=0.3), aggregation=Aggregation["fixed-length"]
    ),
    "policy_gradient": replace(PLAIN, policy_loss=PolicyGradientLoss(), aggregation=Aggregation["seq-mean-token-sum"]),
    "custom": replace(PLAIN, policy_loss=PARABOLA(PARABOLA.kind), llds=LldsConfig(0.7)),
    "sapo": replace(PLAIN, policy_loss=SapoLoss(tau_positive=2.0, tau_negative=3.0)),
    "kl-in-reward": replace(PLAIN, kl_coef=0.5, kl_in=KlPlace.reward, kl_estimator=SampledKl("k1")),
    "k3-weighted": replace(DUAL, kl_estimator=SampledKl("k3"), **WEIGHTED),
    "reverse": replace(DUAL, kl_estimator=REVERSE),
    "forward": replace(DUAL, kl_estimator=FORWARD),
    "reverse-top-weighted": replace(DUAL, kl_estimator=replace(REVERSE, topk_tokens=12), **WEIGHTED),
    "forward-top-own-old": replace(
        DUAL, kl_estimator=replace(FORWARD, topk_tokens=12), old_logprobs=OldLogprobs.actor, **WEIGHTED
    ),
    "forward-top-upstream": replace(DUAL, kl_estimator=replace(FORWARD, topk_tokens=12, topk_tail=KlTail.upstream)),
}
"""Settings that cover each loss, each aggregation and each kind of KL term."""


class _Actor(Actor):
    """An actor that is built once and then trained with one objective after another."""

    _held: ReferencePolicy | None = None

    def replace_objective(self, objective: Objective) -> None:
        """Use another objective from now on; if it needs a reference policy, keep that of the first objective."""
        self._objective = objective
        self._held = self._reference or self._held
        self._reference = None if objective.reference is None else self._held


def _is_forward(config: AlgorithmConfig) -> bool:
    return config.kl_estimator.kind == FORWARD.kind


def _objective_of(algorithm: AlgorithmConfig) -> Objective:
    sampling = SamplingConfig(temperature=reference.TEMPERATURE)
    return Objective.from_config(RunConfig(algorithm=algorithm, rollout=RolloutConfig(sampling=sampling)))


Result = tuple[OptimizerStep, list[Accumulated | None], dict[str, Tensor]]
"""(answer of `apply`, statistics, weights after one step)."""


def _in_group(group: Group, policies: Policies, run: Run) -> dict[str, Result]:
    scored = _scored(group, policies, run)
    model, plan = run.reference_of(policies)
    whole_vocabulary = replace(_objective_of(CASES["reverse"]), reference=plan)
    actor = _Actor(group.meet(), model, run.trained, OPTIMIZER, whole_vocabulary, total_steps=len(CASES), seed=1)
    results = {}
    for name, config in CASES.items():
        actor.replace_objective(_objective_of(config))
        actor.load_hf(policies.current)
        results[name] = _step(actor, run, scored[_is_forward(config)], config)
    return results


def _scored(group: Group, policies: Policies, run: Run) -> dict[bool, list[Sample]]:
    """Return the samples for the forward (True) and the reverse KL, with both policies' log-probs and picked tokens."""
    model, plan = run.reference_of(policies, [3, 1] if run.scored.pp > 1 else None)
    worker = LogProbWorker(group.meet(), model, run.scored, reference.TEMPERATURE, 1, plan)
    worker.begin_update()
    sampling = HfReader(policies.sampling)
    update = list(pack([(name, sampling.get(name)) for name in sampling.names()], 50_000))
    for bucket in update:
        worker.take_bucket(bucket)
    worker.finish_update(1, digest_of(update))
    plan, batches = BatchSharder(run.scored, group.world, 47, pad_id=0, packed=True).shard(SAMPLES)
    samples = {}
    for name in ("reverse-top-weighted", "forward-top-upstream"):
        worker._picks = TopkPlan.from_config(CASES[name])
        found = worker.compute(batches[worker.coords.dp])
        answers: list[Any] = [None] * group.world
        torch.distributed.all_gather_object(answers, None if found is None else (worker.coords.dp, found))
        by_rank = [results for _, results in sorted(filter(None, answers), key=itemgetter(0))]
        scores = scores_of(plan, batches, by_rank, SAMPLES)
        forward = _is_forward(CASES[name])
        samples[forward] = [one.with_scores(score) for one, score in zip(SAMPLES, scores, strict=True)]
    return samples


def _step(actor: _Actor, run: Run, samples: Sequence[Sample], config: AlgorithmConfig) -> Result:
    if kl_topk_tokens(config) is None:
        samples = [replace(one, picks=None) for one in samples]
    if config.old_logprobs is OldLogprobs.actor:
        samples = [replace(one, old_logprobs=None) for one in samples]
    sharder = BatchSharder(run.trained, run.processes, 34, pad_id=0, packed=True)
    batches_of_calls = [sharder.shard(samples[call])[1] for call in CALLS]
    stats = [actor.accumulate(batches[actor.coords.dp]) for batches in batches_of_calls]
    return actor.apply(), stats, weights_of(actor)


Worlds = Callable[[str, str | None], tuple[Policies, dict[str, Expected]]]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    """Function from the families of policy and teacher to the policies and the results of each case in one process,
    computed once for each pair."""

    @functools.cache
    def world(family: str, teacher: str | None) -> tuple[Policies, dict[str, Expected]]:
        policies = Policies.make(family, tmp_path_factory.mktemp("policies"))
        if teacher is not None:
            shape = tiny_configs.FAMILIES[teacher](layers=4)
            policies = replace(policies, reference=reference.make_model(shape, policies.reference / "teacher"))
        alone = OneProcess(policies)
        return policies, {case: alone.expected(config) for case, config in CASES.items()}

    return world


def test_cases_have_every_loss_and_aggregation() -> None:
    """A new one must be compared on parallel layouts too."""
    assert {case.policy_loss.kind for case in CASES.values()} == {*POLICY_LOSSES, PARABOLA.kind}
    assert {case.aggregation for case in CASES.values()} == {*Aggregation}
    assert {case.llds.gate for case in CASES.values() if case.llds.coef} == {LldsGate.turn, LldsGate.trajectory}


@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_LAYOUTS)])
def test_loss_and_gradient_equal_those_of_one_process(layout: str, worlds: Worlds) -> None:
    run = (LAYOUTS | MORE_LAYOUTS)[layout]
    policies, results = worlds(run.family, run.teacher)
    found = on_ranks(_in_group, run.processes, policies, run)
    before = reference.named_tensors(reference.load(policies.current))
    for case, expected in results.items():
        assert expected.figures["clip_fraction"] > 0 or case in (
            "policy_gradient",
            "sapo",
            "custom",
            "forward-top-own-old",
        ), case
        _check(case, expected, [of_rank[case] for of_rank in found], before)


def _check(case: str, expected: Expected, ranks: list[Result], before: dict[str, Tensor]) -> None:
    figures = reduce_stats([part.stats for _, parts, _ in ranks for part in parts if part])
    compared = {name: figures[name] for name in expected.figures}
    # Log-probs of about 5 nats cancel in the means, so the errors are several units in the last place of a log-prob.
    assert compared == pytest.approx(expected.figures, rel=2e-5, abs=5e-6), case
    applied, _, weights = ranks[0]
    assert applied.divisor == expected.divisor, case
    norm = float(vector_norm(flat(expected.gradients)))
    assert applied.grad_norm == pytest.approx(norm, rel=2e-5), case
    for name, tensor in before.items():
        moved = (tensor - weights[name]).double()
        gradient, theirs = moved / (1 - moved.abs()), expected.gradients[name]
        assert vector_norm(gradient - theirs) < 1e-4 * vector_norm(theirs) + 1e-6 * norm, (case, name)
