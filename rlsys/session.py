"""A session: everything that a run needs, started in order and ended in the reverse order.

Search server, Ray, the groups, rewards, data and the run's folder. On the way out, whatever the reason,
every process that the session started is ended and everything known is on disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import AutoTokenizer

from rlsys.agent.trajectory import Trajectory
from rlsys.algorithms.kl_control import KlController, kl_control
from rlsys.cluster.worker_group import WorkerGroup
from rlsys.config.derived import moves_reference
from rlsys.config.schema import Mode, Packing, RunConfig
from rlsys.data.question import Question
from rlsys.data.rows import read_questions
from rlsys.data.source import PromptSource
from rlsys.evaluation.evaluate import Evaluation, evaluate
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
from rlsys.observe.progress import Progress
from rlsys.observe.spans import Tracer
from rlsys.observe.utilisation import peak_flops
from rlsys.pipeline.flow import Flow, Handlers
from rlsys.pipeline.group import Group
from rlsys.pipeline.grouping import finish, mean_kl, reward_group
from rlsys.pipeline.learn import MiniBatches
from rlsys.pipeline.ledger import Reason
from rlsys.pipeline.masks import MaskOf, trained_tokens, value_mask
from rlsys.pipeline.schedule import bites, is_on_policy, learning, make_ledger, mini_batches
from rlsys.record import RunRecord
from rlsys.reward.reward import Rewards
from rlsys.search.serving import Serving, serving
from rlsys.weights.families import read_architecture


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

    async def evaluate(self, step: int) -> Evaluation:
        """Ask the policy the held-out questions, and record the answers."""
        await self.devices.need("rollout")
        evaluation = await self._ask_heldout(step)
        self.record.evaluation(evaluation)
        return evaluation

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
        """Let every engine take `version`, and rollouts go as far ahead as that allows."""
        await self.devices.need("rollout")
        await self.sync.switch(version)
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

    async def save(self, step: int) -> Path:
        """Write a checkpoint after `step`; prompts under way are asked again on resume. Returns the actor's folder."""
        folder = self.record.run_dir / "checkpoints" / f"global_step_{step}"
        # Position and waiting prompts are read together: in between more may be admitted.
        waiting = [ticket.question for ticket in self.flow.ledger.outstanding] + self.prompts.given_back
        prompts = {"position": self.prompts.position, "given_back": [question.uid for question in waiting]}
        extra = {"step": step, "prompts": prompts, "kl": self.kl.state()}
        for name, group in self.trained.items():
            await self.devices.need(name)
            await group.save(folder / name, extra)
        if isinstance(self.inference, InferenceGroup) and moves_reference(self.config.algorithm):
            await self.devices.need("inference")
            await self.inference.save_reference(folder / "reference", extra)
        return folder / "actor"

    async def _ask_heldout(self, step: int) -> Evaluation:
        await self.search.require()
        self._count_to(step)
        concurrency = self.rollout.capacity * self.config.algorithm.n_samples
        say, em = self.record.say("rollout"), heldout_score(self.config)
        return await evaluate(self.heldout, self.rollout.answer, concurrency, step, say, em)

    def _count_to(self, step: int) -> None:
        self.rollout.step = self.devices.step = step
        for group in (self.inference, *self.trained.values()):
            group.step = step


@asynccontextmanager
async def open_session(config: RunConfig, run_dir: Path) -> AsyncIterator[Session]:
    """Start everything; what was started is ended on the way out, also after a failure."""
    prompts = PromptSource(read_questions(config.task.train_path), config.trainer.seed)
    heldout = heldout_questions(config)
    async with AsyncExitStack() as stack:
        progress = stack.enter_context(Progress())
        progress.update(step=0, steps=config.trainer.steps)
        record = RunRecord(config, run_dir, progress, flops_of(read_architecture(config.model.path)))
        stack.callback(record.close)
        rewards = Rewards(config.reward, config.task, config.compat)
        stack.push_async_callback(rewards.close)
        search = stack.enter_context(serving(config.search, config.cluster.threads, run_dir / "logs"))
        if not search.started:
            await search.require()
        groups = await stack.enter_async_context(started_groups(config, run_dir / "logs"))
        run = _assemble(
            replace(config, search=search.search), run_dir, record, rewards, prompts, heldout, groups, search
        )
        await build_groups(run.config, groups, run.devices, {name: record.say(name) for name in groups})
        await asyncio.to_thread(search.wait_healthy)
        record.actor_peak = peak_flops(await run.actor.device_names())
        stack.callback(run.sync.close)
        await run.sync.open()
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
) -> Session:
    """The session of groups whose workers are yet to be built."""
    driver = record.tracers["driver"]
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
            make_ledger(config), prompts, rollout, scorer, handlers, bites(config), devices, record.say
        ),
        cut=mini_batches(config),
        on_policy=is_on_policy(config),
    )


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
