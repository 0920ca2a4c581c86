"""A session: everything that a run needs, started in order and ended in the reverse order.

Search server, Ray, the three groups, data and the run's folder. On the way out, whatever the reason,
every process that the session started is ended and everything known is on disk.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import AutoTokenizer

from rlsys.cluster.worker_group import WorkerGroup
from rlsys.config.schema import Mode, Packing, RunConfig
from rlsys.data.question import Question
from rlsys.data.rows import read_questions
from rlsys.data.source import PromptSource
from rlsys.evaluation.evaluate import Evaluation, evaluate
from rlsys.groups.dealer import Dealer, flops_of
from rlsys.groups.launch import STOP_TIMEOUT_S, build_groups, started_groups
from rlsys.groups.megatron import ActorGroup, EngineLogprobs, InferenceGroup
from rlsys.groups.residence import Member, Residence, Tenant
from rlsys.groups.rollout import RolloutGroup
from rlsys.groups.weight_sync import Receiver, WeightSync
from rlsys.observe.progress import Progress
from rlsys.pipeline.flow import Flow, Judges
from rlsys.pipeline.grouping import correct_group, judge
from rlsys.pipeline.learn import MiniBatches
from rlsys.pipeline.ledger import Reason
from rlsys.pipeline.schedule import bites, is_on_policy, make_ledger, mini_batches
from rlsys.record import RunRecord
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
    scorer: InferenceGroup | EngineLogprobs
    actor: ActorGroup
    sync: WeightSync
    devices: Residence
    flow: Flow
    cut: MiniBatches
    on_policy: bool

    async def begin_step(self, step: int) -> None:
        """From here on, what the groups do is counted to `step`. Raises RunError if search is gone."""
        await self.search.require()
        self._count_to(step)
        self.record.begin_step()

    async def evaluate(self, step: int) -> Evaluation:
        """Ask the held-out questions, greedily, and record the answers."""
        await self.search.require()
        self._count_to(step)
        await self.devices.need("rollout")
        concurrency = self.rollout.capacity * self.config.algorithm.n_samples
        say = self.record.say("rollout")
        evaluation = await evaluate(self.heldout, self.rollout.answer, concurrency, step, say)
        self.record.evaluation(evaluation)
        return evaluation

    async def transfer_weights(self, version: int) -> None:
        """Hand the actor's weights out as `version`; engines go on with what they have."""
        await self.devices.need("actor", "inference")
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
            "pipeline/outstanding": ledger.outstanding_count,
            "pipeline/version_lag": ledger.version - ledger.published,
            **{f"pipeline/dropped_{reason}": ledger.dropped[reason] for reason in Reason},
        }

    async def save(self, step: int) -> Path:
        """Write a checkpoint of the actor after `step`; prompts under way are asked again on resume."""
        folder = self.record.run_dir / "checkpoints" / f"global_step_{step}" / "actor"
        await self.devices.need("actor")
        # Position and waiting prompts are read together: in between more may be admitted.
        waiting = [ticket.question for ticket in self.flow.ledger.outstanding] + self.prompts.given_back
        prompts = {"position": self.prompts.position, "given_back": [question.uid for question in waiting]}
        await self.actor.save(folder, {"step": step, "prompts": prompts})
        return folder

    def _count_to(self, step: int) -> None:
        self.rollout.step = self.actor.step = self.devices.step = step
        if isinstance(self.scorer, InferenceGroup):
            self.scorer.step = step


@asynccontextmanager
async def open_session(config: RunConfig, run_dir: Path) -> AsyncIterator[Session]:
    """Start everything; what was started is ended on the way out, also after a failure."""
    prompts = PromptSource(read_questions(config.task.train_path), config.trainer.seed)
    heldout = read_questions(config.task.eval_path, config.task.eval_limit)
    async with AsyncExitStack() as stack:
        progress = stack.enter_context(Progress())
        progress.update(step=0, steps=config.trainer.steps)
        record = RunRecord(config, run_dir, progress)
        stack.callback(record.close)
        search = stack.enter_context(serving(config.search, config.cluster.threads, run_dir / "logs"))
        if not search.started:
            await search.require()
        groups = await stack.enter_async_context(started_groups(config, run_dir / "logs"))
        run = _assemble(
            replace(config, search=search.search), run_dir, record, prompts, heldout, groups, search
        )
        await build_groups(run.config, groups, run.devices, {name: record.say(name) for name in groups})
        await asyncio.to_thread(search.wait_healthy)
        stack.callback(run.sync.close)
        await run.sync.open()
        yield run
        await run.rollout.stop(STOP_TIMEOUT_S)


def _assemble(
    config: RunConfig,
    run_dir: Path,
    record: RunRecord,
    prompts: PromptSource,
    heldout: Sequence[Question],
    groups: Mapping[str, WorkerGroup],
    search: Serving,
) -> Session:
    """The session of groups whose workers are yet to be built."""
    tracers = record.tracers
    rollout = RolloutGroup(groups["rollout"], config, tracers["rollout"])
    actor = ActorGroup(groups["actor"], _dealer(config, "actor", groups), tracers["actor"])
    scorer: InferenceGroup | EngineLogprobs = EngineLogprobs()
    at_once: list[Receiver] = []
    members: dict[str, Member] = {
        "rollout": Tenant(rollout.sleep, rollout.wake),
        "actor": Tenant(actor.offload, actor.restore),
    }
    if "inference" in groups:
        scorer = InferenceGroup(
            groups["inference"], _dealer(config, "inference", groups), tracers["inference"]
        )
        at_once.append(scorer)
        members["inference"] = Tenant(scorer.offload, scorer.restore)
    shared = config.cluster.mode is Mode.collocated
    devices = Residence(members if shared else {}, tracers["driver"])
    judges = Judges(
        functools.partial(judge, scale=config.algorithm.advantage_scale),
        functools.partial(correct_group, config=config.algorithm.correction),
    )
    return Session(
        config=config,
        record=record,
        search=search,
        prompts=prompts,
        heldout=heldout,
        rollout=rollout,
        scorer=scorer,
        actor=actor,
        sync=WeightSync(groups["actor"], [rollout], config.cluster, run_dir, tracers["driver"], at_once),
        devices=devices,
        flow=Flow(make_ledger(config), prompts, rollout, scorer, judges, bites(config), devices, record.say),
        cut=mini_batches(config),
        on_policy=is_on_policy(config),
    )


def _dealer(config: RunConfig, name: str, groups: Mapping[str, WorkerGroup]) -> Dealer:
    settings = config.actor if name == "actor" else config.inference
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    return Dealer(
        settings.parallel,
        len(groups[name].ranks),
        settings.micro_batch_tokens,
        tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        settings.packing is Packing.packed,
        flops_of(read_architecture(config.model.path)),
    )
