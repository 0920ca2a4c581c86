"""Writes the memory tables of docs/memory.md: `python scripts/memory_tables.py`. One table shows the host memory of all
experiments on GPUs, and one table per experiment the memory of its devices.

Model shapes come from configs/model/shapes, from the folder named like the experiment's `model.path` in lower case, so
that no model has to be present.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

from rlsys.apps.planner.answer import shape_of
from rlsys.cluster.planning.resolve import make_plan
from rlsys.config.compose import PROJECT_CONFIGS, load_config
from rlsys.config.schema import Device, RunConfig

PAGE = PROJECT_CONFIGS.parent / "docs" / "memory.md"
_BEGIN, _END = "<!-- tables: begin -->", "<!-- tables: end -->"
_COLUMNS = {
    "runtime": "runtime",
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimiser",
    "reference": "reference",
    "activations": "activations",
    "logits": "logits",
    "backward": "backward",
    "step": "step",
    "weight_sync": "sync",
    "kv_cache": "KV cache",
    "graphs": "graphs",
}
"""Memory part of `rlsys.cluster.planning.memory` -> its column heading."""


@cache
def gpu_experiments() -> tuple[RunConfig, ...]:
    """Return the experiments that run on GPUs, sorted by name; do not change them. `model.path` is the folder of the
    model's shape."""
    configs = [load_config(file.stem) for file in sorted(PROJECT_CONFIGS.glob("*.yaml"))]
    found = tuple(config for config in configs if config.cluster.device is Device.gpu)
    for config in found:
        config.model.path = str(shape_of(config.model.path))
    return found


def tables() -> str:
    of_devices = (line for config in gpu_experiments() for line in _table(config))
    return "\n".join(chain(_host_table(), of_devices))


def with_tables(page: str) -> str:
    """Return `page` with the current tables between its two marks."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{tables()}{_END}{after}"


def _host_table() -> Iterator[str]:
    yield "### Host memory\n"
    yield "GiB of the machine that needs most.\n"
    parts = ("pinned", "staged", "pushed", "buckets", "saved", "shared")
    yield f"| experiment | {' | '.join(parts)} |"
    yield "| --- " * (len(parts) + 1) + "|"
    for config in gpu_experiments():
        needs = make_plan(config)["host_gib"]
        yield f"| {config.name} | {' | '.join(f'{needs[part]:.0f}' if part in needs else '' for part in parts)} |"
    yield ""


def _table(config: RunConfig) -> Iterator[str]:
    plan = make_plan(config)
    cluster = config.cluster
    devices = f"{plan['world_size']} devices"
    if cluster.device_memory_gib is not None:
        devices += f" of {cluster.device_memory_gib:g} GB"
    yield f"### {config.name}\n"
    recompute = "activations recomputed" if config.model.recompute else "no recomputation"
    yield f"{Path(config.model.path).name}, {devices}, {cluster.mode}, {recompute}.\n"
    used = [part for part in _COLUMNS if any(part in group["memory_gib"] for group in plan["groups"].values())]
    yield (
        "| GiB of a rank | ranks | tp pp cp ep dp | " + " | ".join(_COLUMNS[part] for part in used) + " | **fullest** |"
    )
    yield "| --- " * (len(used) + 4) + "|"
    for name, group in plan["groups"].items():
        cut = " ".join(str(group.get(size, "-")) for size in ("tp", "pp", "cp", "ep", "dp"))
        sizes = (f"{group['memory_gib'][part]:.1f}" if part in group["memory_gib"] else "" for part in used)
        cells = [name, str(len(group["ranks"])), cut, *sizes, f"**{group['memory_gib_per_rank']:.1f}**"]
        yield f"| {' | '.join(cells)} |"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
