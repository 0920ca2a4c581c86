"""Writes the table of splits in docs/scale.md, a row for every experiment on GPUs: `python -m scripts.split_tables`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlsys.cluster.planning.cost import StepCost
from rlsys.cluster.planning.hardware import DEVICE
from rlsys.cluster.planning.work import EXPECTED
from rlsys.config.compose import PROJECT_CONFIGS
from rlsys.config.derived import scoring_forwards
from rlsys.config.schema import RunConfig
from rlsys.weights.weight_map import Architecture, read_architecture
from scripts.memory_tables import gpu_experiments

PAGE = PROJECT_CONFIGS.parent / "docs" / "scale.md"
_BEGIN, _END = "<!-- splits: begin -->", "<!-- splits: end -->"


def table() -> str:
    return "\n".join(_lines())


def with_table(page: str) -> str:
    """Return `page` with the current table between its two marks."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{table()}\n{_END}{after}"


def _lines() -> Iterator[str]:
    yield (
        "| experiment | devices | inference: policy + reference | training | training, recomputed | rollout "
        f"| a step on {DEVICE} |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for config in gpu_experiments():
        cost = StepCost(config, read_architecture(config.model.path, config.model.family))
        stages, forward = cost.stages(), f"{cost.pass_flops(EXPECTED.generated) / 1e15:.1f}"
        held = [len(cost.ranks[group]) for group in ("actor", "inference", "rollout")]
        engines = f"{cost.engines} x {cost.requests / cost.decode_s(cost.requests) / 1000:.1f} k tokens/s"
        cells = [
            f"`{config.name}`",
            " / ".join(map(str, held)) if len({*cost.ranks.values()}) > 1 else f"all on {held[0]}",
            f"{' + '.join([forward] * scoring_forwards(config.algorithm))} PFLOP: {stages.inference:.0f} s",
            *(_training(config, cost.model, recompute) for recompute in (False, True)),
            f"{engines}: {stages.rollout:.0f} s",
            f"**{stages.of_step(config.cluster.mode):.0f} s**",
        ]
        yield f"| {' | '.join(cells)} |"


def _training(config: RunConfig, model: Architecture, recompute: bool) -> str:
    """Return the cell of training with activations recomputed or kept; bold if the experiment trains so."""
    cost = StepCost(replace(config, model=replace(config.model, recompute=recompute)), model)
    passes, seconds = cost.training_passes(), f"{cost.training_s():.0f} s"
    took = f"{passes['actor']} x" + (f", critic {passes['critic']} x" if "critic" in passes else "")
    return f"{took}: {f'**{seconds}**' if recompute is config.model.recompute else seconds}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
