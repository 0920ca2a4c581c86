"""Ray worker groups and placement, multi-machine launch, planning, and preflight checks.

`launch/` starts a run on several machines, `planning/` estimates memory and time and checks that a config fits its
hardware, `preflight/` checks the machine before a run. Only this package imports ray. Process: the driver, the launcher's
agents, and the shell of every worker process. May import: rollout, search, observe, weights, data, algorithms, config,
errors, files.

Ray listens on every network interface unless `LOOPBACK_VARIABLE` is 0 when ray is imported. This package sets it to 0
before any of its modules imports ray; `rlsys.cluster.launch.ray_node` sets it to 1 for a Ray of several machines. Joining
a running cluster is not affected.

Without a Ray, most functions of ray start one, unless RAY_ENABLE_AUTO_CONNECT is 0 when ray is imported. So a run whose
Ray is gone would start another one while it ends. This package sets it to 0; such a call then fails.
"""

import os

LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Environment variable; 0 restricts a Ray started here to the loopback interface, on Linux too."""

os.environ.setdefault(LOOPBACK_VARIABLE, "0")
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
