"""Writes the memory tables of docs/memory.md, one for every experiment on GPUs: `python scripts/memory_tables.py`.

Model shapes come from configs/model/shapes, from the folder named like the experiment's `model.path` in lower case, so
that no model has to be present.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlsys.cluster.planning.plan import make_plan
from rlsys.config.compose import PROJECT_CONFIGS, load_config
from rlsys.config.schema import Device, RunConfig
from rlsys.errors import UserError

SHAPES = PROJECT_CONFIGS / "model" / "shapes"
PAGE = PROJECT_CONFIGS.parent / "docs" / "memory.md"
_BEGIN, _END = "<!-- tables: begin -->", "<!-- tables: end -->"
_COLUMNS = {
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
}
"""Memory part of `rlsys.cluster.planning.plan` -> its column heading."""


def gpu_experiments(folder: Path = PROJECT_CONFIGS) -> Iterator[RunConfig]:
    """Yield the experiments of `folder` that run on GPUs, sorted by name. `model.path` is the folder of the model's
    shape."""
    for file in sorted(folder.glob("*.yaml")):
        config = load_config(file.stem, config_dir=folder)
        if config.cluster.device is Device.gpu:
            config.model.path = str(shape_of(config.model.path))
            yield config


def shape_of(model_path: str) -> Path:
    """Return the folder with the shape of the model `model_path`. Raises UserError if there is none."""
    folder = SHAPES / Path(model_path).name.lower()
    # A base model has the shape of its instruct model.
    for found in (folder, folder.with_name(f"{folder.name}-instruct")):
        if found.is_dir():
            return found
    known = ", ".join(sorted(path.name for path in SHAPES.iterdir()))
    raise UserError(
        f"model.path is {model_path}, whose shape is not among {known}: add {folder}/config.json.",
        code="unknown",
        key="model.path",
    )


def tables() -> str:
    """Return all tables, as Markdown."""
    return "\n".join(line for config in gpu_experiments() for line in _table(config))


def with_tables(page: str) -> str:
    """Return `page` with the current tables between its two marks."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{tables()}{_END}{after}"


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
