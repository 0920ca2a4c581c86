"""Stand-in, see the package."""

from rlsys.rollout.cpu_standins.absent import absent

__getattr__ = absent(__name__)
