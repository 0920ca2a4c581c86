"""Bugs that the checks of a simulated run must find, at least one for each property.

Each bug is a method of rlsys in which a piece of text is replaced.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from textwrap import dedent
from typing import Any

import pytest

from rlsys.data.prompt_source import PromptSource
from rlsys.orchestrator.pipeline.rollout_pipeline import RolloutPipeline as Pipeline
from rlsys.orchestrator.pipeline.scheduler import StalenessScheduler as Scheduler
from tests.orchestrator.pipeline.simulation import Parts
from tests.orchestrator.pipeline.watched import Property as Broken

PARTS = {Scheduler: "scheduler", Pipeline: "pipeline", PromptSource: "prompts"}


def bug(name: str, broken: Broken, method: Callable[..., Any], old: str, new: str) -> Any:
    """Return a test case: the property that the bug breaks, and a function that plants the bug."""
    return pytest.param(broken, partial(_planted, method, old, new), id=name)


def _planted(method: Callable[..., Any], old: str, new: str) -> Parts:
    """Return the classes of a run, one of them with the text `old` of `method` replaced by `new`."""
    (part,) = [part for part in PARTS if vars(part).get(method.__name__) is method]
    planted = {method.__name__: rewritten(method, old, new)}
    return Parts(**{PARTS[part]: type(f"Planted{part.__name__}", (part,), planted)})


def rewritten(method: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """Return `method` with the text `old`, which it has once, replaced by `new`."""
    source = dedent(inspect.getsource(method))
    assert source.count(old) == 1, f"{method.__qualname__} has not one {old!r}"
    code = compile("from __future__ import annotations\n" + source.replace(old, new), "planted", "exec")
    found: dict[str, Any] = {}
    exec(code, vars(sys.modules[method.__module__]), found)
    return found[method.__name__]


PLANTED = [
    bug("only the first group of a score batch is scored", Broken.deadlock, Pipeline._score, "in batch:", "in batch[:1]:"),
    bug(
        "a ready group drops the rolling ones", Broken.livelock, Scheduler.unschedulable,
        "return found", "return found or [(one, DropReason.surplus) for one in self._rolling.prompt_groups()[1:]]",
    ),
    bug("publishing wakes no waiter", Broken.waiting, Pipeline.publish, "self._changed.set()", "pass"),
    bug("groups without a place are kept", Broken.unschedulable, Pipeline.take, "self._drop_unschedulable()", "self._changed.set()"),
    bug(
        "one group fills several places", Broken.once, Pipeline.take,
        "groups.append(first.group)", "groups += [first.group] * (most - len(groups))",
    ),
    bug(
        "prompts of stale groups are not given back", Broken.conserved, Pipeline._drop,
        "reason in GIVEN_BACK", "reason in GIVEN_BACK and reason is not DropReason.stale",
    ),
    bug("a group counts as younger", Broken.staleness, Scheduler.finish_rolling, "= oldest,", "= oldest + 1,"),
    bug(
        "a group that continued counts as its newest token", Broken.staleness, Pipeline._roll,
        "group.oldest_version", "group.oldest_version and max(max(one.trajectory.versions) for one in group.samples)",
    ),
    bug("a mini-batch takes groups of the next", Broken.step, Pipeline.take, "len(groups) < most", "self.scheduler.groups_missing"),
    bug("one too many is admitted", Broken.outstanding, Scheduler.may_admit, "+ self.spare", "+ self.spare + 1"),
    bug("a dropped group is scored", Broken.dropped, Pipeline._drop, "self._rewarded.pop(prompt_group, None)", "pass"),
    bug(
        "publishing makes the scheduler forget a group", Broken.update, Scheduler.publish,
        "= version", "= version; [*map(self._rolling.remove, self._rolling.prompt_groups()[:1])]",
    ),
    bug(
        "in sequence, the last reward is not awaited", Broken.sequence, Pipeline._may_score,
        "self._rolling or", "self._rolling.keys() - self._rewarding.keys() or",
    ),
    bug("scores come in the wrong order", Broken.own, Pipeline._score, "zip(asked, found", "zip(asked, found[::-1]"),
    bug(
        "the policy's order is ignored", Broken.order, Pipeline._score,
        "self.scheduler.priority(prompt_group)", "(prompt_group.oldest, 0, prompt_group.number)",
    ),
    bug(
        "the newest is trained first", Broken.order, Pipeline._score,
        "self.scheduler.priority(prompt_group)", "(-prompt_group.oldest, 0, prompt_group.number)",
    ),
    bug("a group waits a step too long", Broken.waited, Scheduler._last_step, "+ self._max_wait", "+ self._max_wait + 1"),
    bug("a closed step wakes no waiter", Broken.waiting, Pipeline.close_step, "self._changed.set()", "pass"),
]  # fmt: skip

PLANTED_IN_RESUMING = [
    bug("numbers begin anew", Broken.once, Scheduler.resume, "state.admitted, state", "0, state"),
    bug("replacements are counted anew", Broken.replaced, Scheduler.resume, "d, state.replaced", "d, 0"),
    bug("rolling groups are forgotten", Broken.resumed, Scheduler.resume, "self._rolling, state.rolling", "self._rolling, ()"),
    bug("rolling groups are not progress", Broken.waiting, Pipeline._resume, "prompt_group.stage is GroupStage.rolling", "False"),
    bug(
        "groups not yet begun again lose their episodes", Broken.resumed, Pipeline.state,
        "self._to_resume.get(prompt_group, ())", "()",
    ),
    bug("groups that are being scored are not saved", Broken.deadlock, Pipeline.state, "*self._scoring, ", ""),
    bug("losses are forgotten", Broken.conserved, Pipeline._resume, "self._losses.update(state.losses)", "pass"),
    bug("groups beyond fewer steps are kept", Broken.unschedulable, Pipeline.run, "self._drop_unschedulable()", "pass"),
    bug(
        "questions that were given back are forgotten", Broken.conserved, PromptSource.__init__,
        "state.given_back if state else ()", "()",
    ),
    bug(
        "groups that the curriculum has yet to count are forgotten", Broken.counted, PromptSource.__init__,
        "state.uncounted if state else ()", "()",
    ),
]  # fmt: skip
"""Bugs that show only if a run is killed and resumed."""
