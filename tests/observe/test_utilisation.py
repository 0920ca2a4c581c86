"""What the actor's devices could compute, and what they did."""

from __future__ import annotations

import pytest

from rlsys.observe.utilisation import peak_flops, utilisation_figures


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
