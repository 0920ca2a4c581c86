"""How much of what the devices could compute they did, and how full the micro-batches were. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from rlsys.observe.spans import Interval, Span

PEAK_TFLOPS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("B100", 1750.0),
    ("GH200", 989.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("H100 NVL", 835.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("H800 PCIe", 756.0),
    ("H800", 989.0),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10", 125.0),
    ("RTX A6000", 154.8),
    ("L40S", 362.05),
    ("L40", 181.05),
    ("L20", 119.5),
    ("L4", 121.0),
)
"""Words of a device's name -> its peak at dense bfloat16 matrices, in 10^12 operations a second. From the vendors' data
sheets, whose figures with sparsity are halved. The first whose words are all in the name counts."""


def peak_flops(device_names: Iterable[str]) -> float | None:
    """Dense bfloat16 operations a second of these devices together, by the names that their drivers give.

    None if one of them is not in the table, as a CPU is not, or if there are none.
    """
    peaks = [_peak_tflops(name) for name in device_names]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) * 1e12 if known and len(known) == len(peaks) else None


def utilisation_figures(flops: float, seconds: float, peak: float | None) -> dict[str, float]:
    """Rate of the actor, and its share of `peak`, over the `seconds` in which it trained; nothing if it did not.

    `flops` are the operations that the model needs, `peak` what all devices of the actor could do in a second; where
    that is not known the share is left out.
    """
    if seconds <= 0:
        return {}
    rate = flops / seconds
    return {"perf/actor_tflops": rate / 1e12, **({"mfu/actor": rate / peak} if peak else {})}


def batch_figures(spans: Iterable[Span], window: Interval) -> dict[str, float]:
    """How full the micro-batches were of the calls that ended in `window`, by group, as shares of 1.

    `batch/fill` is tokens of samples to what the token budget allows, which a single sample may exceed; a micro-batch
    without a sample, which keeps a rank in step with the others, is an empty one. `batch/padding` is padding to all that
    was computed. Groups without such a call are absent.
    """
    calls: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if "budget" in span.args and window[0] < span.end_ns <= window[1]:
            calls[span.group].append(span)
    figures: dict[str, float] = {}
    for group, found in sorted(calls.items()):
        tokens, room, budget = (_total(found, name) for name in ("tokens", "room", "budget"))
        figures |= {f"batch/fill/{group}": tokens / budget, f"batch/padding/{group}": 1.0 - tokens / room}
    return figures


def _total(spans: Iterable[Span], name: str) -> float:
    return sum(float(value) for span in spans if isinstance(value := span.args[name], int))


def _peak_tflops(device_name: str) -> float | None:
    words = set(re.findall(r"\w+", device_name.upper()))
    return next((peak for name, peak in PEAK_TFLOPS if words.issuperset(name.upper().split())), None)
