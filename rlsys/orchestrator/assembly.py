"""How a session comes about: everything that a run needs, started in order and ended in the reverse order.

Search server, Ray, the groups, rewards, data and the run's folder. On the way out, whatever the reason,
every process that was started is ended and everything known is on disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from transformers import AutoTokenizer

from rlsys.algorithms.kl_control import KlController, kl_control
from rlsys.cluster.worker_group import WorkerGroup
from rlsys.config.schema import Mode, Packing, RunConfig
from rlsys.data.group import Group
from rlsys.data.masks import MaskOf, trained_tokens, value_mask
from rlsys.data.question import Question
from rlsys.data.rows import read_questions
from rlsys.data.source import PromptSource
from rlsys.data.trajectory import Trajectory
from rlsys.files import sha256_of
from rlsys.observe.progress import Progress
from rlsys.observe.spans import Tracer
from rlsys.observe.status import STATUS, StatusFile
from rlsys.observe.utilisation import peak_flops
from rlsys.orchestrator.evaluation.heldout import heldout_questions
from rlsys.orchestrator.groups.launch import STOP_TIMEOUT_S, build_groups, started_groups
from rlsys.orchestrator.groups.megatron import (
    ActorGroup,
    CriticGroup,
    EngineLogprobs,
    InferenceGroup,
    TrainedGroup,
    WithValues,
)
from rlsys.orchestrator.groups.residence import Member, Residence, Tenant
from rlsys.orchestrator.groups.rollout import RolloutGroup
from rlsys.orchestrator.groups.weight_sync import Receiver, WeightSync
from rlsys.orchestrator.pipeline.flow import Flow, Handlers
from rlsys.orchestrator.pipeline.grouping import finish, reward_group
from rlsys.orchestrator.pipeline.schedule import bites, is_on_policy, make_ledger, mini_batches
from rlsys.orchestrator.record import History, RunRecord
from rlsys.orchestrator.resume import CHECKPOINTS, Origin
from rlsys.orchestrator.rewards.reward import Rewards
from rlsys.orchestrator.saving import Saver
from rlsys.orchestrator.serving import Serving, serving
from rlsys.orchestrator.session import Session
from rlsys.trainer.batches.sharding import BatchSharder, flops_of
from rlsys.weights.checkpoint.store import CheckpointStore, Keep
from rlsys.weights.families import read_architecture


@asynccontextmanager
async def open_session(config: RunConfig, run_dir: Path, origin: Origin | None = None) -> AsyncIterator[Session]:
    """Start everything, as it was at `origin`; what was started is ended on the way out, also after a failure."""
    state = origin.state if origin else None
    questions_sha256 = sha256_of(Path(config.task.train_path))
    questions = read_questions(config.task.train_path)
    prompts = PromptSource(questions, config.trainer.seed, state.prompts if state else None)
    heldout = heldout_questions(config)
    async with AsyncExitStack() as stack:
        history = origin.history if origin else None
        progress = stack.enter_context(_progress(config, run_dir, history))
        cost = flops_of(read_architecture(config.model.path))
        record = RunRecord(config, run_dir, progress, cost, history, _text_of(config))
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
        record.say("search")("starts")
        await asyncio.to_thread(search.wait_healthy)
        record.say("search")("")
        record.actor_peak = peak_flops(await run.actor.device_names())
        stack.callback(run.sync.close)
        await run.sync.open()
        if origin:
            await run.load(origin)
        yield run
        record.say(*groups)("ends")
        record.say("sync")("")
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
    rollout = RolloutGroup(groups["rollout"], config, record.tracers["rollout"], record.episodes)
    inference, trained = _megatron(config, record, groups)
    at_once: list[Receiver] = []
    members: dict[str, Member] = {"rollout": Tenant(rollout.sleep, rollout.wake)}
    members |= {name: Tenant(group.offload, group.restore) for name, group in trained.items()}
    if isinstance(inference, InferenceGroup):
        at_once.append(inference)
        members["inference"] = Tenant(inference.offload, inference.restore)
    devices = Residence(members if config.cluster.mode is Mode.collocated else {}, driver, record.say)
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
        sync=WeightSync(groups["actor"], [rollout], config.cluster, run_dir, driver, at_once, record.say("sync")),
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


def _progress(config: RunConfig, run_dir: Path, history: History | None) -> Progress:
    """Where the run stands as it begins, or goes on."""
    progress = Progress(status=StatusFile(run_dir / STATUS))
    em = history.evaluations[-1]["em"] if history and history.evaluations else None
    progress.update(step=history.step if history else 0, steps=config.trainer.steps, em=em)
    return progress


def _text_of(config: RunConfig) -> Callable[[Sequence[int]], str]:
    """The text of tokens of the policy, special ones too."""
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        return text

    return decode


def _saver(config: RunConfig, run_dir: Path, record: RunRecord, devices: Residence, origin: Origin | None) -> Saver:
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
) -> BatchSharder:
    settings = config.actor if name == "actor" else config.critic if name == "critic" else config.inference
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    return BatchSharder(
        settings.parallel,
        len(groups[name].ranks),
        settings.micro_batch_tokens,
        tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        settings.packing is Packing.packed,
        flops_of(read_architecture(config.model.path)),
        mask_of,
        config.model.fp8,
    )
