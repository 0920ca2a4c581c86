"""Stand-in for SGLang's CUDA kernels: imported on the CPU path, never called there."""

from rlsys.rollout.cpu_standins import absent

__getattr__ = absent(__name__)
