"""Ray: processes on this machine and on others, what starts them and what ends them.

Ray listens on every network interface, unless it is told before it is imported that it serves this machine alone. That
is said here, before any module of this package imports it; `rlsys.launch.ray_node` says otherwise to a Ray of several
machines. Joining a cluster is not affected.
"""

import os

LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""With 0, a Ray that is started here listens on the loopback interface alone, on Linux too."""

os.environ.setdefault(LOOPBACK_VARIABLE, "0")
