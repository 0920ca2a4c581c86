"""Stand-in, see the package."""

from rlsys.rollout.cpu_standins import absent

__getattr__ = absent(__name__)
