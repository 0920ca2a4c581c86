"""Stand-in for the torchvision module of this name; see `rlsys.rollout.sglang_cpu`."""

from enum import Enum


class InterpolationMode(Enum):
    """Interpolation modes to which image processors refer when they are imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
