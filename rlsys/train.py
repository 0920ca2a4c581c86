"""The driver: one training run, from the first weights to the summary.

Rollouts and log-probs flow in the background, as far ahead as the schedule allows; a step trains on the
groups that come out, then the new weights go to the engines and the inference group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from rlsys.config.schema import GuardAction, RunConfig
from rlsys.data.group import Group
from rlsys.errors import RunError
from rlsys.observe.guards import Alarm
from rlsys.observe.summary import write_summary
from rlsys.orchestrator.assembly import open_session
from rlsys.orchestrator.pipeline.learn import learn
from rlsys.orchestrator.resume import Origin
from rlsys.orchestrator.session import Session

Opener = Callable[[RunConfig, Path, Origin | None], AbstractAsyncContextManager[Session]]


async def train(
    config: RunConfig, run_dir: Path, origin: Origin | None = None, opened: Opener = open_session
) -> dict[str, Any]:
    """Train as `config` says, from `origin` on; everything goes to `run_dir`. Returns what `summary.json` holds."""
    steps, done = config.trainer.steps, origin.state.step if origin else 0
    async with opened(config, run_dir, origin) as run:
        await run.transfer_weights(version=done)
        await run.switch_weights(version=done)
        if run.record.em_of(done) is None and (done in (0, steps) or due(done, config.eval.interval)):
            await run.evaluate(done)  # At the beginning, or where the run was ended before the answers were in.
        run.release(version=done)
        groups: list[Group] = []
        async with asyncio.TaskGroup() as background:
            background.create_task(run.flow.run())
            watching = background.create_task(run.watch_rollouts())
            for step in range(done + 1, steps + 1):
                groups, switched, alarms = await one_step(run, step, background)
                stop = bool(alarms) and config.guards.action is GuardAction.stop and step < steps
                if step == steps or due(step, config.eval.interval):
                    await switched
                    if step == steps or config.eval.engines is None:
                        await run.evaluate(step)
                    else:
                        await run.evaluate_aside(step, background)
                if stop or step == steps or due(step, config.checkpoint.interval):
                    await run.save(step)
                    background.create_task(run.saver.settle())
                if stop:
                    await run.saver.finish()
                    raise collapsed(alarms[0], run.saver.newest)
                if run.takes_turns:
                    run.release(version=step)
            run.record.say(*run.trained)("waits for the checkpoint to be written")
            await run.saver.finish()
            watching.cancel()
            run.flow.stop()
        run.note_ended(steps)
        if config.algorithm.eval_ref_policy:
            await run.evaluate_reference(steps)
        run.record.samples(groups)
        summary = run.record.summary(len(run.sync.reports))
    assert run.saver.newest  # The last step is always saved.
    summary["checkpoint"] = str(run.saver.newest / "actor")
    write_summary(run_dir / "summary.json", summary)
    return summary


async def one_step(
    run: Session, step: int, background: asyncio.TaskGroup
) -> tuple[list[Group], asyncio.Task[None], list[Alarm]]:
    """Train on the next groups and send the new weights; the task ends when every engine has them.

    The last are signs that the run has collapsed.
    """
    await run.begin_step(step)
    learners = run.learners(step)
    groups, updates = await learn(run.flow, learners, run.devices, run.cut, run.record.say(*learners))
    run.steer_kl(groups)
    await run.transfer_weights(version=step)
    switched = background.create_task(run.switch_weights(version=step))
    if run.on_policy:
        await switched
    alarms = run.record.step(step, groups, updates, await run.figures())
    await run.keep_trajectories(step, groups)
    run.note_ended(step)
    return groups, switched, alarms


def collapsed(alarm: Alarm, checkpoint: Path | None) -> RunError:
    """What ends a run that shows signs of collapse, once its checkpoint is written."""
    return RunError(f"{alarm} The run has ended, as guards.action=stop says; its checkpoint is {checkpoint}.")


def due(step: int, interval: int) -> bool:
    """Whether something that happens every `interval` steps happens after `step`; 0 is never."""
    return interval > 0 and step % interval == 0
