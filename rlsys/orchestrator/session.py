"""What the driver works with: the groups of a run, and what is done with them between and within steps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rlsys.algorithms.kl import KlController
from rlsys.config.derived import moves_reference
from rlsys.config.schema import Mode, RunConfig
from rlsys.data.group import Group
from rlsys.data.prompt_source import PromptSource
from rlsys.data.question import Question
from rlsys.errors import root_cause
from rlsys.orchestrator.evaluation.evaluate import Ask, Evaluation, evaluate
from rlsys.orchestrator.evaluation.heldout import heldout_score
from rlsys.orchestrator.groups.megatron import (
    ActorGroup,
    EngineLogprobs,
    InferenceGroup,
    TrainedGroup,
)
from rlsys.orchestrator.groups.residence import Residence
from rlsys.orchestrator.groups.rollout import RolloutGroup
from rlsys.orchestrator.groups.weight_sync import WeightSync
from rlsys.orchestrator.pipeline.flow import Flow
from rlsys.orchestrator.pipeline.grouping import mean_kl
from rlsys.orchestrator.pipeline.learn import MiniBatches
from rlsys.orchestrator.pipeline.ledger import Reason
from rlsys.orchestrator.pipeline.routing import NoneSetAside
from rlsys.orchestrator.pipeline.schedule import learning
from rlsys.orchestrator.record import RunRecord
from rlsys.orchestrator.resume import Origin, RunState, write_state
from rlsys.orchestrator.rewards.reward import Rewards
from rlsys.orchestrator.saving import Saver, Saves
from rlsys.orchestrator.serving import Serving

_log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks at what rollouts wait for."""

_KEEPS = "waits for trajectories to be written"


@dataclass(slots=True)
class Session:
    """What the driver works with."""

    config: RunConfig
    record: RunRecord
    search: Serving
    prompts: PromptSource
    heldout: Sequence[Question]
    rollout: RolloutGroup
    inference: InferenceGroup | EngineLogprobs
    trained: Mapping[str, TrainedGroup]
    """The actor, and the critic where there is one."""
    sync: WeightSync
    devices: Residence
    rewards: Rewards
    kl: KlController
    flow: Flow
    cut: MiniBatches
    on_policy: bool
    saver: Saver
    questions_sha256: str
    """Of the file that the prompts are from."""

    @property
    def actor(self) -> ActorGroup:
        """The group that trains the policy."""
        actor = self.trained["actor"]
        assert isinstance(actor, ActorGroup)
        return actor

    def learners(self, step: int) -> dict[str, TrainedGroup]:
        """Groups that learn in `step`."""
        return {name: self.trained[name] for name in learning(self.config, step)}

    async def begin_step(self, step: int) -> None:
        """From here on, what the groups do is counted to `step`. Raises RunError if search is gone."""
        await self.search.require()
        self._count_to(step)
        others = self.trained.keys() - self.learners(step).keys()
        self.record.say(*others)("waits for the critic to warm up")
        self.record.begin_step()

    async def evaluate(self, step: int) -> None:
        """Ask the policy the held-out questions, and record the answers."""
        self.record.say(*self.trained)("waits for the evaluation")
        await self.devices.need("rollout")
        self.record.evaluation(await self._ask_heldout(step))

    async def evaluate_aside(self, step: int, background: asyncio.TaskGroup) -> None:
        """The same on `eval.engines` engines, while the others go on with rollouts; returns once these are set aside.

        They keep the weights of `step`. One such evaluation waits for the other.
        """
        set_aside: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asking = background.create_task(self._ask_aside(step, set_aside))
        await asyncio.wait({asking, set_aside}, return_when=asyncio.FIRST_COMPLETED)

    async def evaluate_reference(self, step: int) -> None:
        """Ask the held-out questions to the reference policy. The engines have its weights afterwards, for good."""
        assert isinstance(self.inference, InferenceGroup)
        folder, tracer = self.record.run_dir / "reference", self.record.tracers["driver"]
        sync = WeightSync(self.inference.workers, [self.rollout], self.config.cluster, folder, tracer)
        try:
            await self.devices.need("inference")
            await sync.open()
            await sync.transfer(step + 1)
            await self.devices.need("rollout")
            await sync.switch(step + 1)
        finally:
            sync.close()
        self.record.say(*self.trained)("waits for the evaluation")
        self.record.reference_evaluation(await self._ask_heldout(step))

    def steer_kl(self, groups: Sequence[Group]) -> None:
        """Let the weight of a KL term in the reward follow what the `groups` of a step had."""
        kl = mean_kl(groups)
        if kl is not None:
            self.kl.observe(kl, sum(len(group.samples) for group in groups))

    async def transfer_weights(self, version: int) -> None:
        """Hand the actor's weights out as `version`; engines go on with what they have."""
        await self.devices.need("actor", "inference")
        await self.actor.end_step(version)
        with self._saying(f"takes version {version}", *(f"{name}.weights" for name in self.inference.groups)):
            await self.sync.transfer(version)

    async def switch_weights(self, version: int) -> None:
        """Let every engine take `version`, and rollouts go as far ahead as that allows.

        Where groups take turns on the devices, rollouts wait for `release`: nothing may run while others come in.
        """
        await self.devices.need("rollout")
        await self.sync.switch(version)
        if not self.takes_turns:
            self.release(version)

    @property
    def takes_turns(self) -> bool:
        """Whether groups share devices, so that only one of them can be at work."""
        return self.config.cluster.mode is Mode.collocated

    def release(self, version: int) -> None:
        """Let rollouts go as far ahead as `version`, which every engine has, allows."""
        if version > self.flow.ledger.published:  # Version 0 is published from the start.
            self.flow.publish(version)

    async def watch_rollouts(self) -> None:
        """Show whether rollouts generate or wait for what they have asked for; until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.rollout.look()
            self.flow.show_rollouts()

    async def figures(self) -> dict[str, float]:
        """What engines, weight sync and pipeline have counted so far."""
        ledger = self.flow.ledger
        return {
            **await self.rollout.metrics(),
            **self.sync.figures(),
            **self.rewards.figures(),
            "pipeline/outstanding": ledger.outstanding_count,
            "pipeline/version_lag": ledger.version - ledger.published,
            **{f"pipeline/dropped_{reason}": ledger.dropped[reason] for reason in Reason},
        }

    async def save(self, step: int) -> None:
        """Begin to write a checkpoint after `step`: of all groups, and of all that is under way.

        The trajectories of the steps up to `step` are on disk by then.
        """
        with self._saying(_KEEPS, *(f"{name}.trajectories" for name in self.trained)):
            await self.record.trajectories_kept()
        begun = await self.rollout.under_way()
        # From here to the end of the snapshot nothing is waited for: it is of one moment.
        self.note_ended(step)
        state = RunState(
            step=step,
            pipeline=self.flow.state(begun),
            prompts=self.prompts.state(),
            kl=self.kl.state(),
            history=self.record.history(step),
            questions_sha256=self.questions_sha256,
        )
        parts: dict[str, tuple[str, Saves]] = {name: (name, group.checkpoints) for name, group in self.trained.items()}
        if self._keeps_reference:
            assert isinstance(self.inference, InferenceGroup)
            parts["reference"] = ("inference", self.inference.reference)
        with self._saying("saves a checkpoint", *(f"{name}.checkpoint" for name in self.trained)):
            await self.saver.begin(step, lambda folder: write_state(folder, state, self.config), parts)

    async def load(self, origin: Origin) -> None:
        """Give every group what the checkpoint has of it."""
        folder = origin.checkpoint.folder
        for name, group in self.trained.items():
            await self.devices.need(name)
            with self._saying("loads the checkpoint", f"{name}.checkpoint"):
                same_layout = await group.checkpoints.load(folder / name)
            if not same_layout:
                _log.warning("%s is laid out otherwise than when it was saved: its random generators begin anew", name)
        if self._keeps_reference:
            assert isinstance(self.inference, InferenceGroup)
            await self.devices.need("inference")
            await self.inference.reference.load(folder / "reference")

    async def keep_trajectories(self, step: int, groups: Sequence[Group]) -> None:
        """Begin to keep trajectories of `step` beside the training, once those of the step before are on disk."""
        with self._saying(_KEEPS, *(f"{name}.trajectories" for name in self.trained)):
            await self.record.trajectories(step, groups)

    def note_ended(self, step: int) -> None:
        """Record what has become of prompts by the end of `step`."""
        self.record.prompts(step, self.flow.ledger.ended())

    @property
    def _keeps_reference(self) -> bool:
        """Whether the inference group's reference is another than the model that the run began with."""
        return isinstance(self.inference, InferenceGroup) and moves_reference(self.config.algorithm)

    async def _ask_heldout(self, step: int) -> Evaluation:
        self._count_to(step)
        return await self._ask(step, self.rollout.answer, self.rollout.capacity * self.config.algorithm.n_samples)

    async def _ask_aside(self, step: int, set_aside: asyncio.Future[None]) -> None:
        assert self.config.eval.engines is not None
        self.saver.awaited.add(step)
        try:
            async with self.rollout.reserve(self.config.eval.engines) as engines:
                set_aside.set_result(None)
                self.record.evaluation(await self._ask(step, engines.answer, engines.capacity))
        except* NoneSetAside as deaths:
            _log.warning("the evaluation of step %d is given up: %s", step, root_cause(deaths))
        finally:
            self.saver.awaited.remove(step)

    async def _ask(self, step: int, ask: Ask, concurrency: int) -> Evaluation:
        await self.search.require()
        voice = "rollout.evaluation"
        with self._saying("evaluates", voice):
            return await evaluate(
                self.heldout,
                ask,
                concurrency,
                step,
                say=self.record.say(voice),
                score=heldout_score(self.config),
                samples=self.config.eval.samples,
                temperature=self.config.eval.temperature,
            )

    @contextmanager
    def _saying(self, text: str, *voices: str) -> Iterator[None]:
        """Show that the groups of `voices` do `text` while the body does it."""
        say = self.record.say(*voices)
        say(text)
        try:
            yield
        finally:
            say("")

    def _count_to(self, step: int) -> None:
        self.rollout.step = self.devices.step = step
        for group in (self.inference, *self.trained.values()):
            group.step = step
