"""Which processes a run has, and the devices that they sit on."""

from __future__ import annotations

from dataclasses import replace

from rlsys.config.algorithm import AdvantageBaseline, AlgorithmConfig
from rlsys.config.schema import ClusterConfig, EngineConfig, RolloutConfig, RunConfig
from rlsys.orchestrator.worker_groups import holdings

PLACEMENT = {"actor": "0-1", "inference": "2", "rollout": "3-6"}
PPO = AlgorithmConfig(baseline=AdvantageBaseline.critic)


def _run(algorithm: AlgorithmConfig, **placed: str) -> RunConfig:
    return RunConfig(
        algorithm=algorithm,
        cluster=ClusterConfig(placement={**PLACEMENT, **placed}),
        rollout=RolloutConfig(engine=EngineConfig(tp=2)),
    )


def test_a_critic_is_one_of_the_groups_where_values_are_learned() -> None:
    without = holdings(_run(AlgorithmConfig()))
    assert without == {"rollout": [(3, 4), (5, 6)], "inference": [(2,)], "actor": [(0,), (1,)]}
    assert holdings(_run(PPO, critic="7,8")) == {**without, "critic": [(7,), (8,)]}
    assert holdings(_run(PPO)) == {**without, "critic": [(0,), (1,)]}
    engines = replace(PPO, recompute_logprobs=False)
    assert list(holdings(_run(engines))) == ["rollout", "actor", "critic"]
