"""A machine that is told to end gives the head time to close the run."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import closing

import pytest

from rlsys.cluster.launch import ray_node as worker
from rlsys.cluster.launch.ray_node import Ending
from rlsys.cluster.launch.role import Role


class Node:
    """Stands for Ray on the machine."""

    told: Ending | None = None

    def ending(self) -> Ending | None:
        return self.told

    def require_alive(self) -> None:
        pass


@pytest.mark.parametrize("then", ["head", "time", "again"])
async def test_sigterm_leaves_when_the_head_says_so_or_in_time_or_at_the_second(
    then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "LOOK_S", 0.02)
    monkeypatch.setattr(worker, "FAREWELL_S", 0.2 if then == "time" else 60.0)
    node, said = Node(), list[str]()
    with closing(socket.create_server(("127.0.0.1", 0))) as head:
        role = Role(1, 2, "127.0.0.1", head.getsockname()[1])
        stay = asyncio.create_task(worker._stay(role, node, said.append))  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.1)
        assert not stay.done()
        if then == "head":
            node.told = Ending(130, "the run was interrupted")
            assert await stay == node.told
        elif then == "again":
            os.kill(os.getpid(), signal.SIGTERM)
        if then != "head":
            with pytest.raises(asyncio.CancelledError):
                await stay
    assert len(said) == 1
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
