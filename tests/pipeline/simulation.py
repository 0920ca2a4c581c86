"""Whole runs of the pipeline under a virtual clock: real ledger, flow, learner's loop, prompt source and router.

`simulate(seed)` scripts the workers by the seed (`scripted`), drives the run as the driver does, and holds the
properties (`watched.Property`) against it; it raises `Breach` where one does not hold.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

from rlsys.data.source import PromptSource
from rlsys.errors import root_cause
from rlsys.pipeline.flow import MOST_LOSSES, Bites, Flow, Handlers
from rlsys.pipeline.learn import MiniBatches, learn
from rlsys.pipeline.ledger import Ledger, Reason
from tests.pipeline.build import question
from tests.pipeline.script import Ending, Script
from tests.pipeline.scripted import Devices, Engines, Handling, Learner, Scorer, SharedDevices
from tests.pipeline.virtual_time import EndlessError, HangError, run_virtually
from tests.pipeline.watched import Breach, Failure, Property, Record, watched

MOST_TURNS = 20_000
"""Of the loop. A run takes some hundred, the longest of 3,000 a thousand."""


@dataclass(frozen=True)
class Parts:
    """What a run is built from. Tests put something wrong here."""

    ledger: type[Ledger] = Ledger
    flow: type[Flow] = Flow


class Simulation:
    """One run."""

    def __init__(self, script: Script, parts: Parts) -> None:
        self.script = script
        self.record = record = Record(script)
        self.error: BaseException | None = None
        """What ended it before its time."""
        self.questions = [question(number) for number in range(script.questions)]
        self.prompts = PromptSource(self.questions, seed=0)
        self.engines = Engines(script, record)
        self.learners = {name: Learner(name, script, record) for name in ("actor", "critic")}
        self.devices = SharedDevices(script, record) if script.sequential else Devices(script, record)
        self.ledger = watched(parts.ledger)(
            script.groups_per_step,
            script.max_staleness,
            script.oversample,
            script.max_replaced,
            script.steps if script.knows_end else None,
        )
        self.ledger.record = record
        handling = Handling(script, record)
        self.flow = parts.flow(
            self.ledger,
            self.prompts,
            self.engines,
            Scorer(script, record),
            Handlers(handling.reward, handling.finish),
            Bites(script.least, script.most),
            self.devices,
            record.say,
        )

    async def drive(self) -> None:
        """The driver: see `rlsys.train`."""
        script, loop = self.script, asyncio.get_running_loop()
        for time, engine in script.deaths:
            loop.call_at(time, self.engines.kill, engine)
        if script.ending is not Ending.cancel:
            await self._train()
            return
        loop.call_at(script.end_at, self._give_up)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(script.end_at):
                await self._train()

    async def _train(self) -> None:
        script = self.script
        whole = list if script.whole else None
        cut = MiniBatches(script.updates, script.groups_per_step // script.updates, whole)
        async with asyncio.TaskGroup() as background:
            background.create_task(self._flow())
            if script.ending is Ending.stop:
                asyncio.get_running_loop().call_at(script.end_at, self._stop)
            switched = None
            for step in range(1, script.steps + 1):
                learners = {name: self.learners[name] for name in script.learning(step)}
                groups, updates = await learn(
                    self.flow, learners, self.devices, cut, self.record.say("actor")
                )
                assert updates == [{f"{name}/loss": 0.0 for name in learners}] * script.updates
                self.record.returned(groups)
                await self.devices.need("actor", "inference")
                await script.pause("update")
                if switched is not None:
                    await switched
                switched = background.create_task(self._switch(step))
                if script.max_staleness == 0:
                    await switched
            self._stop()

    async def _switch(self, version: int) -> None:
        await self.devices.need("rollout")
        await self.engines.switch(version)
        self.flow.publish(version)

    async def _flow(self) -> None:
        try:
            await self.flow.run()
        finally:
            self.record.over = True

    def _give_up(self) -> None:
        self.record.over = True

    def _stop(self) -> None:
        self.record.over = True
        self.flow.stop()

    def check_idle(self) -> None:
        """Everybody waits, and time is about to move on: nobody waits for what is there."""
        record, waits = self.record, self.record.states
        if record.over or not waits:
            return
        if self.ledger.doomed():
            raise record.breach(Property.doomed, f"{self.ledger.doomed()} are kept")
        room = record.running < self.engines.capacity and self.ledger.may_admit()
        if room and not self.devices.pending["rollout"]:
            raise record.breach(Property.waiting, "a prompt waits although it may be admitted")
        if record.offered and waits.get("actor") == "waits for log-probs":
            raise record.breach(Property.waiting, f"the learner waits although {record.offered} are scored")
        no_more = not record.running and not record.rewarded_now and not self.ledger.may_admit()
        enough = len(record.unscored) >= self.script.least or (record.unscored and no_more)
        scorer_waits = waits["inference"] == "waits for rollouts" and not self.devices.pending["inference"]
        if scorer_waits and enough:
            raise record.breach(Property.waiting, f"the scorer waits although {record.unscored} are rolled")

    def check_end(self) -> None:
        """The run has ended: what was asked is accounted for."""
        record, script = self.record, self.script
        if record.open:
            raise Breach(Property.once, f"tickets {record.open} are neither trained nor dropped")
        if script.ending is Ending.finish and record.version != script.steps:
            raise Breach(Property.step, f"{record.version} steps of {script.steps} were closed")
        if self.ledger.dropped != Counter(reason for _, reason in record.dropped):
            raise Breach(Property.once, f"the ledger counts {self.ledger.dropped}")
        fresh = PromptSource(self.questions, seed=0)
        asked = Counter(fresh.next().uid for _ in range(self.prompts.position))
        found = Counter(one.uid for one in [*record.trained, *self.prompts.given_back]) + self._for_good()
        if asked != found:
            raise Breach(Property.conserved, f"asked {asked}, found {found}")

    def _for_good(self) -> Counter[str]:
        """Prompts that were dropped and are not asked again."""
        count: Counter[str] = Counter(
            one.uid for one, reason in self.record.dropped if reason is Reason.no_spread
        )
        losses = Counter(one.uid for one, reason in self.record.dropped if reason is Reason.lost)
        return count + Counter({uid: max(0, lost - MOST_LOSSES + 1) for uid, lost in losses.items()})


def run(script: Script, parts: Parts = Parts()) -> Simulation:
    """Run `script` to its end. Raises Breach."""
    simulation = Simulation(script, parts)
    try:
        run_virtually(simulation.drive(), MOST_TURNS, simulation.check_idle)
    except HangError:
        raise Breach(Property.deadlock, f"at step {simulation.record.version}") from None
    except EndlessError:
        raise Breach(Property.livelock, f"{MOST_TURNS} turns of the loop") from None
    except ExceptionGroup as group:
        simulation.error = simulation.record.broken or root_cause(group)
        _accept(script, simulation.record, simulation.error)
    simulation.check_end()
    return simulation


def simulate(seed: int, parts: Parts = Parts()) -> Simulation:
    """The run that `seed` scripts. Raises Breach."""
    return run(Script.seeded(seed), parts)


def _accept(script: Script, record: Record, error: BaseException) -> None:
    """Let an error pass that the script asks for."""
    failed = script.ending is Ending.fail and isinstance(error, Failure)
    stopped = script.ending is Ending.stop and record.over and isinstance(error, RuntimeError)
    if not failed and not stopped:
        raise error
