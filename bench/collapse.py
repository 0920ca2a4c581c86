"""Trains a small search policy by GRPO with many large updates a step, until it collapses, with and without LLDS.

    python -m bench.collapse [--lr 0.01 --lr 0.012] [--coef 0 --coef 0.2] [--steps 60] [--seeds 3]

A recurrent network of 12,000 parameters writes a query of two tokens, reads a fact and writes an answer of two tokens.
The question names the right query, a table of facts replies, and the answer is a function of the fact. The policy has
learned all of it from noisy examples: its greedy answers are right, its sampled ones often wrong. Each step then has 16
updates on the same episodes, like a run with `trainer.mini_batches=16`. Advantages, loss, statistics and guards are
those of rlsys; network, sampling and optimiser are torch's, so the world shows the loss, not the trainer. The command
prints a table, and writes the curves of every run to outputs/bench/collapse.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from rlsys.algorithms.advantages import RewardedEpisode, group_estimates
from rlsys.algorithms.losses import DIVISOR, LossInputs, divisor, policy_loss, reduce_stats
from rlsys.config.algorithm import AlgorithmConfig, LldsConfig
from rlsys.config.schema import GuardsConfig
from rlsys.observe.guards import Guards
from rlsys.orchestrator.run_logger import update_metrics

RESULT = Path("outputs/bench/collapse.json")
LRS, COEFS = (0.003, 0.008, 0.01, 0.012), (0.0, 0.2)
LAST = 10
"""Number of steps over which the exact match at the end is averaged."""
SYMBOLS, HIDDEN = 16, 48
TURNS = np.array([-1, -1, 0, 0, -1, 1, 1])
"""Turn of each token: question, query, fact, answer."""
TRAINED = torch.from_numpy(TURNS >= 0)
WIDTH, FACT, ANSWER = len(TURNS), 4, 5
PROMPTS, UPDATES = 32, 16
WARM_UP, NOISE = 400, 0.3
"""Updates on examples before the training, and the share of their tokens that are replaced at random."""
HELD_OUT = 256
Row = dict[str, float]


@dataclass(frozen=True)
class World:
    """Facts, and the answer that follows from a fact."""

    facts: Tensor
    """[symbols, symbols] fact that a query finds."""
    answers: Tensor
    """[symbols, 2]"""

    @classmethod
    def draw(cls, seed: int) -> World:
        random = torch.Generator().manual_seed(seed)
        answers = [torch.randperm(SYMBOLS, generator=random) for _ in range(2)]
        facts = torch.randint(SYMBOLS, (SYMBOLS, SYMBOLS), generator=random)
        return cls(facts, torch.stack(answers, dim=1))

    def found(self, tokens: Tensor) -> Tensor:
        """Return the fact [n] that the queries of `tokens` [n, width] find."""
        return self.facts[tokens[:, 2], tokens[:, 3]]

    def solved(self, questions: Tensor) -> Tensor:
        """Return the right episode [n, width] of each of `questions` [n, 2]."""
        facts = self.facts[questions[:, 0], questions[:, 1]]
        return torch.cat([questions, questions, facts[:, None], self.answers[facts]], dim=1)


class Policy(nn.Module):
    """Recurrent network over the tokens of an episode and their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, 24), nn.Embedding(WIDTH, 24)
        self.network, self.head = nn.GRU(24, HIDDEN, batch_first=True), nn.Linear(HIDDEN, SYMBOLS)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies [n, width] of `tokens`; the first token, which nothing predicts, has zeros."""
        read = self.symbols(tokens[:, :-1]) + self.places.weight[: WIDTH - 1]
        log_p = torch.log_softmax(self.head(self.network(read)[0]), dim=-1)
        logprobs = log_p.gather(-1, tokens[:, 1:, None])[..., 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        return nn.functional.pad(logprobs, (1, 0)), nn.functional.pad(entropy, (1, 0))

    @torch.no_grad()
    def episodes(self, world: World, questions: Tensor, random: torch.Generator | None) -> Tensor:
        """Return an episode [n, width] for each of `questions` [n, 2], sampled, or greedy without `random`."""
        tokens, state = nn.functional.pad(questions, (0, WIDTH - 2)), None
        for place in range(1, WIDTH):
            read = self.symbols(tokens[:, place - 1 : place]) + self.places.weight[place - 1]
            outputs, state = self.network(read, state)
            if place == FACT:
                tokens[:, place] = world.found(tokens)
            elif TRAINED[place]:
                logits = self.head(outputs[:, 0])
                drawn = None if random is None else torch.multinomial(logits.softmax(-1), 1, generator=random)[:, 0]
                tokens[:, place] = logits.argmax(-1) if drawn is None else drawn
        return tokens


def warmed_up(world: World, random: torch.Generator) -> Policy:
    """Return a policy that has learned from noisy examples."""
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(WARM_UP):
        right = world.solved(torch.randint(SYMBOLS, (256, 2), generator=random))
        noise = (torch.rand(right.shape, generator=random) < NOISE) & TRAINED
        shown = torch.where(noise, torch.randint(SYMBOLS, right.shape, generator=random), right)
        shown[:, FACT] = world.found(shown)
        loss = -policy(shown)[0][:, TRAINED].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy


def advantages_of(rewards: Tensor, config: AlgorithmConfig) -> Tensor:
    """Return the advantages [n, width] of episodes with `rewards` [n], group by group."""
    found = []
    for group in rewards.reshape(-1, config.n_samples).tolist():
        episodes = [RewardedEpisode((0.0, reward), TURNS, penalties=None, values=None) for reward in group]
        found += [one.advantages for one in group_estimates(episodes, config.advantage)]
    return torch.from_numpy(np.stack(found)).float()


def trained(config: AlgorithmConfig, lr: float, steps: int, seed: int) -> Iterator[Row]:
    """Train a policy; yield the metrics of each step, with held-out exact match after it, and whether a guard rang."""
    torch.manual_seed(seed)
    random, world = torch.Generator().manual_seed(seed), World.draw(seed)
    policy, held_out = warmed_up(world, random), torch.randint(SYMBOLS, (HELD_OUT, 2), generator=random)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.0)
    guards = Guards(GuardsConfig(), config.kl_estimator.kind)
    yield {"step": 0, "em": _exact_match(policy, world, held_out)}
    for step in range(1, steps + 1):
        questions = torch.randint(SYMBOLS, (PROMPTS, 2), generator=random).repeat_interleave(config.n_samples, 0)
        tokens = policy.episodes(world, questions, random)
        rewards = (tokens[:, ANSWER:] == world.solved(questions)[:, ANSWER:]).all(1).float()
        advantages = advantages_of(rewards, config)
        with torch.no_grad():
            old = policy(tokens)[0]
        updates = [
            _update(policy, optimizer, config, tokens[part], old[part], advantages[part])
            for part in torch.arange(len(tokens)).chunk(UPDATES)
        ]
        row = update_metrics(updates)
        alarms = {f"guard/{alarm.guard}": 1.0 for alarm in guards.check(step, row)}
        reward, em = float(rewards.mean()), _exact_match(policy, world, held_out)
        yield {"step": step, "em": em, "reward": reward, **row, **alarms}


def _update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    config: AlgorithmConfig,
    tokens: Tensor,
    old: Tensor,
    advantages: Tensor,
) -> Row:
    """Take one optimiser step on episodes [n, width]; return its metrics under the names of a run."""
    rows = torch.arange(len(tokens))[:, None].expand_as(tokens)
    mask = TRAINED.expand_as(tokens)
    turns = 2 * rows + torch.from_numpy(TURNS.clip(0))
    inputs = LossInputs(old, None, advantages, mask, torch.ones_like(old), rows, turns=turns)
    total, stats = policy_loss(config)(*policy(tokens), inputs)
    whole = divisor(config.aggregation, mask.sum(1).numpy(), 0)
    optimizer.zero_grad()
    (total / whole).backward()
    norm = nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    found = reduce_stats([{**stats, DIVISOR: whole}]) | {"grad_norm": float(norm)}
    return {f"actor/{name}": value for name, value in found.items()}


def _exact_match(policy: Policy, world: World, questions: Tensor) -> float:
    """Share of `questions` that the policy answers right, greedily."""
    found = policy.episodes(world, questions, None)
    return float((found[:, ANSWER:] == world.solved(questions)[:, ANSWER:]).all(1).float().mean())


def main(
    lr: Annotated[list[float] | None, typer.Option(help="Learning rate; repeat for several.")] = None,
    coef: Annotated[list[float] | None, typer.Option(help="`algorithm.llds.coef`; repeat for several.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of each run.", min=LAST)] = 60,
    seeds: Annotated[int, typer.Option(help="Runs of each kind, with seeds 1, 2, ...", min=1)] = 3,
) -> None:
    """Train with and without LLDS, and print and write the curves."""
    torch.set_num_threads(1)
    plain = AlgorithmConfig(kl_coef=0.0)
    table = Table("lr", "llds.coef", "EM before", "lowest EM", "EM at the end", "each seed", "change", "alarm")
    runs: list[dict[str, Any]] = []
    for rate in lr or LRS:
        for weight in coef or COEFS:
            config = replace(plain, llds=LldsConfig(weight))
            curves = [list(trained(config, rate, steps, seed)) for seed in range(1, seeds + 1)]
            runs += [
                {"lr": rate, "coef": weight, "seed": seed, "curve": curve} for seed, curve in enumerate(curves, start=1)
            ]
            RESULT.parent.mkdir(parents=True, exist_ok=True)
            RESULT.write_text(json.dumps(runs) + "\n")
            table.add_row(f"{rate:g}", f"{weight:g}", *_cells(curves))
    Console().print(table)


def _cells(curves: list[list[Row]]) -> Iterator[str]:
    """Yield exact match before, at its lowest and at the end, the mean change of steps 1 to 10, and steps of alarms."""
    ends = [fmean(row["em"] for row in curve[-LAST:]) for curve in curves]
    yield f"{fmean(curve[0]['em'] for curve in curves):.3f}"
    yield f"{fmean(min(row['em'] for row in curve) for curve in curves):.3f}"
    yield f"{fmean(ends):.3f}"
    yield " / ".join(f"{end:.3f}" for end in ends)
    changes = [row["actor/correct_change"] for curve in curves for row in curve[1:11] if "actor/correct_change" in row]
    yield f"{fmean(changes):+.3f}"
    alarms = [[int(row["step"]) for row in curve if "guard/correct_change" in row] for curve in curves]
    yield " / ".join(str(steps[0]) if steps else "none" for steps in alarms)


if __name__ == "__main__":
    typer.run(main)
