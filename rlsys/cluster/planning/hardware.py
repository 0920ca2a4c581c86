"""Speeds of devices, and the shares of them that programs reach: the one table for every prediction of seconds.

`hardware.yaml` has the data sheets and `reached.yaml` the shares, each with its source. `rlsys train --dry-run` and
`rlsys plan` both read them here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from rlsys.observe.spans import PEAK_TFLOPS

REACHED_FILE = Path(__file__).with_name("reached.yaml")


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """Speeds of one device, from the vendor's data sheet."""

    flops: float  # Dense bfloat16 operations per second.
    memory: float  # Bytes per second from and to its memory.
    link: float  # Bytes per second to other devices of the machine, in one direction.
    network: float  # Bytes per second to another machine.
    host: float  # Bytes per second from and to the host's memory.
    memory_gib: float
    per_machine: int  # Devices that the links connect.
    source: str


def _speed(name: str, sheet: dict[str, Any]) -> DeviceSpeed:
    tflops: float = sheet["tflops"] if "tflops" in sheet else PEAK_TFLOPS[name]
    return DeviceSpeed(
        flops=tflops * 1e12,
        memory=sheet["memory_tb_s"] * 1e12,
        link=sheet["link_gb_s"] * 1e9,
        network=sheet["network_gb_s"] * 1e9,
        host=sheet["host_gb_s"] * 1e9,
        memory_gib=sheet["memory_gib"],
        per_machine=sheet["per_machine"],
        source=sheet["source"],
    )


DEVICE = "H100"
"""Device of the estimates; the experiments state GPUs of 80 GB."""
SPEEDS = {
    name: _speed(name, sheet)
    for name, sheet in yaml.safe_load(Path(__file__).with_name("hardware.yaml").read_text(encoding="utf-8")).items()
}
"""Device name -> speeds."""


@dataclass(frozen=True, slots=True)
class Reached:
    """Shares of the data sheets' speeds that programs reach, and times that no data sheet has."""

    compute: float
    """Share of the peak in matrix products."""
    memory: float
    """Share of the memory's bandwidth."""
    link: float
    """Share of links and network in collectives."""
    sync_link: float
    """Share of links and network in a weight sync, and of the host's link."""
    exchange_s: float
    """Latency of one exchange between the ranks of an engine; a decode step has two in each layer."""
    layer_s: float
    """Seconds of a layer in one pass of a micro-batch, whatever its tokens: launches of kernels."""
    expert_layer_s: float
    """The same of a layer with experts, besides: routing, and the start of the exchange between experts."""
    call_s: float
    """Seconds of a call of a Megatron group, besides its micro-batches."""
    expert_compute: float
    """Share of `compute` that a mixture of experts reaches: its products are small, and its devices unequally loaded."""
    activation_reads: float
    """Times that a pass moves a token's residual stream through memory, per layer; each expert gets a copy of its own."""
    decode_layer_s: float
    """Seconds of a layer in a decode step, besides its reads and products: launches and latencies."""
    decode_expert_s: float
    """The same of a layer with experts, besides."""
    request_s: float
    """Seconds of a request in a decode step besides its products: sampling and the host's work."""
    step_s: float
    """Seconds of a step in which only the driver works: records, hand-over, start."""


def read_reached() -> tuple[Reached, str]:
    """Return the shares of `reached.yaml`, and their source."""
    content = yaml.safe_load(REACHED_FILE.read_text(encoding="utf-8"))
    return Reached(**{field.name: float(content["values"][field.name]) for field in fields(Reached)}), content["source"]


REACHED, REACHED_SOURCE = read_reached()
