"""Stand-in, see the package."""

from enum import Enum


class InterpolationMode(Enum):
    """Named at import time by image processors."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
