"""A session: everything that a run needs, started in order and ended in the reverse order.

Search server, Ray, the three groups, data and the run's folder. On the way out, whatever the reason,
every process that the session started is ended and everything known is on disk.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import AutoTokenizer

from rlsys.agent.trajectory import Trajectory
from rlsys.cluster.runtime import ray_runtime
from rlsys.cluster.worker_group import WorkerGroup
from rlsys.config.placement import parse_placement
from rlsys.config.schema import RunConfig
from rlsys.data.question import Question
from rlsys.data.rows import read_questions
from rlsys.data.source import PromptSource
from rlsys.errors import RunError
from rlsys.evaluation.evaluate import Evaluation, evaluate
from rlsys.groups.megatron import ActorGroup, Dealer, EngineLogprobs, InferenceGroup, launch_megatron
from rlsys.groups.rollout import RolloutGroup, make_worker
from rlsys.groups.weight_sync import WeightSync
from rlsys.observe.progress import Progress
from rlsys.pipeline.group import Group
from rlsys.pipeline.grouping import judge
from rlsys.record import RunRecord
from rlsys.search.client import SearchClient
from rlsys.search.launch import SearchServer

STOP_TIMEOUT_S = 30.0


@dataclass(slots=True)
class Session:
    """What the driver works with."""

    config: RunConfig
    record: RunRecord
    prompts: PromptSource
    heldout: Sequence[Question]
    rollout: RolloutGroup
    scorer: InferenceGroup | EngineLogprobs
    actor: ActorGroup
    sync: WeightSync
    judge: Callable[[Question, Sequence[Trajectory]], Group]

    async def begin_step(self, step: int) -> None:
        """From here on, what the groups do is counted to `step`. Raises RunError if search is gone."""
        await require_search(self.config)
        self.rollout.step = self.actor.step = step
        if isinstance(self.scorer, InferenceGroup):
            self.scorer.step = step

    async def evaluate(self, step: int) -> Evaluation:
        """Ask the held-out questions, greedily, and record the answers."""
        await self.begin_step(step)
        concurrency = self.rollout.capacity * self.config.algorithm.n_samples
        say = self.record.say("rollout")
        evaluation = await evaluate(self.heldout, self.rollout.answer, concurrency, step, say)
        self.record.evaluation(evaluation)
        return evaluation

    async def save(self, step: int) -> Path:
        """Write a checkpoint of the actor after `step`."""
        folder = self.record.run_dir / "checkpoints" / f"global_step_{step}" / "actor"
        await self.actor.save(folder, {"step": step, "prompts": self.prompts.position})
        return folder


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
        server = stack.enter_context(_started_server(config, run_dir / "logs"))
        serving = replace(config, search=replace(config.search, url=_address(config, server)))
        if server is None:
            await require_search(serving)
        groups = await stack.enter_async_context(_worker_groups(serving, run_dir, record))
        if server is not None:
            await asyncio.to_thread(server.wait_healthy, config.search.start_timeout_s)
        rollout = RolloutGroup(groups["rollout"], config, record.tracers["rollout"])
        receivers = [groups[name] for name in ("inference", "rollout") if name in groups]
        yield Session(
            config=serving,
            record=record,
            prompts=prompts,
            heldout=heldout,
            rollout=rollout,
            scorer=_scorer(config, groups, record),
            actor=ActorGroup(groups["actor"], _dealer(config, "actor", groups), record.tracers["actor"]),
            sync=WeightSync(
                groups["actor"], receivers, config.cluster.sync_bucket_bytes, record.tracers["driver"]
            ),
            judge=functools.partial(judge, normalize_std=config.algorithm.normalize_std),
        )


async def require_search(config: RunConfig) -> None:
    """Raise RunError unless the server at `search.url` answers a query.

    Without this a run whose server has died would go on, and learn from failed searches.
    """
    search = config.search
    assert search.url is not None
    async with SearchClient(search.url, topk=1, timeout_s=search.timeout_s, retries=search.retries) as client:
        result = await client.search("Is anybody there?")
    if result.error:
        raise RunError(f"the search server at search.url={search.url} does not answer: {result.error}")


@contextmanager
def search_server(config: RunConfig, log_dir: Path) -> Iterator[str]:
    """The address of a search server that answers; one is started and ended here if none is named."""
    with _started_server(config, log_dir) as server:
        if server is not None:
            server.wait_healthy(config.search.start_timeout_s)
        yield _address(config, server)


@contextmanager
def _started_server(config: RunConfig, log_dir: Path) -> Iterator[SearchServer | None]:
    """A server that was started and may not answer yet; None if the config names one."""
    if config.search.url is not None:
        yield None
        return
    assert config.search.index is not None
    server = SearchServer(
        config.search.index,
        log_dir / "search.log",
        topk=config.search.topk,
        threads=config.cluster.threads,
    )
    try:
        yield server
    finally:
        server.close()


def _address(config: RunConfig, server: SearchServer | None) -> str:
    url = config.search.url if server is None else server.url
    assert url is not None
    return url


@asynccontextmanager
async def _worker_groups(
    config: RunConfig, run_dir: Path, record: RunRecord
) -> AsyncIterator[dict[str, WorkerGroup]]:
    """The processes of all groups, built side by side."""
    holdings = _holdings(config)
    in_order = sorted((ranks[0], name) for name, held in holdings.items() for ranks in held)
    sizes = [len(holdings[name][0]) for _, name in in_order]
    with ray_runtime(config.cluster, sizes) as reserved:
        groups: dict[str, WorkerGroup] = {}
        for name, held in holdings.items():
            groups[name] = WorkerGroup.launch(
                name,
                reserved,
                [index for index, (_, owner) in enumerate(in_order) if owner == name],
                config.cluster,
                run_dir / "logs",
                devices=len(held[0]),
                concurrency=config.rollout.max_episodes + 16 if name == "rollout" else 0,
            )
            record.say(name)("starts")
        try:
            async with asyncio.TaskGroup() as builds:
                for name, group in groups.items():
                    builds.create_task(_build(name, group, config, record))
            yield groups
            await groups["rollout"].call("stop", timeout_s=STOP_TIMEOUT_S)
        finally:
            for group in groups.values():
                group.kill()


async def _build(name: str, group: WorkerGroup, config: RunConfig, record: RunRecord) -> None:
    if name == "rollout":
        arguments = [(config, config.trainer.seed + rank) for rank in range(len(group.ranks))]
        await group.build(make_worker, arguments, config.rollout.engine.start_timeout_s)
    else:
        await launch_megatron(group, name, config)
    record.say(name)("is ready")


def _holdings(config: RunConfig) -> dict[str, list[tuple[int, ...]]]:
    """The device ranks of each worker process, by group: an engine holds `tp`, a Megatron process one.

    Devices are reserved in the order of these ranks, so groups lie on a cluster as the placement says.
    """
    ranks = {name: sorted(held) for name, held in parse_placement(config.cluster.placement).items()}
    tp = config.rollout.engine.tp
    holdings: dict[str, list[tuple[int, ...]]] = {
        "rollout": [tuple(ranks["rollout"][i : i + tp]) for i in range(0, len(ranks["rollout"]), tp)],
        "inference": [(rank,) for rank in ranks["inference"]],
        "actor": [(rank,) for rank in ranks["actor"]],
    }
    if not config.algorithm.recompute_logprobs:
        del holdings["inference"]
    return holdings


def _scorer(
    config: RunConfig, groups: dict[str, WorkerGroup], record: RunRecord
) -> InferenceGroup | EngineLogprobs:
    if "inference" not in groups:
        return EngineLogprobs()
    return InferenceGroup(
        groups["inference"], _dealer(config, "inference", groups), record.tracers["inference"]
    )


def _dealer(config: RunConfig, name: str, groups: dict[str, WorkerGroup]) -> Dealer:
    settings = config.actor if name == "actor" else config.inference
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return Dealer(settings.parallel, len(groups[name].ranks), settings.micro_batch_tokens, pad_id)
