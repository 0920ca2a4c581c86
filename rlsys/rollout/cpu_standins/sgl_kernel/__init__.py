"""Stand-in for SGLang's CUDA kernels, which SGLang imports but never calls without a GPU."""

from rlsys.rollout.cpu_standins import absent

__getattr__ = absent(__name__)
