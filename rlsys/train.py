"""Training loop.

The driver runs these stages as concurrent tasks. The staleness scheduler bounds how far rollout runs ahead of training.

    prompts --> rollout loop --> rewards --> score loop --> scored groups --> training loop --> weight sync
                (engines)                    (log-probs,    (oldest first)    (actor, critic)       |
                    ^                         values)                                               |
                    +------------------------- activate: new weight version <-----------------------+

- Rollout loop (`RolloutPipeline`): hands each admitted prompt group to the engine pool. It blocks until an engine has
  room and the scheduler admits a group; at the staleness bound, the scheduler admits no group before the next version
  is published.
- Score loop (`RolloutPipeline`): recomputes log-probs of rewarded groups and computes advantages. It blocks until
  enough groups are rewarded.
- Training loop (`train`): takes scored groups, accumulates their gradients and steps the optimiser. It blocks until
  scored groups arrive and, on-policy, until the engines have activated the new version.
- Weight sync: pushes a version while the engines generate, then activates it. A push blocks until the previous
  activation has ended.

The `sequential` schedule runs the same stages one after the other.

Evaluations and checkpoints start between steps. Evaluations on engines that are set aside (`eval.engines`) and
checkpoint writes (`checkpoint.background`) overlap the next steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from rlsys.config.derived import due
from rlsys.config.schema import GuardAction, RunConfig
from rlsys.errors import RunError
from rlsys.observe import status
from rlsys.observe.guards import Alarm
from rlsys.observe.records import write_summary
from rlsys.orchestrator.resume import Origin
from rlsys.orchestrator.run import Run, Session, open_session

Opener = Callable[[RunConfig, Path, Origin | None], AbstractAsyncContextManager[Session]]


async def train(
    config: RunConfig, run_dir: Path, origin: Origin | None = None, opened: Opener = open_session
) -> dict[str, Any]:
    """Train `config` to its last step, resuming from `origin` if given. Return the contents of `summary.json`.

    All files go to `run_dir`; `opened` opens the run. If a Megatron process dies or hangs that cannot
    be started again alone, the run goes back to its last checkpoint.
    """
    async with opened(config, run_dir, origin) as session:
        while True:
            try:
                # A task of its own: on Python 3.11, a TaskGroup that fails leaves its task marked as cancelled.
                summary = await asyncio.create_task(open_and_train(session, origin))
                break
            except Exception as error:  # noqa: BLE001 - raised again unless a worker is lost
                origin = session.go_back(error, origin)
    write_summary(run_dir / "summary.json", summary)
    return summary


async def open_and_train(session: Session, origin: Origin | None) -> dict[str, Any]:
    """Open a run at `origin`, or at its start, and train it; return the summary."""
    async with session.opened(origin) as run, asyncio.TaskGroup() as watch:
        watching = [watch.create_task(run.watch()), watch.create_task(session.ray.run())]
        summary = await train_from(run, origin)
        for task in watching:
            task.cancel()
    return summary


async def train_from(run: Run, origin: Origin | None) -> dict[str, Any]:
    """Train an open run from `origin`, or from its start, to its last step; return the summary."""
    config = run.config
    done, steps = origin.state.step if origin else 0, config.trainer.steps
    groups: Sequence[Any] = ()  # Stays empty if a finished run is resumed.
    await run.weights.push(version=done)
    await run.weights.activate(version=done)
    if run.log.em_of(done) is None and (done in (0, steps) or due(done, config.eval.interval)):
        await evaluate(run, done)  # This is a new run, or the checkpoint's evaluation never finished.
    run.pipeline.publish(version=done)
    async with asyncio.TaskGroup() as background:
        background.create_task(run.pipeline.run())  # Generates and scores until `stop`.
        for step in range(done + 1, steps + 1):
            groups, updates = await run.train_step(step)
            await run.weights.push(version=step)
            activated = background.create_task(run.weights.activate(version=step))
            if run.on_policy:
                await activated
            alarms = await run.log_step(step, groups, updates)
            stop = bool(alarms) and config.guards.action is GuardAction.stop and step < steps
            if step == steps or due(step, config.eval.interval):
                await activated
                if step < steps and config.eval.engines is not None:
                    await run.evaluator.evaluate_aside(step, background)
                else:
                    await evaluate(run, step)
            if stop or step == steps or due(step, config.checkpoint.interval):
                await run.save(step)
                background.create_task(run.saver.settle())
            if stop:
                await run.saver.finish()
                raise collapsed(alarms[0], run.saver.newest)
            if run.colocated:
                run.pipeline.publish(version=step)
        status.show("waits for the checkpoint to be written", *run.groups.trained)
        await run.saver.finish()
        run.pipeline.stop()
    run.log_prompts(steps)
    if config.algorithm.eval_ref_policy:
        status.show("waits for the evaluation", *run.groups.trained)
        await run.evaluate_reference(steps)
    run.log.samples(groups)
    summary = run.log.summary(run.weights.activated)
    return summary | {"checkpoint": str(run.saver.newest / "actor") if run.saver.newest else None}


async def evaluate(run: Run, step: int) -> None:
    """Evaluate the policy on all engines while training waits."""
    status.show("waits for the evaluation", *run.groups.trained)
    await run.groups.devices.onload("rollout")
    await run.evaluator.evaluate(step)


def collapsed(alarm: Alarm, checkpoint: Path | None) -> RunError:
    """Return the error that ends a collapsing run; the caller raises it after `checkpoint` has been written."""
    return RunError(f"{alarm} guards.action=stop ended the run; its last checkpoint is {checkpoint}.")
