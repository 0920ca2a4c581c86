"""Rollouts and log-probs, running ahead of training as far as the ledger lets them.

Contract: `run` rolls and scores until `stop`; meanwhile the driver `take`s scored groups, oldest first, trains
on them, and says when a step is closed and when the engines have a new version. All decisions are the
ledger's; this module carries them out: it starts and cancels episodes, has their groups rewarded, hands groups
from stage to stage and gives prompts back. A stage that fails ends `run` with its error: run it in the task
group of those who `take`. Between two steps `state` says all that is under way; another flow goes on from it.

Invariants: a group is rewarded, scored and handed out at most once; a cancelled group's episodes, or what
rewards them, have ended before `run` does; a group that is being rewarded keeps no room in the engines; what
the ledger dooms is dropped at once; when `run` has ended, every prompt is trained, dropped for good or back in
the source; the state of a flow that resumes a state, and has not run yet, is that state. Runs on asyncio alone, so
that it can be tested under any clock and interleaving.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from itertools import islice
from typing import NamedTuple

from rlsys.data.group import Group
from rlsys.data.question import Question
from rlsys.data.trajectory import Trajectory
from rlsys.orchestrator.pipeline.ledger import GIVEN_BACK, Ledger, LedgerState, Reason, Stage, Ticket
from rlsys.orchestrator.pipeline.routing import GroupLost
from rlsys.orchestrator.pipeline.workers import Devices, Generator, Prompts, Say, Scorer, groups_of, silent
from rlsys.rollout.agent.begun import Begun

MOST_LOSSES = 3
"""A question whose group was lost so often is not asked again before the next epoch, and then once: it may be
what kills the engines."""
SCORES = {"inference": "log-probs", "critic": "values"}
"""Group that scores -> what it computes."""


@dataclass(frozen=True, slots=True)
class Handlers:
    """What is done to a group on its way."""

    reward: Callable[[Question, Sequence[Trajectory]], Awaitable[Group]]
    """Once its episodes are done. It may take long, and is cancelled where the group is dropped meanwhile."""
    finish: Callable[[Group], Group]
    """Advantages, and weights of off-policy tokens, once it is scored. A pure function."""


@dataclass(frozen=True, slots=True)
class Bites:
    """How many groups the scorer takes at a time."""

    least: float
    """It waits for so many, or until all rollouts are rewarded and none may begin; infinity is the latter."""
    most: int


@dataclass(frozen=True, slots=True)
class FlowState:
    """All that is under way between two steps. The rest is by number of the ledger's tickets."""

    ledger: LedgerState
    losses: Mapping[str, int]
    """Question -> how often its group was lost."""
    begun: Mapping[int, tuple[Begun, ...]]
    """What there is of groups that roll; all episodes of those that are being rewarded."""
    rolled: Mapping[int, Group]
    """Rewarded, in the order in which they are to be scored."""
    scored: Mapping[int, Group]
    """To be taken."""


class _Scored(NamedTuple):
    """A group that may be taken, in the order of taking. One that was dropped meanwhile is passed over."""

    oldest: int
    number: int
    ticket: Ticket
    group: Group


class Flow:
    """The way of a group from its prompt to the actor."""

    def __init__(
        self,
        ledger: Ledger,
        prompts: Prompts,
        generator: Generator,
        scorer: Scorer,
        handlers: Handlers,
        bites: Bites,
        devices: Devices,
        say: Callable[[str], Say],
        state: FlowState | None = None,
    ) -> None:
        """With a `state`, whose tickets the ledger then has, goes on from it.

        `say` gives each stage a voice: "rollout", and "inference" and "critic.values", as far as they score.
        """
        self.ledger = ledger
        self._prompts, self._generator, self._scorer = prompts, generator, scorer
        self._handlers, self._bites, self._devices = handlers, bites, devices
        self._say_rollout = say("rollout")
        voices = {group: say("critic.values" if group == "critic" else group) for group in scorer.groups}
        self._say_scorers = {SCORES[group]: voice for group, voice in voices.items()}
        self._rolling: dict[Ticket, asyncio.Task[None]] = {}
        """Until the task has ended, which is later than the ticket if it was cancelled."""
        self._rewarding: dict[Ticket, Sequence[Trajectory]] = {}
        """Of them, those whose episodes are done."""
        self._begun: dict[Ticket, Sequence[Begun]] = {}
        """What each of them went on from."""
        self._again: OrderedDict[Ticket, Sequence[Begun]] = OrderedDict()
        """Rolling tickets of a resumed state that have no task yet, and what they will go on from."""
        # Not a dict: that finds its first key ever more slowly, the more were removed before it.
        self._rolled: OrderedDict[Ticket, Group] = OrderedDict()
        self._scoring: Sequence[tuple[Ticket, Group]] = ()
        self._scored: list[_Scored] = []
        self._losses: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._stopping = False
        if state is not None:
            self._resume(state)

    def state(self, begun: Mapping[int, Sequence[Begun]]) -> FlowState:
        """What is under way now; `begun` is what the generator said of it a moment ago.

        In between, tickets may have come, gone on or gone: what they have become by now counts, and `begun` for those
        alone whose episodes still run. Raises RuntimeError in the middle of a step.
        """
        books = self.ledger.state()
        rolling = [ticket for ticket in self.ledger.outstanding if ticket.stage is Stage.rolling]
        known = {
            ticket.number: tuple(
                self._rewarding.get(ticket)
                or begun.get(ticket.number)
                or self._begun.get(ticket)
                or self._again.get(ticket, ())
            )
            for ticket in rolling
        }
        waiting = [*self._scoring, *self._rolled.items()]
        return FlowState(
            ledger=books,
            losses=dict(self._losses),
            begun={number: episodes for number, episodes in known.items() if episodes},
            rolled={ticket.number: group for ticket, group in waiting if ticket.stage is Stage.ready},
            scored={one.number: one.group for one in sorted(self._scored) if one.ticket.stage is Stage.ready},
        )

    async def run(self) -> None:
        """Roll and score until `stop`. However it ends, outstanding tickets are dropped, their prompts given back."""
        self._sweep()  # A run that resumes may have been given fewer steps.
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._roll_all(tasks))
                tasks.create_task(self._score_all())
        finally:
            self._end((ticket, Reason.end) for ticket in self.ledger.outstanding)
            for say in (self._say_rollout, *self._say_scorers.values()):
                say("waits for the end of the run")

    async def take(self, most: int, say: Say = silent) -> list[Group]:
        """Wait for a scored group, then take what is there, oldest first, at most `most`, which is at least 1.

        `say` is told what is waited for. Raises RuntimeError after `stop`.
        """
        groups: list[Group] = []
        while not groups:
            await self._until(lambda: self._stopping or bool(self._scored), lambda: say(f"waits for {self._behind()}"))
            if self._stopping:
                raise RuntimeError("A group was waited for after the pipeline was stopped.")
            while self._scored and len(groups) < most:
                first = heappop(self._scored)
                if first.ticket.stage is Stage.ready:
                    self.ledger.take(first.ticket)
                    groups.append(first.group)
        self._sweep()
        return groups

    def close_step(self) -> None:
        """The optimiser has stepped. This dooms nothing: who had no place but in that step went when it was full."""
        self.ledger.close_step()
        self._show_rollouts()

    def publish(self, version: int) -> None:
        """Every engine has `version`: more may be rolled."""
        self.ledger.publish(version)
        self._changed.set()

    def show_rollouts(self) -> None:
        """Tell again what rollouts do, as long as there are some: what they wait for changes without the flow."""
        if self._rolling and not self._stopping:
            self._show_rollouts()

    def stop(self) -> None:
        """End `run`. A step under way is not closed any more: its prompts are given back too."""
        self._stopping = True
        self._end((ticket, Reason.end) for ticket in self.ledger.outstanding)

    def _resume(self, state: FlowState) -> None:
        self.ledger.resume(state.ledger)
        tickets = {ticket.number: ticket for ticket in self.ledger.outstanding}
        self._losses.update(state.losses)
        for ticket in tickets.values():
            if ticket.stage is Stage.rolling:
                self._again[ticket] = state.begun.get(ticket.number, ())
        self._rolled.update((tickets[number], group) for number, group in state.rolled.items())
        self._scored = [
            _Scored(tickets[number].oldest, number, tickets[number], group) for number, group in state.scored.items()
        ]

    async def _roll_all(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            await self._until(lambda: self._stopping or self._may_roll(), self._show_rollouts)
            if self._stopping:
                return
            await self._devices.need("rollout")
            if self._may_roll():
                if self._again:
                    ticket, begun = self._again.popitem(last=False)
                else:
                    ticket, begun = self.ledger.admit(self._prompts.next()), ()
                self._begun[ticket] = begun
                self._rolling[ticket] = task = tasks.create_task(self._roll(ticket, begun))
                # Not the task's own doing: one that is cancelled before its first turn does nothing at all.
                task.add_done_callback(partial(self._ended, ticket))

    async def _roll(self, ticket: Ticket, begun: Sequence[Begun]) -> None:
        group = None
        try:
            trajectories = await self._generator.run_group(ticket.question, ticket.number, begun)
            self._rewarding[ticket] = trajectories
            self._changed.set()
            if ticket.stage is Stage.rolling:
                group = await self._handlers.reward(ticket.question, trajectories)
        except GroupLost:
            pass
        if ticket.stage is not Stage.rolling:
            return
        if group is None:
            self._drop(ticket, Reason.lost)
        elif reason := self.ledger.finish_rolling(ticket, group.oldest_version, group.has_spread):
            self._drop(ticket, reason)
        else:
            self._rolled[ticket] = group
        self._sweep()

    def _ended(self, ticket: Ticket, _: asyncio.Task[None]) -> None:
        del self._rolling[ticket], self._begun[ticket]
        self._rewarding.pop(ticket, None)
        self._changed.set()

    async def _score_all(self) -> None:
        while True:
            for say in self._say_scorers.values():
                say("waits for rollouts")
            await self._until(lambda: self._stopping or self._worth_scoring())
            if self._stopping:
                return
            await self._devices.need(*self._scorer.groups)
            bite = [self._rolled.popitem(last=False) for _ in range(min(len(self._rolled), self._bites.most))]
            if bite:
                self._scoring = bite
                await self._score(bite)
                self._scoring = ()

    async def _score(self, bite: Sequence[tuple[Ticket, Group]]) -> None:
        for scores, say in self._say_scorers.items():
            say(f"computes {scores} of {groups_of(len(bite))}")
        asked = [sample for _, group in bite for sample in group.samples]
        found = await self._scorer.compute(asked)
        samples = iter([one.with_scores(scores) for one, scores in zip(asked, found, strict=True)])
        for ticket, group in bite:
            scored = replace(group, samples=tuple(islice(samples, len(group.samples))))
            if ticket.stage is Stage.ready:
                finished = self._handlers.finish(scored)
                heappush(self._scored, _Scored(ticket.oldest, ticket.number, ticket, finished))
        self._changed.set()

    def _may_roll(self) -> bool:
        # With no engine left one group is asked for all the same: the error that this raises ends the run.
        room = max(1, self._generator.capacity) - (len(self._rolling) - len(self._rewarding))
        return not self._stopping and room > 0 and (bool(self._again) or self.ledger.may_admit())

    def _worth_scoring(self) -> bool:
        if len(self._rolled) >= self._bites.least:
            return True
        rolling = self._rolling or self._again
        return bool(self._rolled) and not rolling and not self.ledger.may_admit()

    def _show_rollouts(self) -> None:
        generating = len(self._rolling) - len(self._rewarding)
        if generating:
            cause = self._generator.waits_for
            self._say_rollout(f"waits for {cause}" if cause else f"generates {groups_of(generating)}")
        elif self._rewarding:
            self._say_rollout("waits for rewards")
        else:
            trained = self.ledger.version > self.ledger.published
            self._say_rollout("waits for weight sync" if trained else "waits for training")

    def _behind(self) -> str:
        """What the next group that can be taken is still at."""
        if self._scoring:
            return " and ".join(self._say_scorers) or "scores"
        return "rewards" if self._rolling and len(self._rolling) == len(self._rewarding) else "rollouts"

    def _sweep(self) -> None:
        """Drop what can no longer be trained."""
        self._end(self.ledger.doomed())

    def _end(self, found: Iterable[tuple[Ticket, Reason]]) -> None:
        """Drop tickets, and end their episodes if they still run."""
        for ticket, reason in found:
            self._drop(ticket, reason)
            if ticket in self._rolling:
                self._rolling[ticket].cancel()
        self._changed.set()

    def _drop(self, ticket: Ticket, reason: Reason) -> None:
        self.ledger.drop(ticket, reason)
        self._rolled.pop(ticket, None)
        self._again.pop(ticket, None)
        if reason is Reason.lost:
            self._losses[ticket.question.uid] += 1
            if self._losses[ticket.question.uid] >= MOST_LOSSES:
                return
        if reason in GIVEN_BACK:
            self._prompts.give_back(ticket.question)

    async def _until(self, holds: Callable[[], bool], show: Callable[[], None] = lambda: None) -> None:
        """Wait until `holds`, which changes with `_changed` alone. Any number may wait: each is woken each time.

        `show` is called whenever it has still to wait.
        """
        while not holds():
            show()
            self._changed.clear()
            await self._changed.wait()
