"""Components from outside of rlsys that do not return before `RELEASED` is set."""

from __future__ import annotations

import threading
from typing import Any

from rlsys.components import needs
from tests.extensions.schedule_toys import InPairs
from tests.extensions.search_toys import Letters

RELEASED = threading.Event()


def hangs(*_: Any) -> None:
    RELEASED.wait()


def advantage(episodes: Any) -> Any:
    return hangs(episodes)


@needs("mini_batch")
def batch_advantage(groups: Any) -> Any:
    return hangs(groups)


def kl_estimator(logprobs: Any, ref_logprobs: Any) -> Any:
    return hangs(logprobs, ref_logprobs)


def policy_loss(logprobs: Any, inputs: Any) -> Any:
    return hangs(logprobs, inputs)


def metric(groups: Any) -> Any:
    return hangs(groups)


class Tracker:
    def __init__(self, run_dir: Any) -> None: ...

    def log(self, step: int, metrics: Any) -> None:
        hangs(step, metrics)

    def close(self) -> None: ...


class HangsAtAdmission(InPairs):
    def may_admit(self, view: Any) -> Any:
        return hangs(view)


class HangsInSearch(Letters):
    def search(self, queries: Any, topk: int) -> Any:
        return hangs(queries) or super().search(queries, topk)
