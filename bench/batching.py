"""Compares ways of batching by the actor's tokens per second, padding not counted, over two data-parallel ranks.

    python -m bench.batching          # one thread, one to two minutes

The same trajectories are batched in three ways. No micro-batch has more tokens than `ROWS` of the longest trajectories:

- as they come: a fixed number of rows per micro-batch, padded to the longest row, dealt to the ranks in turn. Search-R1
  trains with 8 rows on a GPU (`ppo_micro_batch_size=64` on 8 GPUs); 4 rows need less padding;
- sorted: rectangles of similar length up to the token budget, balanced by cost;
- packed: sequences one after the other up to the token budget, balanced by cost.

Lengths are log-normal with the mean and the limit of Search-R1's trajectories, divided by `SCALE` for a CPU. The actor
is the real one: Megatron in float32 with the demo's policy, forward and backward. Ranks communicate only to reduce
gradients, so each rank is timed alone, in processor seconds, best of `REPEATS`. The slowest rank sets the time of a
step. The benchmark fails unless all ways give the same gradient norm.
"""

from __future__ import annotations

import json
import logging
import socket
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import isclose, log
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from rlsys.algorithms.losses import policy_loss
from rlsys.config.algorithm import AlgorithmConfig, PpoLoss
from rlsys.config.schema import AdamwConfig, Device, Dtype, Layers, ModelConfig, ParallelConfig
from rlsys.data.trajectory import Finish, Sample, Trajectory
from rlsys.trainer.actor import Actor, Objective
from rlsys.trainer.batches import BatchSharder, MicroBatch, collate
from rlsys.trainer.mesh import Rendezvous, stop
from rlsys.weights.flops import flops_of
from rlsys.weights.weight_map import read_architecture

POLICY = "examples/searchr1/tiny/policy"
RESULT = Path("outputs/bench/batching.json")
SCALE = 8
MEAN, LONGEST, SIGMA = 1200 / SCALE, 7096 // SCALE, 0.8
SAMPLES, RANKS, ROWS, REPEATS = 256, 2, 8, 3
BUDGET = ROWS * LONGEST
TURNS = ((0.2, 0.3), (0.55, 0.65), (0.9, 1.0))
"""Begin and end of each turn's generated tokens, as shares of a trajectory; the rest is prompt and observations."""

Sharded = list[list[MicroBatch]]
"""[data-parallel rank][micro-batch]"""


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    micro_batches: int
    """Micro-batches of the first rank."""
    padding: float
    """Share of padding among all computed tokens."""
    imbalance: float
    """Slowest rank's time divided by the mean time, minus 1."""
    tokens_per_s: float
    gain: float = 1.0
    """Speed divided by the speed of the first way."""


def main() -> None:
    """Measure, print the table and write the result file."""
    torch.set_num_threads(1)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    samples = trajectories(np.random.default_rng(0), read_architecture(POLICY).vocab)
    rows = measure(samples)
    console = Console()
    console.print(table(rows))
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    about = {"samples": SAMPLES, "ranks": RANKS, "budget_tokens": BUDGET, "scale": SCALE}
    RESULT.write_text(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    console.print(f"Written to {RESULT}")


def trajectories(random: np.random.Generator, vocab: int) -> list[Sample]:
    """Return trajectories of random tokens, with the lengths and loss masks of search episodes."""
    samples = []
    while len(samples) < SAMPLES:
        length = round(random.lognormal(log(MEAN) - SIGMA**2 / 2, SIGMA))
        if not 10 <= length <= LONGEST:
            continue
        turn_of_token = np.full(length, -1, dtype=np.int32)
        for turn, (begin, end) in enumerate(TURNS):
            turn_of_token[int(begin * length) : int(end * length)] = turn
        mask = turn_of_token >= 0
        trajectory = Trajectory(
            question_uid="",
            sample=0,
            tokens=random.integers(0, vocab, length).astype(np.int32),
            prompt_length=int(TURNS[0][0] * length),
            loss_mask=mask,
            rollout_logprobs=np.full(length, np.nan, dtype=np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            turn_of_token=turn_of_token,
            tokens_differing=0,
            response="",
            turns=(),
            finish=Finish.ANSWER,
        )
        logprobs = np.full(length, -log(vocab), dtype=np.float32)
        advantages = np.full(length, random.standard_normal(), dtype=np.float32)
        samples.append(Sample(trajectory, 0.0, (0.0,), {}, advantages, logprobs, logprobs))
    return samples


def as_they_come(samples: Sequence[Sample], rows: int) -> Sharded:
    """Return micro-batches of a fixed number of rows, in the order given."""
    batches = [collate(samples[at : at + rows], pad_id=0) for at in range(0, len(samples), rows)]
    return [batches[rank::RANKS] for rank in range(RANKS)]


def sharded(samples: Sequence[Sample], packed: bool) -> Sharded:
    """Return micro-batches as a run makes them for the actor."""
    flops = flops_of(read_architecture(POLICY))
    return BatchSharder(ParallelConfig(), RANKS, BUDGET, pad_id=0, packed=packed, flops=flops).shard(samples)[1]


def measure(samples: Sequence[Sample]) -> list[Row]:
    """Return the rows of all ways of batching; the first is the baseline. Exits if their gradient norms differ."""
    ways: dict[str, Callable[[Sequence[Sample]], Sharded]] = {
        f"as they come, {ROWS} rows": lambda some: as_they_come(some, ROWS),
        f"as they come, {ROWS // 2} rows": lambda some: as_they_come(some, ROWS // 2),
        "sorted": lambda some: sharded(some, packed=False),
        "packed": lambda some: sharded(some, packed=True),
    }
    actor = start_actor()
    rows: list[Row] = []
    norms: list[float] = []
    for name, way in ways.items():
        ranks = way(samples)
        tokens = sum(int(batch.lengths.sum()) for batches in ranks for batch in batches)
        computed = sum(batch.tokens.size for batches in ranks for batch in batches)
        times = [seconds(actor, batches) for batches in ranks]
        speed = tokens / max(times)
        rows.append(
            Row(
                name,
                micro_batches=len(ranks[0]),
                padding=1 - tokens / computed,
                imbalance=max(times) * RANKS / sum(times) - 1,
                tokens_per_s=speed,
                gain=speed / rows[0].tokens_per_s if rows else 1.0,
            )
        )
        norms.append(actor.apply().grad_norm)
    stop()
    if not all(isclose(norm, norms[0], rel_tol=1e-4) for norm in norms):
        raise SystemExit(f"The ways of batching gave different gradients, with norms {norms}.")
    return rows


def seconds(actor: Actor, batches: Sequence[MicroBatch]) -> float:
    """Return the processor seconds of one rank's micro-batches, best of `REPEATS`; every repeat adds the same
    gradient."""
    taken = []
    for _ in range(REPEATS):
        before = time.process_time()
        actor.accumulate(batches)
        taken.append(time.process_time() - before)
    return min(taken)


def start_actor() -> Actor:
    """Return an actor of one process with learning rate 0, so that its weights do not change."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    actor = Actor(
        Rendezvous(0, 1, "127.0.0.1", port, Device.cpu, timeout_s=60.0),
        ModelConfig(POLICY, Layers.local, Dtype.float32),
        ParallelConfig(),
        AdamwConfig(lr=0.0),
        Objective(policy_loss(AlgorithmConfig(policy_loss=PpoLoss(clip_high=0.28), kl_coef=0.001)), temperature=1.0),
        total_steps=1,
        seed=0,
    )
    actor.load_hf(POLICY)
    return actor


def table(rows: Sequence[Row]) -> Table:
    """Return a table with one row per way of batching."""
    shown = Table(title=f"{SAMPLES} trajectories, {MEAN:.0f} tokens on average, {RANKS} ranks")
    shown.add_column("batching", no_wrap=True)
    for name in ("batches", "padding", "imbalance", "tokens/s", "gain"):
        shown.add_column(name, justify="right")
    for row in rows:
        shown.add_row(
            row.name,
            str(row.micro_batches),
            f"{row.padding:.1%}",
            f"{row.imbalance:.1%}",
            f"{row.tokens_per_s:,.0f}",
            f"{row.gain:.2f} x",
        )
    return shown


if __name__ == "__main__":
    main()
