"""What people are told of each group, second by second: what it does, or what it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from rlsys.data.group import Group, Sample, Scores
from rlsys.data.prompt_source import PromptSource
from rlsys.data.question import Question
from rlsys.data.trajectory import Trajectory
from rlsys.orchestrator.pipeline.flow import Bites, Flow, Handlers
from rlsys.orchestrator.pipeline.learn import MiniBatches, learn
from rlsys.orchestrator.pipeline.ledger import Ledger
from rlsys.rollout.agent.begun import Begun
from tests.pipeline.bare import Bare
from tests.pipeline.build import question, trajectory
from tests.pipeline.virtual_time import run_virtually


class Timed(Bare):
    """Ticket 0 rolls for 2 s and ticket 1 for 5 s; a reward takes 2 s, scores 3 s, a group's training and the update 1 s."""

    groups = ("inference", "critic")

    async def run_group(self, asked: Question, ticket: int, _begun: Sequence[Begun] = ()) -> list[Trajectory]:
        await asyncio.sleep((2, 5)[ticket])
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
    ledger = Ledger(groups_per_step=2, max_staleness=0)

    def say(voice: str) -> Callable[[str], None]:
        return lambda text: told.update({voice: text})

    async def look(at: float) -> dict[str, str]:
        await asyncio.sleep(at)
        return dict(told)

    async def one_step() -> list[dict[str, str]]:
        handlers = Handlers(workers.reward, lambda group: group)
        flow = Flow(ledger, prompts, workers, workers, handlers, Bites(1, 1), workers, say)
        looks = [asyncio.create_task(look(second + 0.5)) for second in range(13)]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(flow.run())
            await learn(flow, {"actor": workers}, workers, MiniBatches([2]), say("actor"))
            seen = [await look for look in looks]
            flow.stop()
        return seen

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


def test_rollouts_that_wait_for_what_they_asked_say_so() -> None:
    workers, told = Timed(), []
    ledger = Ledger(groups_per_step=1, max_staleness=0)
    prompts = PromptSource([question(0), question(1)], seed=0)
    handlers = Handlers(workers.reward, lambda group: group)

    def say(voice: str) -> Callable[[str], None]:
        return told.append if voice == "rollout" else lambda _: None

    async def run() -> None:
        flow = Flow(ledger, prompts, workers, workers, handlers, Bites(1, 1), workers, say)
        flow.show_rollouts()
        assert not told, "nothing rolls yet"
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(flow.run())
            for cause in ("", "search", "search", ""):
                await asyncio.sleep(0.3)
                workers.waits_for = cause
                flow.show_rollouts()
            flow.stop()
            flow.show_rollouts()

    run_virtually(run())
    rolls = "generates 1 group"
    assert told == [
        rolls,
        rolls,
        "waits for search",
        "waits for search",
        rolls,
        "waits for the end of the run",
    ]
