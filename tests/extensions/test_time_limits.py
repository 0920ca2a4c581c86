"""Tests of components from outside of rlsys that do not return: each ends in one sentence that names it."""

from __future__ import annotations

import json
import logging
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlsys.algorithms.kl import KlController, sampled_estimator
from rlsys.algorithms.losses import policy_loss
from rlsys.components import ComponentThread, OverdueError
from rlsys.config.algorithm import AlgorithmConfig
from rlsys.config.compose import as_dict, differences
from rlsys.config.schema import RunConfig
from rlsys.data.trajectory import Group
from rlsys.errors import RunError
from rlsys.observe.records import read_metrics
from rlsys.observe.trackers import OwnMetrics, open_trackers
from rlsys.orchestrator.pipeline.grouping import finish, over_mini_batch
from rlsys.search.index.backend import BackendRetriever
from rlsys.search.index.make import make_index, recipe
from tests.extensions import hanging_toys
from tests.extensions.scheduled_run import assert_named
from tests.extensions.small_batches import batch, group
from tests.search.gated import in_process
from tests.support.composed import composed
from tests.support.refusals import refused

TOYS = "tests.extensions.hanging_toys"


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    """End the threads that a test leaves behind."""
    yield
    hanging_toys.RELEASED.set()
    hanging_toys.RELEASED.clear()


def limited(key: str, name: str, *overrides: str) -> RunConfig:
    return composed(f"{key}={{kind: {TOYS}.{name}, timeout_s: 0.05}}", *overrides)


def finished(config: AlgorithmConfig) -> list[Group]:
    scored = group(0.0, 1.0)
    samples = tuple(replace(one, ref_logprobs=one.old_logprobs) for one in scored.samples)
    return over_mini_batch([finish(replace(scored, samples=samples), config, KlController(0.1))], config)


def lost(config: AlgorithmConfig) -> None:
    """Compute the loss as a worker does, whose loss was pickled by the driver."""
    logprobs, inputs = batch([1.0, -2.0])
    pickle.loads(pickle.dumps(policy_loss(config)))(logprobs, None, inputs)


@pytest.mark.parametrize(
    ("key", "name", "call", "more"),
    [
        ("algorithm.advantage", "advantage", finished, "algorithm.kl_coef=0"),
        ("algorithm.advantage", "batch_advantage", finished, "algorithm.kl_coef=0"),
        ("algorithm.kl_estimator", "kl_estimator", finished, "algorithm.kl_in=reward"),
        ("algorithm.kl_estimator", "kl_estimator", lost, "algorithm.kl_in=loss"),
        ("algorithm.policy_loss", "policy_loss", lost, "algorithm.kl_coef=0"),
    ],
)
def test_algorithm_that_hangs_is_named(key: str, name: str, call: Callable[[AlgorithmConfig], None], more: str) -> None:
    with refused("user_code", f"{key}.kind") as caught:
        call(limited(key, name, more).algorithm)
    assert f"{TOYS}.{name} " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_schedule_that_hangs_ends_the_run_with_its_name() -> None:
    assert_named(f"{TOYS}.HangsAtAdmission", "trainer.schedule.timeout_s=2")  # Its constructor must end in time.


def test_metric_and_tracker_that_hang_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = f"tracking.metrics=[{{kind: {TOYS}.metric, timeout_s: 0.05}}, examples.extend.metric.answer_words]"
    trackers = f"tracking.trackers=[{{kind: {TOYS}.Tracker, timeout_s: 0.05}}]"
    quiet = ("tracking.wandb=false", "tracking.tensorboard=false")
    tracking = composed(metrics, trackers, *quiet).tracking
    opened, own = open_trackers(tracking, tmp_path, {}), OwnMetrics(tracking.metrics)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            opened.log(step, {"loss": step / 4})
            assert {name.split("/")[1] for name in own.of([group(1.0)])} == {"answer_words"}
        opened.close()
    failed = [record.args[0] for record in caplog.records if isinstance(record.args, tuple)]
    assert failed == [f"{TOYS}.Tracker", "own/metric"]
    assert [row["loss"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0.25, 0.5]


async def test_search_backend_that_hangs_is_named_and_the_server_stays(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"id": "p0", "contents": '"oak"\noak'}) + "\n")
    kind, out = f"{TOYS}.HangsInSearch", tmp_path / "index"
    assert make_index(kind, tmp_path / "corpus.jsonl", out, recipe(kind, {}))
    retriever = BackendRetriever.open(out, trusted=kind, timeout_s=0.05)
    with pytest.raises(RunError, match=kind):
        retriever.find(["oak"], 1)
    async with in_process(retriever) as client:
        answer = await client.post("/retrieve", json={"queries": ["oak"], "topk": 1})
        assert (answer.status_code, kind in answer.text) == (503, True)
        assert (await client.get("/health")).status_code == 200


def test_time_limit_is_a_key_that_a_resume_may_change() -> None:
    config = limited("algorithm.policy_loss", "policy_loss")
    assert as_dict(config)["algorithm"]["policy_loss"] == {"kind": f"{TOYS}.policy_loss", "timeout_s": 0.05}
    before = as_dict(composed(f"algorithm.policy_loss={TOYS}.policy_loss"))
    assert differences(before, config) == []


def test_thread_fails_at_once_until_an_overdue_call_has_returned() -> None:
    thread, begun, gate, gone = ComponentThread(), threading.Event(), threading.Event(), threading.Event()

    def waits() -> threading.Thread:
        begun.set()
        gate.wait()
        gone.set()
        return threading.current_thread()

    with pytest.raises(OverdueError):
        thread.call(waits, timeout_s=0.01)
    begun.wait()
    with pytest.raises(OverdueError):
        thread.call(int, timeout_s=None)  # Without a limit of its own, this would wait for ever.
    gate.set()
    gone.wait()
    while True:
        try:
            assert thread.call(int, timeout_s=None) == 0
            break
        except OverdueError:  # The thread is about to note the late result.
            pass
    worker = thread.call(waits, timeout_s=None)
    assert worker is not threading.current_thread()
    del thread
    worker.join()


def test_error_of_the_component_is_raised_as_it_is() -> None:
    def times_out() -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        ComponentThread().call(times_out, timeout_s=None)
    with pytest.raises(SystemExit):
        ComponentThread().call(sys.exit, timeout_s=None)


def test_component_computes_with_the_gradient_mode_of_its_caller() -> None:
    config = composed("algorithm.kl_estimator=examples.extend.kl_estimator.bounded_k2")
    estimator = sampled_estimator(config.algorithm.kl_estimator)  # type: ignore[arg-type]
    logprobs = torch.zeros(1, 3, requires_grad=True)
    assert estimator(logprobs, torch.ones(1, 3)).requires_grad
    with torch.no_grad():
        assert not estimator(logprobs, torch.ones(1, 3)).requires_grad
