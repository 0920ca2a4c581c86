"""Tests that all schedules give the same parameters from the same episodes, on real Megatron workers.

Claim: if each optimiser step has the same prompt groups, every parameter of two runs differs by at most `TOLERANCE`
after three steps, for any schedule and any order in which the groups arrive. With one mini-batch per step, each
optimiser step always has the same groups. With several, mini-batches are filled in order of arrival; these tests fix
which groups arrive for each mini-batch, and the seed orders them within it.

Float32 sums in another order differ in the last bits. Adam divides by the root of the second moment, which enlarges the
difference where a gradient is small. With `eps` at 1e-4, the largest measured difference is 8e-7 between two schedules
and 1.3e-6 between a schedule and transformers. With the default `eps` of 1e-8, the two differences are 2.7e-6 and
1.6e-5. The parameters move by 1e-2.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlsys.config.algorithm import AdvantageScale, Aggregation, AlgorithmConfig, OldLogprobs, ReturnsAdvantage
from rlsys.config.schema import (
    ActorConfig,
    AdamwConfig,
    AsyncSchedule,
    ClusterConfig,
    Device,
    Dtype,
    InferenceConfig,
    Layers,
    ModelConfig,
    Packing,
    PipelinedSchedule,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    SequentialSchedule,
    TrainerConfig,
)
from rlsys.data.prompt_source import PromptSource
from rlsys.data.question import Question
from rlsys.data.trajectory import Scores, Trajectory
from rlsys.trainer.batches import MicroBatch, collate
from tests.support import tiny_configs
from tests.support.megatron_processes import ANSWER_S, pool
from tests.support.recorded_episodes import RIGHT, Recording, Shape, record
from tests.support.scheduled import PAD_ID, Arrivals, Outcome, run
from tests.support.trajectories import rewarded
from tests.trainer import reference

TOLERANCE = 5e-6
MOVED = 100 * TOLERANCE
"""Smallest distance by which training must move a parameter."""
STEPS, GROUPS, SAMPLES = 3, 8, 4
OPTIMIZER = AdamwConfig(lr=3e-3, eps=1e-4, clip_grad=2.5)
QUESTIONS = [Question(f"q:{number}", "?", (RIGHT,)) for number in range(GROUPS)]
SCHEDULES = {one.kind: one for one in (SequentialSchedule(), PipelinedSchedule(), AsyncSchedule(max_staleness=0))}
SEQUENTIAL, PIPELINED, ASYNC = SCHEDULES


@dataclass(frozen=True)
class Case:
    sizes: tuple[int, ...] = (GROUPS,)
    """Number of groups in each mini-batch."""
    scale: AdvantageScale = AdvantageScale.group
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    aggregation: str = "token-mean"
    old: OldLogprobs = OldLogprobs.recompute

    @property
    def mini_batches(self) -> int:
        """Number of mini-batches, and thus of optimiser steps, in a training step."""
        return len(self.sizes)

    def arrivals(self, seed: int) -> Arrivals:
        """Order of arrival that gives each mini-batch the same groups for every seed."""
        waves = [number for number, size in enumerate(self.sizes) for _ in range(size)]
        return Arrivals(seed, tuple(waves) if self.mini_batches > 1 else None)


PLAIN = Case()
BATCH = Case(
    scale=AdvantageScale.batch, kl_coef=reference.ALGORITHM.kl_coef, entropy_coef=reference.ALGORITHM.entropy_coef
)
TWO = replace(BATCH, sizes=(4, 4), scale=AdvantageScale.group)
UNEVEN = replace(BATCH, sizes=(2, 3, 3))
BY_SEQUENCE, FIXED = (
    replace(TWO, sizes=(2, 3, 3), aggregation=name) for name in ("seq-mean-token-mean", "fixed-length")
)
NAMES = {
    PLAIN: "plain",
    BATCH: "batch-scale-kl",
    TWO: "two-mini-batches-kl",
    UNEVEN: "uneven-mini-batches-batch-scale-kl",
    BY_SEQUENCE: "uneven-mini-batches-sequence-mean",
    FIXED: "uneven-mini-batches-fixed-length",
}


@dataclass(frozen=True)
class Bench:
    """Model and episodes shared by all runs."""

    model: Path
    recording: Recording

    def run(
        self,
        case: Case,
        schedule: str,
        arrivals: Arrivals,
        *,
        actor_ranks: int = 1,
        packing: Packing = Packing.packed,
    ) -> Outcome:
        config, (scorer, *actor) = self.config(case, schedule, packing), pool(1 + actor_ranks)
        return run(config, self.recording, QUESTIONS, arrivals, [scorer], actor)

    def config(self, case: Case, schedule: str, packing: Packing = Packing.packed) -> RunConfig:
        return RunConfig(
            model=ModelConfig(str(self.model), Layers.local, Dtype.float32),
            cluster=ClusterConfig(
                device=Device.cpu, start_timeout_s=ANSWER_S, call_timeout_s=ANSWER_S, sync_bucket_bytes=100_000
            ),
            actor=ActorConfig(optimizer=OPTIMIZER, micro_batch_tokens=160, packing=packing),
            inference=InferenceConfig(micro_batch_tokens=256, packing=packing),
            rollout=RolloutConfig(sampling=SamplingConfig(temperature=reference.TEMPERATURE)),
            algorithm=AlgorithmConfig(
                n_samples=SAMPLES,
                advantage=ReturnsAdvantage(scale=case.scale),
                policy_loss=reference.ALGORITHM.policy_loss,
                kl_coef=case.kl_coef,
                old_logprobs=case.old,
                entropy_coef=case.entropy_coef,
                aggregation=Aggregation(case.aggregation),
                loss_length=reference.LOSS_LENGTH,
            ),
            trainer=TrainerConfig(
                schedule=SCHEDULES[schedule], steps=STEPS, prompts_per_step=GROUPS, mini_batches=case.mini_batches
            ),
        )


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    model = reference.make_model(tiny_configs.qwen2(layers=2), tmp_path_factory.mktemp("model"))
    return Bench(model, record(QUESTIONS, Shape(STEPS, SAMPLES, tiny_configs.VOCAB), seed=5))


@pytest.fixture(scope="module")
def outcome(bench: Bench) -> Callable[..., Outcome]:
    """Function like `Bench.run` that runs once for the same arguments."""
    return functools.cache(bench.run)


def cases(*quick: Case, slow: Sequence[Case] = ()) -> list[Any]:
    """Pytest parameters; `slow` cases run in the full suite only."""
    marked = [(case, ()) for case in quick] + [(case, pytest.mark.slow) for case in slow]
    return [pytest.param(case, marks=marks, id=NAMES[case]) for case, marks in marked]


def distance(one: Outcome, other: Outcome) -> float:
    """Largest absolute difference of any parameter."""
    return largest_difference(one.weights, other.weights)


def largest_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((tensor - other[name]).abs().max()) for name, tensor in one.items())


def shares(trained: Sequence[Sequence[str]], case: Case) -> list[frozenset[str]]:
    """Questions of the groups in each optimiser step."""
    cuts = [*pairwise(accumulate(case.sizes, initial=0))]
    return [frozenset(step[begin:end]) for step in trained for begin, end in cuts]


@pytest.mark.parametrize("case", cases(TWO, slow=(BATCH, PLAIN, UNEVEN, FIXED)))
def test_schedule_and_arrival_order_do_not_change_the_parameters(
    case: Case, bench: Bench, outcome: Callable[..., Outcome]
) -> None:
    base, again = (outcome(case, SEQUENTIAL, case.arrivals(seed)) for seed in (0, 1))
    pipelined = [outcome(case, PIPELINED, case.arrivals(seed)) for seed in (1, 2)]
    for other in [again, *pipelined]:
        assert distance(other, base) <= TOLERANCE
        assert shares(other.trained, case) == shares(base.trained, case)
        # The old log-probs of a step come from the weights at its start, not from older ones.
        assert all(update["actor/ratio_dev_max"] < 1e-4 for update in other.updates[:: case.mini_batches])
    initial = reference.named_tensors(reference.load(bench.model))
    assert largest_difference(base.weights, initial) > MOVED

    assert {*base.events, *again.events} == {"r" * GROUPS + "s" + "tu" * case.mini_batches}
    first = "s" if case.scale is AdvantageScale.batch else "t"
    for other in pipelined:
        assert all(step.index(first) < step.rindex("r") for step in other.events)
    orders = {str(other.trained) for other in [base, *pipelined]}
    assert len(orders) == 1 + len(pipelined), "every run must train in a different order"


@pytest.mark.parametrize("case", cases(TWO, slow=(PLAIN,)))
def test_async_with_zero_staleness_equals_pipelined(case: Case, outcome: Callable[..., Outcome]) -> None:
    pipelined, free = (outcome(case, schedule, case.arrivals(1)) for schedule in (PIPELINED, ASYNC))
    assert free.events == pipelined.events
    assert free.trained == pipelined.trained
    assert distance(free, pipelined) == 0.0


@pytest.mark.parametrize("case", cases(TWO, slow=(PLAIN, UNEVEN)))
def test_two_ranks_and_padding_do_not_change_the_parameters(case: Case, outcome: Callable[..., Outcome]) -> None:
    other = outcome(case, PIPELINED, case.arrivals(1), actor_ranks=2, packing=Packing.padded)
    assert distance(other, outcome(case, SEQUENTIAL, case.arrivals(0))) <= TOLERANCE


def test_old_logprobs_of_the_actor_equal_recomputed_ones_and_give_the_same_parameters(
    outcome: Callable[..., Outcome],
) -> None:
    """Three steps with a KL term, which the inference group still scores; it gets no weights of the policy."""
    base = outcome(BATCH, SEQUENTIAL, BATCH.arrivals(0))
    own = outcome(replace(BATCH, old=OldLogprobs.actor), PIPELINED, BATCH.arrivals(1), actor_ranks=2)
    assert distance(own, base) <= TOLERANCE
    assert [update["actor/ratio_dev_max"] for update in own.updates] == [0.0] * STEPS
    assert all(update["actor/kl_loss"] > 0 for update in own.updates[1:])
    assert own.samples.keys() == base.samples.keys()
    for (version, *_), sample in own.samples.items():
        assert sample.scored_version == version
    for place, sample in base.samples.items():
        np.testing.assert_allclose(own.samples[place].old_logprobs, sample.old_logprobs, rtol=0, atol=2e-4)


@pytest.mark.parametrize("case", cases(BATCH, TWO, slow=(UNEVEN, BY_SEQUENCE, FIXED)))
def test_parameters_equal_those_of_transformers(case: Case, bench: Bench, outcome: Callable[..., Outcome]) -> None:
    """The reference trains each mini-batch as one batch, with transformers and torch's AdamW."""
    initial = reference.load(bench.model)
    prompts = PromptSource(QUESTIONS, bench.config(case, SEQUENTIAL).trainer.seed)
    updates: list[list[MicroBatch]] = []
    for step in range(STEPS):
        policy = _trained(bench.model, updates, case)
        for size in case.sizes:
            groups = [bench.recording[prompts.next().uid, step] for _ in range(size)]
            samples = [
                replace(rewarded(one, 0.0), advantages=np.full(len(one.tokens), advantage)).with_scores(
                    Scores(_logprobs(policy, one), _logprobs(initial, one))
                )
                for one, advantage in zip(chain(*groups), _advantages(groups, case.scale), strict=True)
            ]
            updates.append([collate(samples, PAD_ID)])
    expected = reference.named_tensors(_trained(bench.model, updates, case))
    base = outcome(case, SEQUENTIAL, case.arrivals(0))
    assert largest_difference(base.weights, expected) <= TOLERANCE


def _trained(model: Path, updates: Sequence[Sequence[MicroBatch]], case: Case) -> torch.nn.Module:
    return reference.train(model, updates, OPTIMIZER, [OPTIMIZER.lr] * len(updates), case.aggregation)[0]


def _advantages(groups: Sequence[Sequence[Trajectory]], scale: AdvantageScale) -> list[float]:
    """Advantages of all samples: reward minus the group's mean, over the deviation of the group or of all samples."""
    rewards = np.array([[one.answer == RIGHT for one in group] for group in groups], dtype=float)
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    over_all = scale is AdvantageScale.batch
    spread = centred.std(ddof=1) if over_all else centred.std(axis=1, ddof=1, keepdims=True)
    return (centred / (spread + 1e-6)).ravel().tolist()


def _logprobs(model: torch.nn.Module, trajectory: Trajectory) -> np.ndarray:
    """Log-probs [seq] of the tokens."""
    with torch.no_grad():
        tokens = trajectory.tokens[None].astype(np.int64)
        return reference.logprobs_and_entropy(model, tokens)[0][0].numpy()
