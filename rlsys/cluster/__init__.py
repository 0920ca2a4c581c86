"""Ray: worker groups and their placement, launching on machines, planning, and the checks before a start.

`launch/` brings machines together, `planning/` says whether a config fits its hardware, `preflight/` looks at the machine.
Only this room imports ray. Process: the driver, the launcher's agents, and the shell of every worker process. May import:
rollout, search, observe, weights, data, config, errors, files.

Ray listens on every network interface, unless it is told before it is imported that it serves this machine alone. That
is said here, before any module of this package imports it; `rlsys.cluster.launch.ray_node` says otherwise to a Ray of several
machines. Joining a cluster is not affected.
"""

import os

LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""With 0, a Ray that is started here listens on the loopback interface alone, on Linux too."""

os.environ.setdefault(LOOPBACK_VARIABLE, "0")
