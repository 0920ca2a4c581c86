"""Makes the tiny policy in two stages; the second stage starts from the checkpoint of the first.

    python -m examples.searchr1.tiny.warm_start --work outputs/tiny_policy --out examples/searchr1/tiny/policy

- `copy`: repetitions, then drills, first searches and whole right paths in fictional worlds, until the policy copies
  what its searches find;
- `tilt`: mostly guesses and early stops, so that the policy can search but seldom does.

`--stages tilt --start CHECKPOINT` runs the second stage from a kept checkpoint. The weights in `--out` are float32.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast, Qwen2ForCausalLM

from examples.searchr1.tiny.batches import Batch, batches
from examples.searchr1.tiny.curriculum import Curriculum, Mixture, free_names
from examples.searchr1.tiny.episodes import run_episodes, scores_by_hops
from examples.searchr1.tiny.evaluate import forced
from examples.searchr1.tiny.retrieval import DirectRetriever
from examples.searchr1.tiny.tokenizer import train_tokenizer
from examples.searchr1.tiny.training import Schedule, new_model, train
from examples.searchr1.tiny.world import World, build_world

SEED = 17
CONTEXT_WEIGHT = 0.3
WATCHED_QUESTIONS = 160
SAMPLED_QUESTIONS = 200

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Diet:
    """Training data of a part of a stage: a mixture, in batches of about `budget_tokens` tokens."""

    mixture: Mixture
    budget_tokens: int = 4_608


@dataclass(frozen=True, slots=True)
class Stage:
    """A schedule and its diets. The key of a diet is its first step, a multiple of `every`."""

    schedule: Schedule
    diets: dict[int, Diet]
    every: int
    """Steps between evaluations on held-out questions, each with a checkpoint."""

    def diet(self, step: int) -> Diet:
        """Return the diet at `step`."""
        return self.diets[max(start for start in self.diets if start <= step)]


STAGES = {
    "copy": Stage(
        Schedule(steps=2_400, learning_rate=3e-3, warm_up=30, decay=1_200),
        {
            0: Diet(Mixture(repetition=1.0), 2_048),
            150: Diet(Mixture(drill=0.6, opening=0.2, real=0.1), 3_000),
            900: Diet(Mixture(drill=0.3, opening=0.3, real=0.2), 3_000),
        },
        every=150,
    ),
    "tilt": Stage(
        Schedule(steps=240, learning_rate=6e-4, warm_up=10, decay=230),
        {0: Diet(Mixture(drill=0.25, guess_one_hop=0.75, guess_two_hop=0.7, stop=0.5, real=0.4), 3_000)},
        every=240,
    ),
}


@dataclass(frozen=True, slots=True)
class Workshop:
    """Objects that all stages share."""

    world: World
    retriever: DirectRetriever
    curriculum: Curriculum
    tokenizer: PreTrainedTokenizerFast
    folder: Path


def open_workshop(folder: Path) -> Workshop:
    """Build the world, index it, and train the tokeniser or load it from `folder`."""
    world = build_world()
    retriever = DirectRetriever([row["contents"] for row in world.corpus()], folder)
    kept = folder / "tokenizer"
    if not kept.exists():
        train_tokenizer(world, free_names(world), SEED).save_pretrained(kept)
    tokenizer = AutoTokenizer.from_pretrained(kept)
    return Workshop(world, retriever, Curriculum(world, retriever, SEED), tokenizer, folder)


def run_stage(shop: Workshop, name: str, model: Qwen2ForCausalLM) -> None:
    """Train `model` in place through one stage; writes checkpoints to the workshop's folder."""
    stage, rng = STAGES[name], random.Random(f"{SEED} {name}")
    watched = [shop.curriculum.script(question) for question in shop.world.heldout[:WATCHED_QUESTIONS]]

    def source(step: int) -> Iterator[Batch]:
        diet = stage.diet(step)
        return batches(
            lambda: shop.curriculum.draw(diet.mixture),
            shop.tokenizer,
            CONTEXT_WEIGHT,
            diet.budget_tokens,
            rng,
        )

    def report(step: int) -> None:
        logger.info("%s %d %s", name, step, json.dumps(forced(model, shop.tokenizer, watched)))
        model.save_pretrained(shop.folder / name)

    train(model, source, stage.schedule, SEED, stage.every, report)


def measure(shop: Workshop, model: Qwen2ForCausalLM) -> dict[str, object]:
    """Return the held-out metrics: forced copying, greedy answers, and samples at temperature 1."""
    scripts = [shop.curriculum.script(question) for question in shop.world.heldout]
    torch.manual_seed(SEED)
    greedy = run_episodes(model, shop.tokenizer, shop.retriever, scripts, temperature=0.0)
    drawn = scripts[:SAMPLED_QUESTIONS]
    sampled = run_episodes(model, shop.tokenizer, shop.retriever, drawn, temperature=1.0)
    return {
        "forced": forced(model, shop.tokenizer, scripts),
        "greedy_em": sum(episode.right for episode in greedy) / len(greedy),
        "greedy": {hops: asdict(scores) for hops, scores in scores_by_hops(greedy).items()},
        "sampled_em": sum(episode.right for episode in sampled) / len(sampled),
        "sampled": {hops: asdict(scores) for hops, scores in scores_by_hops(sampled).items()},
    }


def ship(shop: Workshop, model: Qwen2ForCausalLM, out: Path) -> None:
    """Write weights, configuration and tokeniser."""
    model.generation_config = GenerationConfig(
        eos_token_id=shop.tokenizer.eos_token_id,
        pad_token_id=shop.tokenizer.pad_token_id,
    )
    model.save_pretrained(out)
    shop.tokenizer.save_pretrained(out)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, train the stages and print the held-out metrics."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints and vectors")
    parser.add_argument("--out", type=Path, help="folder for the policy")
    parser.add_argument("--stages", nargs="*", choices=list(STAGES), default=list(STAGES))
    parser.add_argument("--start", type=Path, help="checkpoint to start from; default: random weights")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.manual_seed(SEED)
    shop = open_workshop(options.work)
    if options.start:
        model = Qwen2ForCausalLM.from_pretrained(options.start, dtype=torch.float32)
    else:
        model = new_model(len(shop.tokenizer), shop.tokenizer.eos_token_id, shop.tokenizer.pad_token_id)
    started = time.monotonic()
    for name in options.stages:
        run_stage(shop, name, model)
    logger.info("trained in %.0f s", time.monotonic() - started)
    if options.out:
        ship(shop, model, options.out)
    print(json.dumps(measure(shop, model), indent=2))


if __name__ == "__main__":
    main()
