"""What the actor's devices could compute, and what they did."""

from __future__ import annotations

import pytest

from rlsys.observe.spans import Span, batch_figures, peak_flops, utilisation_figures


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L40", 181.05),
        ("NVIDIA L4", 121.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
    ],
)
def test_a_device_is_known_by_the_words_of_its_name(name: str, tflops: float) -> None:
    assert peak_flops([name]) == pytest.approx(tflops * 1e12)


def test_peaks_add_up_and_one_unknown_device_makes_all_unknown() -> None:
    assert peak_flops(["NVIDIA H100 PCIe", "NVIDIA L4"]) == pytest.approx((756 + 121) * 1e12)
    assert peak_flops(["NVIDIA H100 PCIe", "cpu"]) is None
    assert peak_flops(["NVIDIA A10G"]) is None, "another device than the A10"
    assert peak_flops([]) is None


def test_the_rate_is_known_without_a_peak_the_share_is_not() -> None:
    assert utilisation_figures(6e12, 2.0, None) == {"perf/actor_tflops": 3.0}
    assert utilisation_figures(6e12, 2.0, 12e12) == {"perf/actor_tflops": 3.0, "mfu/actor": 0.25}
    assert utilisation_figures(6e12, 0.0, 12e12) == {}


def call(group: str, end_ns: int, tokens: int, room: int, budget: int) -> Span:
    args = {"tokens": tokens, "room": room, "budget": budget}
    return Span("train.accumulate", 0, end_ns, group, "main", args)


def test_micro_batches_are_as_full_as_all_calls_that_ended_in_the_window() -> None:
    spans = [
        call("actor", 10, 999, 999, 999),  # at the window's begin: of the step before
        call("actor", 11, 30, 40, 100),
        call("actor", 20, 50, 60, 100),
        call("actor", 21, 999, 999, 999),
        call("inference", 15, 120, 120, 100),  # one sample that exceeds the budget
        Span("train.apply", 11, 12, "critic", "main", {}),
    ]
    assert batch_figures(spans, (10, 20)) == pytest.approx(
        {
            "batch/fill/actor": 0.4,
            "batch/padding/actor": 0.2,
            "batch/fill/inference": 1.2,
            "batch/padding/inference": 0.0,
        }
    )
