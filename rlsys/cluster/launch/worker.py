"""A machine that is not the first: it waits for the head, joins, and stays until the head is done or lost."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from rlsys.cluster.auth import require_token
from rlsys.cluster.launch.ray_node import Ending, RayNode, ray_node
from rlsys.cluster.launch.role import Notify, Role
from rlsys.cluster.network import address_towards, answers
from rlsys.cluster.runtime import RANK
from rlsys.config.schema import RunConfig
from rlsys.errors import RunError

LOOK_S = 1.0  # Between two looks at the head.
LOST_S = 20.0  # The head is lost when it has answered nothing for so long.
FAREWELL_S = 90.0
"""For a head that was told to end at the same time, as by Slurm, to close the run, which needs this machine."""


async def work(role: Role, config: RunConfig, wait_s: float, notify: Notify) -> Ending:
    """Be a part of the head's cluster until the run has ended, and return how it did.

    Raises RunError if the head does not come within `wait_s` seconds, or is lost; UserError without Ray's token.
    """
    notify(f"node {role.rank} waits for the head at {role.host}:{role.port}")
    address = await _await_head(role, wait_s)
    joining = ["--address", f"{role.host}:{role.port}", "--node-ip-address", address]
    # With a home that all machines share, the head has made the token by now.
    os.environ.update(require_token(os.environ, make=False))
    with ray_node(joining, config, f"{RANK}{role.rank}", alone=False) as node:
        notify(f"node {role.rank} joins the head as {address}")
        ending = await _stay(role, node, notify)
    notify(f"node {role.rank} leaves: {ending.sentence}")
    return ending


async def _await_head(role: Role, wait_s: float) -> str:
    """This machine's address on the way to the head, once that answers."""
    until = time.monotonic() + wait_s
    problem = "nothing listens there"
    while True:
        try:
            address = await asyncio.to_thread(address_towards, role.host)
            if await asyncio.to_thread(answers, role.host, role.port, LOOK_S):
                return address
            problem = "nothing listens there"
        except OSError as error:  # The name may be known later, as a pod's is.
            problem = str(error)
        if time.monotonic() > until:
            raise RunError(
                f"node {role.rank} waited {wait_s:.0f} s for the head at {role.host}:{role.port} ({problem}): start "
                "`rlsys launch --rank 0` there, and see that this machine can reach it."
            )
        await asyncio.sleep(LOOK_S)


async def _stay(role: Role, node: RayNode, notify: Notify) -> Ending:
    """Wait until the head says how the run ended, or is lost.

    SIGTERM does not end it before the head has had its time; a second one does, and Ctrl-C.
    """
    heard, leave = time.monotonic(), float("inf")
    task = asyncio.current_task()
    assert task is not None

    def asked() -> None:
        nonlocal leave
        if leave < float("inf"):
            task.cancel()
            return
        leave = time.monotonic() + FAREWELL_S
        notify(f"node {role.rank} leaves when the head has closed the run, within {FAREWELL_S:.0f} s")

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked)
    while True:
        if ending := node.ending():
            return ending
        if time.monotonic() > leave:
            raise asyncio.CancelledError
        if await asyncio.to_thread(answers, role.host, role.port, LOOK_S):
            heard = time.monotonic()
        elif time.monotonic() - heard > LOST_S:
            raise RunError(
                f"the head at {role.host}:{role.port} is lost: it has answered nothing for {LOST_S:.0f} s. All of "
                f"the run on node {role.rank} has been ended."
            )
        node.require_alive()
        await asyncio.sleep(LOOK_S)
