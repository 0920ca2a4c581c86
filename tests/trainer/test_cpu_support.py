"""Megatron-core runs without CUDA, or the start says what is not as expected."""

from __future__ import annotations

import pytest

from rlsys.trainer import cpu_support
from tests.support.megatron_processes import Group, fresh, on_ranks


def _on_the_real_megatron(_: Group) -> None:
    import torch
    from megatron.core.pipeline_parallel import schedules

    function = schedules.forward_backward_no_pipelining
    before = function.__code__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        cpu_support.enable()
        assert function.__code__ is before, "nothing may change where CUDA is"
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(schedules, "forward_backward_no_pipelining")
        with pytest.raises(cpu_support.UnsupportedMegatron, match="forward_backward_no_pipelining"):
            cpu_support.enable()
    cpu_support.enable()
    cpu_support.enable()
    assert "cuda" in before.co_consts
    assert "cuda" not in function.__code__.co_consts


def test_an_unexpected_megatron_is_refused_and_cuda_left_alone() -> None:
    with fresh(1) as hosts:
        on_ranks(_on_the_real_megatron, 1, hosts=hosts)
