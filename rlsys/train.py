"""The training loop.

Four loops run at once in the driver, as far ahead of each other as the staleness scheduler allows:

    prompts --> rollout loop --> rewards --> score loop --> ready groups --> training loop --> weight sync
                (engines)                    (log-probs,    (oldest first)   (actor, critic)       |
                    ^                         values)                                              |
                    +------------------------ new version, in all engines <------------------------+

- The rollout loop (`RolloutPipeline`) asks the engine pool for a prompt group as soon as the scheduler admits one. It waits
  for a free engine and for the scheduler: for a new version where `max_staleness` does not let it run further ahead.
- The score loop recomputes log-probs of finished groups and works out advantages. It waits for rewarded groups.
- The training loop, below, takes scored groups, accumulates gradients as they arrive and steps the optimiser. It waits for
  scored groups, and, on-policy, for every engine to have the new version.
- Weight sync pushes a version to engines while they generate, then lets them activate it. A push waits for the last
  activation.

Evaluations and checkpoints are taken between steps; engines that are set aside evaluate, and files are written, beside the
next steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from rlsys.config.schema import GuardAction, RunConfig
from rlsys.errors import RunError
from rlsys.observe import status
from rlsys.observe.guards import Alarm
from rlsys.observe.records import write_summary
from rlsys.orchestrator.resume import Origin
from rlsys.orchestrator.run import Run, open_run

Opener = Callable[[RunConfig, Path, Origin | None], AbstractAsyncContextManager[Run]]


async def train(
    config: RunConfig, run_dir: Path, origin: Origin | None = None, opened: Opener = open_run
) -> dict[str, Any]:
    """Train as `config` says, from `origin` on; everything goes to `run_dir`. Returns what `summary.json` holds."""
    done, steps = origin.state.step if origin else 0, config.trainer.steps
    async with opened(config, run_dir, origin) as run:
        await run.weights.push(version=done)
        await run.weights.activate(version=done)
        if run.log.em_of(done) is None and (done in (0, steps) or due(done, config.eval.interval)):
            await evaluate(run, done)  # At the beginning, or where the run was ended before the answers were in.
        run.pipeline.publish(version=done)
        async with asyncio.TaskGroup() as background:
            background.create_task(run.pipeline.run())  # Generates and scores until it is stopped.
            watching = background.create_task(run.watch_rollouts())
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
            watching.cancel()
            run.pipeline.stop()
        run.log_prompts(steps)
        if config.algorithm.eval_ref_policy:
            status.show("waits for the evaluation", *run.groups.trained)
            await run.evaluate_reference(steps)
        run.log.samples(groups)
        summary = run.log.summary(len(run.weights.reports))
    summary["checkpoint"] = str(run.saver.newest / "actor") if run.saver.newest else None
    write_summary(run_dir / "summary.json", summary)
    return summary


async def evaluate(run: Run, step: int) -> None:
    """Evaluate on all engines; the trained groups wait."""
    status.show("waits for the evaluation", *run.groups.trained)
    await run.groups.devices.need("rollout")
    await run.evaluator.evaluate(step)


def collapsed(alarm: Alarm, checkpoint: Path | None) -> RunError:
    """The error that ends a run that shows signs of collapse, once its checkpoint is written."""
    return RunError(f"{alarm} The run has ended, as guards.action=stop says; its checkpoint is {checkpoint}.")


def due(step: int, interval: int) -> bool:
    """Whether something that happens every `interval` steps happens after `step`; 0 is never."""
    return interval > 0 and step % interval == 0
