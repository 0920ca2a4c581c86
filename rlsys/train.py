"""The driver: one training run, from the first weights to the summary.

A step: questions are generated on, scored and trained on by three stages joined by channels, all at
once; then the new weights go to the engines and the inference group.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlsys.config.schema import RunConfig
from rlsys.observe.summary import write_summary
from rlsys.pipeline.channel import Channel
from rlsys.pipeline.group import Group
from rlsys.pipeline.stages import generate, learn, recompute
from rlsys.session import Session, open_session


async def train(config: RunConfig, run_dir: Path) -> dict[str, Any]:
    """Train as `config` says; everything goes to `run_dir`. Returns what `summary.json` holds."""
    steps = config.trainer.steps
    async with open_session(config, run_dir) as run:
        await run.sync.send(version=0)
        await run.evaluate(step=0)
        for step in range(1, steps + 1):
            started = time.perf_counter()
            groups, updates = await one_step(run, step)
            sync = await run.sync.send(version=step)
            seconds = time.perf_counter() - started
            more = {**sync.figures(), **await run.rollout.metrics()}
            run.record.step(step, groups, updates, seconds, more)
            if step == steps or due(step, config.trainer.eval_interval):
                await run.evaluate(step)
            if step == steps or due(step, config.trainer.save_interval):
                checkpoint = await run.save(step)
        run.record.samples(groups)
        summary = run.record.summary(len(run.sync.reports))
    summary["checkpoint"] = str(checkpoint)
    write_summary(run_dir / "summary.json", summary)
    return summary


async def one_step(run: Session, step: int) -> tuple[list[Group], list[Mapping[str, float]]]:
    """Generate, score and train one batch of questions, strictly on-policy, streaming."""
    config = run.config
    await run.begin_step(step)
    questions = run.prompts.take(config.trainer.prompts_per_step)
    groups_per_update = config.trainer.prompts_per_step // config.trainer.mini_batches
    say = run.record.say
    rolled: Channel[Group] = Channel("rollout to inference", config.cluster.channel_groups)
    scored: Channel[Group] = Channel("inference to actor", config.cluster.channel_groups)
    async with asyncio.TaskGroup() as stages:
        stages.create_task(generate(questions, run.rollout, run.judge, rolled, say("rollout")))
        stages.create_task(recompute(rolled, run.scorer, scored, say("inference")))
        learned = stages.create_task(learn(scored, run.actor, groups_per_update, say("actor")))
    return learned.result()


def due(step: int, interval: int) -> bool:
    """Whether something that happens every `interval` steps happens after `step`; 0 is never."""
    return interval > 0 and step % interval == 0
