"""Bugs planted on purpose, at least one for each property that a simulated run must have: the checks see them.

Each is a method of the product with a piece of its text replaced.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from textwrap import dedent
from typing import Any

import pytest

from rlsys.data.question import PromptSource
from rlsys.orchestrator.pipeline.rollout_pipeline import RolloutPipeline as Pipeline
from rlsys.orchestrator.pipeline.scheduler import StalenessScheduler as Scheduler
from tests.orchestrator.pipeline.simulation import Parts
from tests.orchestrator.pipeline.watched import Property as Broken

PARTS = {Scheduler: "scheduler", Pipeline: "pipeline", PromptSource: "prompts"}


def bug(told: str, broken: Broken, method: Callable[..., Any], old: str, new: str) -> Any:
    """A case: the property that must be seen to break, and what plants the bug."""
    return pytest.param(broken, partial(_planted, method, old, new), id=told)


def _planted(method: Callable[..., Any], old: str, new: str) -> Parts:
    """The parts of a run whose `method` says `new` for `old`."""
    (part,) = [part for part in PARTS if vars(part).get(method.__name__) is method]
    source = dedent(inspect.getsource(method))
    assert source.count(old) == 1, f"{method.__qualname__} has not one {old!r}"
    code = compile("from __future__ import annotations\n" + source.replace(old, new), "planted", "exec")
    methods: dict[str, Any] = {}
    exec(code, vars(sys.modules[part.__module__]), methods)
    return Parts(**{PARTS[part]: type(f"Planted{part.__name__}", (part,), methods)})


PLANTED = [
    bug("only the first group of a score batch is scored", Broken.deadlock, Pipeline._score, "in batch:", "in batch[:1]:"),
    bug(
        "a group that is ready ends those that roll", Broken.livelock, Scheduler.unschedulable,
        "return found", "return found or [(one, DropReason.surplus) for one in self._rolling.prompt_groups()[1:]]",
    ),
    bug("a version wakes nobody", Broken.waiting, Pipeline.publish, "self._changed.set()", "pass"),
    bug("a rewarded group keeps its room", Broken.waiting, Pipeline._may_roll, "- len(self._rewarding)", ""),
    bug(
        "what lost its place is kept", Broken.unschedulable, Pipeline.take,
        "self._drop_unschedulable()", "self._changed.set()",
    ),
    bug(
        "a group takes the places of others too", Broken.once, Pipeline.take,
        "groups.append(first.group)", "groups += [first.group] * (most - len(groups))",
    ),
    bug(
        "prompts of stale groups are not given back", Broken.conserved, Pipeline._drop,
        "reason in GIVEN_BACK", "reason in GIVEN_BACK and reason is not DropReason.stale",
    ),
    bug("a group counts as younger", Broken.staleness, Scheduler.finish_rolling, "= oldest,", "= oldest + 1,"),
    bug(
        "a mini-batch takes of the next", Broken.step, Pipeline.take,
        "len(groups) < most", "self.scheduler.groups_missing",
    ),
    bug("one too many is admitted", Broken.outstanding, Scheduler.may_admit, "+ self.spare", "+ self.spare + 1"),
    bug("engines get more than they have room for", Broken.outstanding, Pipeline._may_roll, "room > 0", "room > -1"),
    bug("a dropped group is scored", Broken.dropped, Pipeline._drop, "self._rewarded.pop(prompt_group, None)", "pass"),
    bug(
        "a version makes the scheduler forget a group", Broken.update, Scheduler.publish,
        "= version", "= version; [*map(self._rolling.remove, self._rolling.prompt_groups()[:1])]",
    ),
    bug(
        "in sequence, groups are scored as they come", Broken.sequence, Pipeline._may_score,
        "len(self._rewarded) >= self._batch_size.min_groups", "self._rewarded",
    ),
    bug(
        "in sequence, the last reward is not awaited", Broken.sequence, Pipeline._may_score,
        "self._rolling or", "self._rolling.keys() - self._rewarding.keys() or",
    ),
    bug("scores come in the wrong order", Broken.own, Pipeline._score, "zip(asked, found", "zip(asked, found[::-1]"),
    bug("the newest is trained first", Broken.order, Pipeline._score, "_Scored(prompt_group", "_Scored(-prompt_group"),
]  # fmt: skip

PLANTED_IN_RESUMING = [
    bug("numbers begin anew", Broken.once, Scheduler.resume, "state.admitted, state", "0, state"),
    bug("as many are replaced once more", Broken.replaced, Scheduler.resume, "d, state.replaced", "d, 0"),
    bug("what rolls is forgotten", Broken.resumed, Scheduler.resume, "self._rolling, state.rolling", "self._rolling, ()"),
    bug(
        "what rolls is not begun", Broken.waiting, Pipeline._resume,
        "prompt_group.stage is GroupStage.rolling", "False",
    ),
    bug(
        "the newest is begun first", Broken.resumed, Pipeline._resume,
        "in prompt_groups.values()", "in reversed(prompt_groups.values())",
    ),
    bug(
        "begun episodes are thrown away", Broken.resumed, Pipeline._resume,
        "state.progress.get(prompt_group.number, ())", "()",
    ),
    bug(
        "older news are saved of what is rewarded", Broken.resumed, Pipeline.state,
        "self._rewarding.get(prompt_group)", "()",
    ),
    bug(
        "what waits to be begun again forgets its episodes", Broken.resumed, Pipeline.state,
        "self._to_resume.get(prompt_group, ())", "()",
    ),
    bug(
        "what no engine has begun yet forgets its episodes", Broken.resumed, Pipeline.state,
        "self._resumed_from.get(prompt_group)", "()",
    ),
    bug("scored groups are not resumed", Broken.deadlock, Pipeline._resume, "in state.scored.items()", "in ()"),
    bug("rolled groups are not resumed", Broken.deadlock, Pipeline._resume, "in state.rewarded.items()", "in ()"),
    bug("what is being scored is not saved", Broken.deadlock, Pipeline.state, "*self._scoring, ", ""),
    bug(
        "groups are scored in reverse", Broken.order, Pipeline._resume,
        "in state.rewarded.items()", "in reversed(state.rewarded.items())",
    ),
    bug("losses are forgotten", Broken.conserved, Pipeline._resume, "self._losses.update(state.losses)", "pass"),
    bug("fewer steps end nothing", Broken.unschedulable, Pipeline.run, "self._drop_unschedulable()", "pass"),
    bug(
        "questions that were given back are forgotten", Broken.conserved, PromptSource.__init__,
        "state.given_back if state else ()", "()",
    ),
    bug("the first epoch begins again", Broken.conserved, PromptSource.__init__, "state.position if state else 0", "0"),
]  # fmt: skip
"""Those that show in a run that is killed and resumed."""
