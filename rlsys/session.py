"""A session: everything that a run needs, started in order and ended in the reverse order.

Search server, Ray, the groups, rewards, data and the run's folder. On the way out, whatever the reason,
every process that the session started is ended and everything known is on disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import AutoTokenizer

from rlsys.agent.trajectory import Trajectory
from rlsys.algorithms.kl_control import KlController, kl_control
from rlsys.checkpoint.store import CheckpointStore, Keep
from rlsys.cluster.worker_group import WorkerGroup
from rlsys.config.derived import moves_reference
from rlsys.config.schema import Mode, Packing, RunConfig
from rlsys.data.question import Question
from rlsys.data.rows import read_questions
from rlsys.data.source import PromptSource
from rlsys.errors import root_cause
from rlsys.evaluation.evaluate import Ask, Evaluation, evaluate
from rlsys.evaluation.heldout import heldout_questions, heldout_score
from rlsys.groups.dealer import Dealer, flops_of
from rlsys.groups.launch import STOP_TIMEOUT_S, build_groups, started_groups
from rlsys.groups.megatron import (
    ActorGroup,
    CriticGroup,
    EngineLogprobs,
    InferenceGroup,
    TrainedGroup,
    WithValues,
)
from rlsys.groups.residence import Member, Residence, Tenant
from rlsys.groups.rollout import RolloutGroup
from rlsys.groups.weight_sync import Receiver, WeightSync
from rlsys.observe.environment import sha256_of
from rlsys.observe.progress import Progress
from rlsys.observe.spans import Tracer
from rlsys.observe.utilisation import peak_flops
from rlsys.pipeline.flow import Flow, Handlers
from rlsys.pipeline.group import Group
from rlsys.pipeline.grouping import finish, mean_kl, reward_group
from rlsys.pipeline.learn import MiniBatches
from rlsys.pipeline.ledger import Reason
from rlsys.pipeline.masks import MaskOf, trained_tokens, value_mask
from rlsys.pipeline.routing import NoneSetAside
from rlsys.pipeline.schedule import bites, is_on_policy, learning, make_ledger, mini_batches
from rlsys.record import RunRecord
from rlsys.resume import CHECKPOINTS, Origin, RunState, write_state
from rlsys.reward.reward import Rewards
from rlsys.saving import Saver, Saves
from rlsys.search.serving import Serving, serving
from rlsys.weights.families import read_architecture

_log = logging.getLogger(__name__)


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
        self.record.begin_step()

    async def evaluate(self, step: int) -> None:
        """Ask the policy the held-out questions, and record the answers."""
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
        """Begin to write a checkpoint after `step`: of all groups, and of all that is under way."""
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
        parts: dict[str, tuple[str, Saves]] = {
            name: (name, group.checkpoints) for name, group in self.trained.items()
        }
        if self._keeps_reference:
            assert isinstance(self.inference, InferenceGroup)
            parts["reference"] = ("inference", self.inference.reference)
        await self.saver.begin(step, lambda folder: write_state(folder, state, self.config), parts)

    async def load(self, origin: Origin) -> None:
        """Give every group what the checkpoint has of it."""
        folder = origin.checkpoint.folder
        for name, group in self.trained.items():
            await self.devices.need(name)
            if not await group.checkpoints.load(folder / name):
                _log.warning(
                    "%s is laid out otherwise than when it was saved: its random generators begin anew", name
                )
        if self._keeps_reference:
            assert isinstance(self.inference, InferenceGroup)
            await self.devices.need("inference")
            await self.inference.reference.load(folder / "reference")

    def note_ended(self, step: int) -> None:
        """Record what has become of prompts by the end of `step`."""
        self.record.prompts(step, self.flow.ledger.ended())

    @property
    def _keeps_reference(self) -> bool:
        """Whether the inference group's reference is another than the model that the run began with."""
        return isinstance(self.inference, InferenceGroup) and moves_reference(self.config.algorithm)

    async def _ask_heldout(self, step: int) -> Evaluation:
        self._count_to(step)
        return await self._ask(
            step, self.rollout.answer, self.rollout.capacity * self.config.algorithm.n_samples
        )

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
        settings, say = self.config.eval, self.record.say("rollout")
        return await evaluate(
            self.heldout,
            ask,
            concurrency,
            step,
            say,
            heldout_score(self.config),
            settings.samples,
            settings.temperature,
        )

    def _count_to(self, step: int) -> None:
        self.rollout.step = self.devices.step = step
        for group in (self.inference, *self.trained.values()):
            group.step = step


@asynccontextmanager
async def open_session(
    config: RunConfig, run_dir: Path, origin: Origin | None = None
) -> AsyncIterator[Session]:
    """Start everything, as it was at `origin`; what was started is ended on the way out, also after a failure."""
    state = origin.state if origin else None
    questions_sha256 = sha256_of(Path(config.task.train_path))
    questions = read_questions(config.task.train_path)
    prompts = PromptSource(questions, config.trainer.seed, state.prompts if state else None)
    heldout = heldout_questions(config)
    async with AsyncExitStack() as stack:
        progress = stack.enter_context(Progress())
        progress.update(step=0, steps=config.trainer.steps)
        cost = flops_of(read_architecture(config.model.path))
        record = RunRecord(config, run_dir, progress, cost, origin.history if origin else None)
        stack.callback(record.close)
        rewards = Rewards(config.reward, config.task, config.compat)
        stack.push_async_callback(rewards.close)
        search = stack.enter_context(serving(config.search, config.cluster.threads, run_dir / "logs"))
        if not search.started:
            await search.require()
        groups = await stack.enter_async_context(started_groups(config, run_dir / "logs"))
        run = _assemble(
            replace(config, search=search.search),
            run_dir,
            record,
            rewards,
            prompts,
            heldout,
            groups,
            search,
            origin,
            questions_sha256,
        )
        done = state.step if state else 0
        await build_groups(run.config, groups, run.devices, {name: record.say(name) for name in groups}, done)
        await asyncio.to_thread(search.wait_healthy)
        record.actor_peak = peak_flops(await run.actor.device_names())
        stack.callback(run.sync.close)
        await run.sync.open()
        if origin:
            await run.load(origin)
        yield run
        await run.rollout.stop(STOP_TIMEOUT_S)


def _assemble(
    config: RunConfig,
    run_dir: Path,
    record: RunRecord,
    rewards: Rewards,
    prompts: PromptSource,
    heldout: Sequence[Question],
    groups: Mapping[str, WorkerGroup],
    search: Serving,
    origin: Origin | None,
    questions_sha256: str,
) -> Session:
    """The session of groups whose workers are yet to be built."""
    driver, state = record.tracers["driver"], origin.state if origin else None
    rollout = RolloutGroup(groups["rollout"], config, record.tracers["rollout"])
    inference, trained = _megatron(config, record, groups)
    at_once: list[Receiver] = []
    members: dict[str, Member] = {"rollout": Tenant(rollout.sleep, rollout.wake)}
    members |= {name: Tenant(group.offload, group.restore) for name, group in trained.items()}
    if isinstance(inference, InferenceGroup):
        at_once.append(inference)
        members["inference"] = Tenant(inference.offload, inference.restore)
    devices = Residence(members if config.cluster.mode is Mode.collocated else {}, driver)
    critic = trained.get("critic")
    scorer = WithValues(inference, critic) if isinstance(critic, CriticGroup) else inference
    kl = kl_control(config.algorithm)
    if state:
        kl.restore(state.kl)
    handlers = _handlers(config, rewards, kl, driver)
    return Session(
        config=config,
        record=record,
        search=search,
        prompts=prompts,
        heldout=heldout,
        rollout=rollout,
        inference=inference,
        trained=trained,
        sync=WeightSync(groups["actor"], [rollout], config.cluster, run_dir, driver, at_once),
        devices=devices,
        rewards=rewards,
        kl=kl,
        flow=Flow(
            make_ledger(config),
            prompts,
            rollout,
            scorer,
            handlers,
            bites(config),
            devices,
            record.say,
            state.pipeline if state else None,
        ),
        cut=mini_batches(config),
        on_policy=is_on_policy(config),
        saver=_saver(config, run_dir, record, devices, origin),
        questions_sha256=questions_sha256,
    )


def _saver(
    config: RunConfig, run_dir: Path, record: RunRecord, devices: Residence, origin: Origin | None
) -> Saver:
    settings = config.checkpoint
    keep = Keep(settings.keep_last, settings.keep_every, settings.keep_best)
    store = CheckpointStore(run_dir / CHECKPOINTS)
    newest = origin.checkpoint.folder if origin else None
    return Saver(store, keep, record.em_of, devices.need, settings.background, newest)


def _megatron(
    config: RunConfig, record: RunRecord, groups: Mapping[str, WorkerGroup]
) -> tuple[InferenceGroup | EngineLogprobs, dict[str, TrainedGroup]]:
    """Who scores, and who learns."""
    inference: InferenceGroup | EngineLogprobs = EngineLogprobs()
    if "inference" in groups:
        dealer = _dealer(config, "inference", groups)
        inference = InferenceGroup(groups["inference"], dealer, record.tracers["inference"])
    trained: dict[str, TrainedGroup] = {
        "actor": ActorGroup(groups["actor"], _dealer(config, "actor", groups), record.tracers["actor"])
    }
    if "critic" in groups:
        dealer = _dealer(config, "critic", groups, value_mask(config.compat))
        trained["critic"] = CriticGroup(groups["critic"], dealer, record.tracers["critic"])
    return inference, trained


def _handlers(config: RunConfig, rewards: Rewards, kl: KlController, tracer: Tracer) -> Handlers:
    mask_of = value_mask(config.compat)

    async def reward(question: Question, trajectories: Sequence[Trajectory]) -> Group:
        with tracer.span("reward.score", question=question.uid):
            return await reward_group(question, trajectories, rewards)

    return Handlers(reward, lambda group: finish(group, config.algorithm, kl.coef, mask_of))


def _dealer(
    config: RunConfig, name: str, groups: Mapping[str, WorkerGroup], mask_of: MaskOf = trained_tokens
) -> Dealer:
    settings = config.actor if name == "actor" else config.critic if name == "critic" else config.inference
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    return Dealer(
        settings.parallel,
        len(groups[name].ranks),
        settings.micro_batch_tokens,
        tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        settings.packing is Packing.packed,
        flops_of(read_architecture(config.model.path)),
        mask_of,
    )
