"""Stand-in for the torchvision module of this name; see `rlsys.rollout.sglang_cpu`."""

from rlsys.rollout.cpu_standins import absent

__getattr__ = absent(__name__)
