"""A measurement is of the right size, and leaves nothing behind."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from rlsys.weights import transport
from rlsys.weights.transport import copy_gb_s


def test_a_gpu_has_its_memory_back_when_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors in host memory stand for a GPU's: they are gone before torch's cache is emptied."""
    events: list[str] = []
    ones = torch.ones
    made: list[weakref.ref[torch.Tensor]] = []

    def on_cpu(size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert device.type == "cuda"
        tensor = ones(size, dtype=dtype)
        made.append(weakref.ref(tensor))
        return tensor

    def empty_cache() -> None:
        events.append("empty_cache")
        assert [one() for one in made] == [None, None]

    fake: dict[str, Any] = {"synchronize": lambda _: events.append("wait"), "empty_cache": empty_cache}
    for name, call in fake.items():
        monkeypatch.setattr(torch.cuda, name, call)
    monkeypatch.setattr(transport.torch, "ones", on_cpu)
    assert copy_gb_s(1000, torch.device("cuda", 0)) > 0
    assert events == ["wait"] * transport.COPY_ROUNDS + ["empty_cache"]
