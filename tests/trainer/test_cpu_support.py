"""Megatron-core runs without CUDA, or the start says what is not as expected."""

from __future__ import annotations

from types import ModuleType

import pytest

from rlsys.trainer import cpu_support
from tests.support.megatron_processes import Group, fresh, on_ranks

SOURCE = """
import torch
from functools import wraps

def decorated(function):
    @wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper

class Layer:
    def make(self):
        return [torch.zeros(2, device="cuda") for _ in range(1)][0]

    @property
    def device(self):
        return torch.cuda.current_device()

@decorated
def convert(values):
    return values.cuda().type("torch.cuda.FloatTensor")

def other():
    return "about cuda"
"""


def _module() -> ModuleType:
    module = ModuleType("pretend.megatron")
    exec(SOURCE, vars(module))
    return module


def test_functions_methods_properties_and_comprehensions_are_retargeted() -> None:
    module = _module()
    cpu_support.retarget(module, frozenset({"Layer.make", "convert"}))
    layer = module.Layer()
    assert layer.make().device.type == "cpu"
    assert layer.device == "cpu"
    assert module.convert(layer.make()).type() == "torch.FloatTensor"
    assert module.other() == "about cuda"
    # A second call finds what the first one changed.
    cpu_support.retarget(module, frozenset({"Layer.make", "convert"}))


@pytest.mark.parametrize("gone", ["Layer.build", "other"])
def test_a_function_that_is_gone_or_no_longer_names_a_device_is_an_error(gone: str) -> None:
    with pytest.raises(cpu_support.UnsupportedMegatron, match=rf"pretend\.megatron has no {gone}"):
        cpu_support.retarget(_module(), frozenset({gone}))


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
