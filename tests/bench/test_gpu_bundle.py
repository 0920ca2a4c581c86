"""Tests that the bundles of `python -m bench.gpu --bundle` hold what their parts need."""

from __future__ import annotations

from bench.gpu import bundle
from bench.gpu.part import COMMON, PARTS


def test_a_package_that_is_there_is_left_out_with_what_only_it_requires() -> None:
    """megatron-core requires torch, numpy and packaging; torch requires CUDA's libraries."""
    assert set(bundle.needed(["megatron-core"], {"torch", "numpy"})) == {"megatron-core", "packaging"}
    whole = bundle.needed(["megatron-core"], ())
    assert {"torch", "triton", "nvidia-cudnn-cu13", "sympy", "mpmath"} < set(whole)
    assert whole["megatron-core"] == "0.16.1"


def test_every_part_names_packages_that_are_pinned() -> None:
    for part in PARTS.values():
        names = {*COMMON, *part.packages, *part.on_gpu, *part.more}
        assert names <= set(bundle.needed(names, ()))
