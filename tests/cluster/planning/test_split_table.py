"""Tests every figure of the table of splits in docs/scale.md against the formulas of that page, worked out here from the
model's config.json and the config's plain values.

Nothing of `cost`, `splits` or `flops` is called: a mistake in one of them cannot also be in the expected figures.
"""

from __future__ import annotations

import json
import re
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlsys.config.schema import RunConfig
from scripts.memory_tables import gpu_experiments
from scripts.split_tables import PAGE

REACHED = yaml.safe_load(Path("rlsys/cluster/planning/reached.yaml").read_text())["values"]
PEAK, BANDWIDTH = REACHED["compute"] * 989e12, REACHED["memory"] * 3.35e12
LINK, NETWORK = REACHED["link"] * 450e9, REACHED["link"] * 50e9
"""Speeds that an H100 reaches: its data sheet times the shares in REACHED; NETWORK is one port of 400 Gbit/s."""
PROMPT, FOUND, SAID = 200, 850, 350
TOKENS = PROMPT + FOUND + SAID
CONTEXT = PROMPT + (FOUND + SAID) / 2
"""Mean tokens in the cache of an episode while it runs."""
CONFIGS = {config.name: config for config in gpu_experiments()}


class Worked:
    """The figures of one experiment."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        shape: dict[str, Any] = json.loads((Path(config.model.path) / "config.json").read_text())
        self.layers, self.hidden, vocab = (shape[key] for key in ("num_hidden_layers", "hidden_size", "vocab_size"))
        size = shape.get("head_dim") or self.hidden // shape["num_attention_heads"]
        queries, self.heads = shape["num_attention_heads"] * size, shape["num_key_value_heads"]
        self.size, self.keys, self.active = size, self.heads * size, shape.get("num_experts_per_tok", 0)
        ffn = shape.get("moe_intermediate_size", 0) or shape["intermediate_size"]
        attention = self.hidden * (2 * queries + 2 * self.keys)
        experts, mlp = shape.get("num_experts", 1), 3 * self.hidden * ffn
        self.peak = PEAK * (REACHED["expert_compute"] if self.active else 1)
        self.routed = 2 * self.layers * experts * mlp if self.active else 0
        """Bytes of all experts."""
        self.share = self.active / experts
        embeddings = (1 if shape["tie_word_embeddings"] else 2) * vocab * self.hidden
        self.weights = embeddings + self.layers * (
            attention + experts * mlp
        )  # Without norms, biases, routers: < 0.1 %.
        # A and B of q and o, of k and v, and of gate, up and down.
        pairs = 2 * (self.hidden + queries) + 2 * (self.hidden + self.keys) + 3 * (self.hidden + ffn)
        self.adapters = self.layers * config.model.lora.rank * pairs
        self.per_token = 2 * self.layers * (attention + max(1, self.active) * mlp)
        self.logits = 2 * self.hidden * vocab
        self.squares = 2 * self.layers * queries
        self.episodes = config.trainer.prompts_per_step * config.algorithm.n_samples

    def forward(self, targets: int) -> float:
        """Operations of a forward pass over the episodes of a step."""
        return self.episodes * (self.per_token * TOKENS + self.logits * targets + self.squares * TOKENS**2)

    def ranks(self, group: str) -> range:
        first, _, last = self.config.cluster.placement[group].partition("-")
        return range(int(first), int(last or first) + 1)

    def link(self, ranks: range, size: int) -> float:
        machine = self.config.cluster.devices_per_node
        assert machine
        starts = range(ranks.start, ranks.stop, size)
        return LINK if all(start // machine == (start + size - 1) // machine for start in starts) else NETWORK

    def exchanged(self, ranks: range, tp: int, pp: int = 1, cp: int = 1, ep: int = 1) -> float:
        """Seconds per token of a pass; bfloat16 has two bytes."""
        stream, keys = 2 * self.hidden, 2 * 2 * self.keys / tp
        each = 4 * (tp - 1) / tp * stream / self.link(ranks, tp) + (cp - 1) * keys / self.link(ranks, tp * cp)
        each += 2 * (ep - 1) / ep * self.active * stream / tp / self.link(ranks, ep)
        return each * self.layers / pp

    def passes(self, group: str, forwards: int, exchanges: int, targets: int, updates: int) -> float:
        """Seconds of a Megatron group's passes; a critic has the devices and sizes of the actor."""
        settings, ranks = getattr(self.config, group), self.ranks("actor" if group == "critic" else group)
        tp, pp, cp, ep = (getattr(settings.parallel, name) for name in ("tp", "pp", "cp", "ep"))
        devices, tokens = len(ranks), self.episodes * TOKENS
        copies = devices // (tp * pp * cp)
        seconds = forwards * self.forward(targets) / (devices * self.peak)
        moved = REACHED["activation_reads"] * (1 + self.active) * self.layers * self.hidden * 2
        seconds += forwards * tokens * moved / devices / BANDWIDTH
        seconds += exchanges * tokens / copies / cp * self.exchanged(ranks, tp, pp, cp, ep)
        micro_batches = tokens / copies / settings.micro_batch_tokens
        launch = REACHED["layer_s"] + (REACHED["expert_layer_s"] if self.active else 0)
        seconds += micro_batches * forwards * self.layers / pp * launch
        bubble = min((pp - 1) / pp, sqrt(2 * (pp - 1) * max(1, updates) / micro_batches))
        trained = self.adapters if self.adapters and group == "actor" else self.weights
        held = trained / pp / max(tp, ep)  # Gradients in float32, and weights in bfloat16.
        copies *= cp
        applied = (copies - 1) / copies * held * (4 + 2) / self.link(ranks, devices // pp)
        applied += REACHED["call_s"] + 34 * trained / devices / BANDWIDTH
        return seconds * (1 + bubble) + updates * applied

    def inference(self) -> float:
        return self.passes("inference", 2, 2, SAID, 0)

    @property
    def actor_passes(self) -> int:
        """Forward passes' worth of operations; the weights beside adapters have no gradients."""
        return 2 if self.config.model.lora.rank else 3

    def training(self, again: int) -> float:
        updates = self.config.trainer.mini_batches
        seconds = self.passes("actor", self.actor_passes + again, 2 + again, SAID, updates)
        if self.config.algorithm.advantage.kind == "gae":
            seconds += self.passes("critic", 3 + again, 2 + again, 0, updates) + self.passes("critic", 1, 1, 0, 0)
        return seconds

    def decode(self, requests: float) -> float:
        """Seconds of a decode step of one engine."""
        tp, ranks = self.config.rollout.engine.tp, self.ranks("rollout")
        layer = REACHED["decode_layer_s"] + (REACHED["decode_expert_s"] if self.active else 0)
        layer += 2 * REACHED["exchange_s"] if tp > 1 else 0
        used = (2 * self.weights - self.routed) + self.routed * (1 - (1 - self.share) ** requests)
        products = requests * (self.per_token + self.logits) / (tp * self.peak)
        cache = requests * CONTEXT * self.layers * 2 * max(1, self.heads // tp) * self.size * 2 / BANDWIDTH
        each = self.exchanged(ranks, tp) + REACHED["request_s"]
        return self.layers * layer + max(used / tp / BANDWIDTH, products) + cache + requests * each

    @property
    def engines(self) -> int:
        return len(self.ranks("rollout")) // self.config.rollout.engine.tp

    @property
    def requests(self) -> float:
        return min(self.config.rollout.max_episodes, self.episodes / self.engines)

    def rollout(self) -> float:
        tp, task, share = self.config.rollout.engine.tp, self.config.task, self.episodes / self.engines
        new = FOUND + PROMPT / self.config.algorithm.n_samples
        per_token = (self.per_token + self.squares * TOKENS) / (tp * self.peak) + self.exchanged(
            self.ranks("rollout"), tp
        )
        last = (task.max_turns + 1) * task.max_turn_tokens - SAID
        return (
            share * SAID / self.requests * self.decode(self.requests) + share * new * per_token + last * self.decode(1)
        )


def rows() -> dict[str, list[str]]:
    """Return experiment -> cells of its row, without the marks of bold."""
    lines = re.findall(r"^\| `(\w[\w.]+)` \|(.*)\|$", PAGE.read_text().partition("<!-- splits: begin -->")[2], re.M)
    return {name: [cell.strip().replace("*", "") for cell in cells.split(" | ")] for name, cells in lines}


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_row_of_the_table_is_the_arithmetic_of_the_page(name: str) -> None:
    worked, config = Worked(CONFIGS[name]), CONFIGS[name]
    devices, inference, *training, rollout, step = rows()[name]
    held = [len(worked.ranks(group)) for group in ("actor", "inference", "rollout")]
    colocated = config.cluster.mode == "colocated"
    assert devices == (f"all on {held[0]}" if colocated else " / ".join(map(str, held)))
    stages = [worked.inference(), worked.training(config.model.recompute), worked.rollout()]
    rate = worked.requests / worked.decode(worked.requests) / 1000
    assert_figures(inference, *[(worked.forward(SAID) / 1e15, 0.05)] * 2, (stages[0], 0.5))
    critic = config.algorithm.advantage.kind == "gae"
    for again, cell in enumerate(training):
        counted = [(passes + again, 0.0) for passes in ((worked.actor_passes, 4) if critic else (worked.actor_passes,))]
        assert_figures(cell, *counted, (worked.training(again), 0.5))
    assert_figures(rollout, (worked.engines, 0.0), (rate, 0.05), (stages[2], 0.5))
    assert_figures(step, (sum(stages) if colocated else max(stages), 0.5))


def assert_figures(cell: str, *expected: tuple[float, float]) -> None:
    """Check the numbers of `cell`: each is within its rounding, and 0.1 % for the parameters that are left out."""
    found = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", cell)]
    assert len(found) == len(expected), cell
    for number, (value, rounding) in zip(found, expected, strict=True):
        assert abs(number - value) <= rounding + 0.001 * value, f"{number} instead of {value:.4g} in {cell!r}"
