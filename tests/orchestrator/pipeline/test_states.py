"""What people are told of each group, second by second: what it does, or what it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from rlsys.data.question import PromptSource, Question
from rlsys.data.trajectory import Group, Sample, Scores, Trajectory
from rlsys.observe import status
from rlsys.orchestrator.pipeline.rollout_pipeline import Handlers, RolloutPipeline, ScoreBatchSize
from rlsys.orchestrator.pipeline.scheduler import StalenessScheduler
from rlsys.orchestrator.pipeline.training_step import MiniBatches, learn
from rlsys.rollout.agent.tokens import EpisodeProgress
from tests.orchestrator.pipeline.bare import Bare
from tests.orchestrator.pipeline.build import question, trajectory
from tests.orchestrator.pipeline.virtual_time import run_virtually


class Timed(Bare):
    """PromptGroup 0 rolls for 2 s and prompt group 1 for 5 s; a reward takes 2 s, scores 3 s, a group's training and the update 1 s."""

    groups = ("inference", "critic")

    async def run_group(
        self, asked: Question, prompt_group: int, _begun: Sequence[EpisodeProgress] = ()
    ) -> list[Trajectory]:
        await asyncio.sleep((2, 5)[prompt_group])
        return [trajectory(uid=asked.uid)]

    async def reward(self, asked: Question, trajectories: Sequence[Trajectory]) -> Group:
        await asyncio.sleep(2)
        return await super().reward(asked, trajectories)

    async def compute(self, samples: Sequence[Sample]) -> list[Scores]:
        await asyncio.sleep(3)
        return await super().compute(samples)

    async def accumulate(self, _samples: Sequence[Sample], _last: bool) -> None:
        await asyncio.sleep(1)

    async def apply(self) -> Mapping[str, float]:
        await asyncio.sleep(1)
        return {}


def test_every_group_says_what_it_does_or_waits_for() -> None:
    workers, told = Timed(), {}
    prompts = PromptSource([question(number) for number in range(5)], seed=0)
    scheduler = StalenessScheduler(groups_per_step=2, max_staleness=0)

    async def look(at: float) -> dict[str, str]:
        await asyncio.sleep(at)
        return dict(told)

    async def one_step() -> list[dict[str, str]]:
        handlers = Handlers(workers.reward, lambda group: group)
        pipeline = RolloutPipeline(scheduler, prompts, workers, workers, handlers, ScoreBatchSize(1, 1), workers)
        looks = [asyncio.create_task(look(second + 0.5)) for second in range(13)]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pipeline.run())
            await learn(pipeline, {"actor": workers}, workers, MiniBatches([2]))
            seen = [await look for look in looks]
            pipeline.stop()
        return seen

    with status.reported_to(lambda stage, text: told.update({stage: text})):
        seen = run_virtually(one_step())
    assert [set(one) for one in seen] == [{"rollout", "inference", "critic.values", "actor"}] * 13
    assert [one["rollout"] for one in seen] == [
        *["generates 2 groups"] * 2,
        *["generates 1 group"] * 3,
        *["waits for rewards"] * 2,
        *["waits for training"] * 5,
        "waits for weight sync",
    ]
    # The first group is rewarded at 4 s and scored at 7 s, when the second one is rewarded.
    computing = ["waits for rollouts"] * 4 + ["computes {} of 1 group"] * 6 + ["waits for rollouts"] * 3
    assert [one["inference"] for one in seen] == [text.format("log-probs") for text in computing]
    assert [one["critic.values"] for one in seen] == [text.format("values") for text in computing]
    assert [one["actor"] for one in seen] == [
        *["waits for rollouts"] * 4,
        *["waits for log-probs and values"] * 3,
        "trains on 1 group",
        *["waits for log-probs and values"] * 2,
        "trains on 1 group",
        "updates the weights",
        "waits for weight sync",
    ]
