"""Test of a run that is killed and resumed while an agent that cannot be resumed holds a session of the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from rlsys.data.prompt_source import PromptSource
from rlsys.data.question import Question
from rlsys.data.trajectory import Finish, Group, Trajectory
from rlsys.orchestrator.pipeline.rollout_pipeline import Handlers, PipelineState, RolloutPipeline, ScoreBatchSize
from rlsys.orchestrator.pipeline.scheduler import StalenessScheduler
from rlsys.rollout.agent.episode import EpisodeGroup, EpisodeTools
from rlsys.rollout.agent.tokens import EpisodeProgress
from rlsys.weights.checkpoint.state_file import load_values, save_values
from tests.rollout.agent.gateway_play import ASKED, DRAWN, END, Client, Engine, tools_of, trained
from tests.support.instant_workers import InstantWorkers
from tests.support.trajectories import same


async def agent(_: str, base_url: str, api_key: str) -> str:
    """Ask twice in one conversation."""
    messages = [{"role": "user", "content": "Who?"}]
    async with Client(base_url, api_key) as client:
        reply = await client.post("/chat/completions", {"messages": messages})
        messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": "Sure?"}]
        await client.post("/chat/completions", {"messages": messages})
    return "Rome"


class Rollouts(InstantWorkers):
    """Plays groups of two episodes, one after the other, through a gateway in this process."""

    capacity = 1

    def __init__(self, tools: EpisodeTools) -> None:
        self._tools = tools
        self._playing: dict[int, EpisodeGroup] = {}

    async def run_group(  # type: ignore[override]
        self, asked: Question, prompt_group: int, progress: Sequence[EpisodeProgress] = ()
    ) -> list[Trajectory]:
        self._playing[prompt_group] = group = EpisodeGroup(asked, range(2), self._tools, DRAWN, progress)
        await group.play(asyncio.Semaphore(1), 60.0)
        return group.trajectories()

    async def in_flight(self) -> Mapping[int, tuple[EpisodeProgress, ...]]:
        return {number: group.progress() for number, group in self._playing.items()}

    def life(self, state: PipelineState | None = None) -> RolloutPipeline:
        """A pipeline of one step of one group."""
        scheduler, prompts = StalenessScheduler(groups_per_step=1, max_staleness=0, steps=1), PromptSource([ASKED], 0)
        handlers = Handlers(self.reward, lambda group: group)
        return RolloutPipeline(scheduler, prompts, self, self, handlers, ScoreBatchSize(1, 1), self, state)


async def killed(engine: Engine, tools: EpisodeTools, file: Path) -> None:
    """Run until the engine halts, and save the state."""
    rollouts = Rollouts(tools)
    pipeline = rollouts.life()
    running = asyncio.create_task(pipeline.run())
    await asyncio.wait_for(engine.halted.wait(), 600)
    save_values(file, pipeline.state(await rollouts.in_flight()))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def resumed(tools: EpisodeTools, state: PipelineState) -> Group:
    """Resume from a state; return the first group that is scored."""
    pipeline = Rollouts(tools).life(state)
    running = asyncio.create_task(pipeline.run())
    (group,) = await asyncio.wait_for(pipeline.take(1), 600)
    pipeline.stop()
    await running
    return group


async def test_finished_session_is_kept_and_a_running_one_begins_anew_and_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, after = Engine(["Paris", "Rome"], halts=3), Engine(["Oslo", "Bern"])
    with closing(tools_of(before, agent)) as tools:
        await killed(before, tools, tmp_path / "state")
        assert tools.metrics()["episodes_begun_anew"] == 0
    assert "begins them anew" in caplog.text
    state = load_values(tmp_path / "state", PipelineState)
    ((done, begun),) = state.progress.values()
    assert isinstance(done, Trajectory)
    assert (done.sample, begun.sample, begun.turns) == (0, 1, ())
    with closing(tools_of(after, agent)) as tools:
        group = await resumed(tools, state)
        assert tools.metrics()["episodes_begun_anew"] == 1
    kept, anew = (sample.trajectory for sample in group.samples)
    assert same(kept, done)
    assert (anew.sample, anew.finish, trained(anew)) == (1, Finish.ANSWER, f"Oslo{END}Bern{END}")
    assert len(after.inputs) == 2, "the finished session is not played again"
