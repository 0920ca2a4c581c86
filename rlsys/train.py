"""The driver: one training run, from the first weights to the summary.

Rollouts and log-probs flow in the background, as far ahead as the schedule allows; a step trains on the
groups that come out, then the new weights go to the engines and the inference group.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from rlsys.config.schema import RunConfig
from rlsys.observe.summary import write_summary
from rlsys.pipeline.group import Group
from rlsys.pipeline.learn import learn
from rlsys.session import Session, open_session


async def train(config: RunConfig, run_dir: Path) -> dict[str, Any]:
    """Train as `config` says; everything goes to `run_dir`. Returns what `summary.json` holds."""
    steps = config.trainer.steps
    async with open_session(config, run_dir) as run:
        await run.transfer_weights(version=0)
        await run.switch_weights(version=0)
        await run.evaluate(step=0)
        async with asyncio.TaskGroup() as background:
            background.create_task(run.flow.run())
            for step in range(1, steps + 1):
                groups, switched = await one_step(run, step, background)
                if step == steps or due(step, config.trainer.eval_interval):
                    await switched
                    await run.evaluate(step)
                if step == steps or due(step, config.trainer.save_interval):
                    checkpoint = await run.save(step)
            run.flow.stop()
        run.record.samples(groups)
        summary = run.record.summary(len(run.sync.reports))
    summary["checkpoint"] = str(checkpoint)
    write_summary(run_dir / "summary.json", summary)
    return summary


async def one_step(
    run: Session, step: int, background: asyncio.TaskGroup
) -> tuple[list[Group], asyncio.Task[None]]:
    """Train on the next groups and send the new weights; the task ends when every engine has them."""
    await run.begin_step(step)
    groups, updates = await learn(run.flow, run.actor, run.devices, run.cut, run.record.say("actor"))
    await run.transfer_weights(version=step)
    switched = background.create_task(run.switch_weights(version=step))
    if run.on_policy:
        await switched
    run.record.step(step, groups, updates, await run.figures())
    return groups, switched


def due(step: int, interval: int) -> bool:
    """Whether something that happens every `interval` steps happens after `step`; 0 is never."""
    return interval > 0 and step % interval == 0
