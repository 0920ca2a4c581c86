"""Looks at a Ray cluster from a process of its own, which is ended when it takes too long.

Ray tries for minutes to join a cluster that is silent or that wants another token, and cannot be told not to. As a
command (`python -m rlsys.cluster.look ADDRESS`) it joins, prints what it sees as JSON, and leaves.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from typing import Any

import ray

from rlsys.errors import RunError

_REFUSED = "InvalidAuthToken"


def cluster_at(address: str, timeout_s: float) -> dict[str, Any]:
    """`nodes`, each with `address` and `resources`, and what is `free` of those in all.

    Raises RunError with one phrase where this machine cannot join within `timeout_s`.
    """
    command = [sys.executable, "-m", "rlsys.cluster.look", address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    try:
        out, complaints = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        _, complaints = process.communicate()
        out = ""
    if _REFUSED in complaints:
        raise RunError("the cluster wants a token: export RAY_AUTH_MODE as on the machine that started it")
    if process.returncode == 0:
        seen: dict[str, Any] = json.loads(out)
        return seen
    said = complaints.strip().splitlines()
    if process.returncode < 0 or not said:
        raise RunError(f"it did not let this machine join within {timeout_s:g} s")
    raise RunError(said[-1].rstrip("."))


def _look(address: str) -> dict[str, Any]:
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    alive = [node for node in ray.nodes() if node["Alive"]]
    return {
        "nodes": [{"address": node["NodeManagerAddress"], "resources": node["Resources"]} for node in alive],
        "free": ray.available_resources(),
    }


if __name__ == "__main__":
    print(json.dumps(_look(sys.argv[1])))
