"""Writes the table of splits in docs/scale.md, a row for every experiment on GPUs: `python scripts/split_tables.py`."""

from __future__ import annotations

from collections.abc import Iterator

from rlsys.cluster.planning.cost import DEVICE, EXPECTED, StepCost
from rlsys.config.compose import PROJECT_CONFIGS
from rlsys.config.derived import scoring_forwards
from rlsys.weights.weight_map import read_architecture
from scripts.memory_tables import gpu_experiments

PAGE = PROJECT_CONFIGS.parent / "docs" / "scale.md"
_BEGIN, _END = "<!-- splits: begin -->", "<!-- splits: end -->"


def table() -> str:
    """Return the table, as Markdown."""
    return "\n".join(_lines())


def with_table(page: str) -> str:
    """Return `page` with the current table between its two marks."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{table()}\n{_END}{after}"


def _lines() -> Iterator[str]:
    yield f"| experiment | devices | forward pass | training | inference | rollout | a step on {DEVICE} |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for config in gpu_experiments():
        cost = StepCost(config, read_architecture(config.model.path, config.model.family))
        stages, passes = cost.stages(), cost.training_passes()
        held = [len(cost.ranks[group]) for group in ("actor", "inference", "rollout")]
        trained = f"{passes['actor']} x" + (f", critic {passes['critic']} x" if "critic" in passes else "")
        engines = f"{cost.engines} x {cost.requests / cost.decode_s(cost.requests) / 1000:.1f} k tokens/s"
        cells = [
            f"`{config.name}`",
            " / ".join(map(str, held)) if len({*cost.ranks.values()}) > 1 else f"all on {held[0]}",
            f"{cost.pass_flops(EXPECTED.generated) / 1e15:.1f} PFLOP",
            f"{trained}: {stages.training:.0f} s",
            f"{scoring_forwards(config.algorithm)} x: {stages.inference:.0f} s",
            f"{engines}: {stages.rollout:.0f} s",
            f"**{stages.of_step(config.cluster.mode):.0f} s**",
        ]
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
