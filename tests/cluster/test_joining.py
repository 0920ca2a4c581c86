"""A Ray that does not start, does not answer or is not there: a sentence, and an end to the wait."""

from __future__ import annotations

import socket
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import ray

from rlsys.cluster.preflight.machine import Unseen, cluster_at
from rlsys.cluster.runtime import answer, natural, ray_runtime
from rlsys.config.schema import ClusterConfig, Device
from rlsys.errors import RunError
from tests.support.refusals import refused


def test_a_ray_that_does_not_start_is_tried_again_and_then_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tries: list[dict[str, Any]] = []

    def slow(**options: Any) -> None:
        tries.append(options)
        raise Exception("The current node timed out during startup.")  # noqa: TRY002 (as Ray does)

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(ray, "init", slow)
    runtime = ray_runtime(ClusterConfig(device=Device.cpu), [1])
    with pytest.raises(RunError, match="timed out during startup"):
        runtime.__enter__()
    assert [options["address"] for options in tries] == ["local"] * 3


def test_a_cluster_where_nobody_listens_is_refused() -> None:
    runtime = ray_runtime(ClusterConfig(device=Device.cpu, address="127.0.0.1:1"), [1])
    with refused("unreachable", "cluster.address"):
        runtime.__enter__()


async def test_an_answer_a_refusal_and_silence_are_told_apart() -> None:
    assert await answer(lambda: 3, 300) == 3

    def refuse() -> None:
        raise RuntimeError("no such node")

    with pytest.raises(RunError, match="no such node"):
        await answer(refuse, 300)
    never = threading.Event()
    with pytest.raises(RunError, match="the head of the Ray cluster"):
        await answer(never.wait, 0.05)
    never.set()


def test_silence_ends_a_look_at_a_cluster_and_its_process() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent, pytest.raises(Unseen):
        cluster_at(f"127.0.0.1:{silent.getsockname()[1]}", 1)


def test_numbers_in_host_names_count_as_numbers() -> None:
    assert sorted(["n10", "n9", "a1", "n9b", "n9-2"], key=natural) == ["a1", "n9", "n9-2", "n9b", "n10"]
