"""Trains a mixture of experts whose engine chooses other experts than the trainer would, with and without their replay.

    make demo                      # once; it makes the world
    python -m bench.routing [--seeds 3] [--steps 12]

The demo's policy becomes a mixture of experts in the form of gpt-oss: each of 8 experts of a layer is its MLP with noise, and
a token has 2 of them. The engine is plain transformers, but a disturbance of the routers' logits changes the experts of
many tokens, as other kernels and precisions do where logits are nearly equal. It is a function of the token's state, so a
token that is read again keeps its experts. Runs are asynchronous, with staleness 2 and the optimiser steps of the demo:

    off        algorithm.router_replay=none: Megatron chooses the experts of the tokens that it trains
    replay     algorithm.router_replay=r3: it takes those of the engine

The command prints exact match on 200 held-out questions, the engine's answers being disturbed too, and how far the
log-probs of engine and trainer are apart. It writes outputs/bench/routing.json after each run; a run that the file has with
the same settings is not repeated.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM

from bench.record_searches import record_searches
from bench.training_run import FIRST_POLICY, training_run
from rlsys.rollout.transformers_engine import TransformersEngine
from rlsys.rollout.transformers_process import Decoder
from rlsys.rollout.transformers_process import main as run_child

OUT = Path("outputs/bench")
RESULT = OUT / "routing.json"
EXPERTS, CHOSEN = 8, 2
SPREAD = 0.8
"""Noise of an expert's weights, in standard deviations of the MLP's."""
DISTURBANCE = 0.06
"""Amplitude of the disturbance; logits of the untrained routers have a standard deviation of about 0.2, so a third of the
tokens get another pair of experts in a layer."""
WAYS = {"off": "none", "replay": "r3"}
"""Name of a way -> value of `algorithm.router_replay`."""
LARGEST = ("logprob/max_diff", "actor/ratio_max")
QUESTIONS = 200
SETTINGS = (
    "rollout.engine=bench.routing.DisturbedEngine",
    "trainer.schedule.kind=async",
    "trainer.schedule.max_staleness=2",
    "eval.interval=3",
    f"eval.limit={QUESTIONS}",
)
Run = dict[str, Any]


class DisturbedDecoder(Decoder):
    """Decodes with routers that choose experts by disturbed logits, and weigh the chosen ones by their own."""

    def _watch_routers(self) -> None:
        random = torch.Generator().manual_seed(0)
        for router in (one for one in self._model.modules() if type(one).__name__.endswith("TopKRouter")):
            directions = torch.randn(router.weight.shape, generator=random)
            router.register_forward_hook(disturbing(directions))
        super()._watch_routers()  # Its hooks see what the ones above return.


def disturbing(directions: Tensor) -> Any:
    """Return a forward hook of a router; `directions` are [experts, hidden]."""

    def hook(_router: nn.Module, inputs: tuple[Tensor], found: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        logits, old, _ = found
        wave = DISTURBANCE * torch.sin(10 * nn.functional.linear(inputs[0], directions))
        chosen = (logits + wave).topk(old.shape[-1], dim=-1).indices
        return logits, logits.gather(-1, chosen).softmax(-1), chosen

    return hook


class DisturbedEngine(TransformersEngine):
    """Plain transformers with a `DisturbedDecoder`."""

    program = "bench.routing"


def mixture(dense: Any, spread: float) -> GptOssForCausalLM:
    """Return a mixture of experts that computes what the Qwen2 model `dense` does, but for the noise of its experts.

    gpt-oss computes (up + 1) x gate x sigmoid(1.702 gate), so the gate is divided by 1.702 and the bias of up is -1. It clips
    both, so up is scaled down and the last projection scaled up; large gates of the first token are still clipped.
    """
    old, random = dense.config, torch.Generator().manual_seed(0)
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    more = ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "eos_token_id", "pad_token_id")
    config = GptOssConfig(
        **{name: getattr(old, name) for name in (*same, *more)},
        bos_token_id=None,
        head_dim=old.hidden_size // old.num_attention_heads,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        sliding_window=old.max_position_embeddings,
        layer_types=["full_attention"] * old.num_hidden_layers,
        rope_parameters=old.rope_parameters,
        router_aux_loss_coef=0.0,
    )
    model, known = GptOssForCausalLM(config), dense.state_dict()

    def noisy(weight: Tensor, scale: float) -> Tensor:
        noise = torch.randn(EXPERTS, *weight.shape, generator=random)
        return (scale * (weight + spread * weight.std() * noise)).transpose(1, 2)

    small = 0.1
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            layer, _, part = name.partition("mlp.")
            if name in known:
                tensor.copy_(known[name])
            elif name == "lm_head.weight":
                tensor.copy_(known["model.embed_tokens.weight"])
            elif name.endswith("sinks"):
                tensor.fill_(-1e4)  # Nothing is attended to beside the tokens.
            elif part == "router.weight":
                tensor.copy_(0.02 * torch.randn(tensor.shape, generator=random))
            elif part == "experts.gate_up_proj":
                tensor[..., 0::2] = noisy(known[f"{layer}mlp.gate_proj.weight"], 1 / 1.702)
                tensor[..., 1::2] = noisy(known[f"{layer}mlp.up_proj.weight"], small)
            elif part == "experts.gate_up_proj_bias":
                tensor.zero_()[..., 1::2] = -1
            elif part == "experts.down_proj":
                tensor.copy_(noisy(known[f"{layer}mlp.down_proj.weight"], 1.702 / small))
            else:
                tensor.zero_()
    return model


def write_mixture(folder: Path, spread: float = SPREAD) -> Path:
    """Write the mixture of the demo's policy with its tokenizer. Returns `folder`."""
    mixture(AutoModelForCausalLM.from_pretrained(FIRST_POLICY, dtype=torch.float32), spread).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy2(FIRST_POLICY / name, folder / name)
    return folder


def figures(run: Path) -> Run:
    """Return exact match at each evaluation, and per step the largest log-prob difference and the largest ratio."""
    summary = json.loads((run / "summary.json").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "em": [[one["step"], one["em"]] for one in summary["evaluations"]],
        **{name: [row[name] for row in rows] for name in LARGEST},
    }


def table(runs: Mapping[str, Mapping[str, Run]]) -> Table:
    """Return a table with one row for each way: exact match averaged over its seeds, the others largest of all steps."""
    shown = Table("replay", "seeds", "EM before", "EM after", "each seed", "log-probs apart", "largest ratio")
    for way, of_seeds in runs.items():
        each: Sequence[Run] = list(of_seeds.values())
        before, after = ([one["em"][end][1] for one in each] for end in (0, -1))
        rest = (max(max(one[name]) for one in each) for name in LARGEST)
        ems = (f"{fmean(before):.3f}", f"{fmean(after):.3f}", " / ".join(f"{em:.3f}" for em in after))
        shown.add_row(way, str(len(each)), *ems, *(f"{one:.3g}" for one in rest))
    return shown


def main(
    seeds: Annotated[int, typer.Option(help="Runs of each way, with seeds 1, 2, ...", min=1)] = 3,
    steps: Annotated[int, typer.Option(help="Steps of each run.", min=1)] = 12,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-4,
) -> None:
    """Make the runs that are missing, and print and write the table."""
    console, cassette = Console(), record_searches()
    os.environ["PYTHONPATH"] = str(Path.cwd())  # The workers of a run import this module.
    model = write_mixture(OUT / "routing" / "mixture").resolve()
    asked = {"steps": steps, "lr": lr, "spread": SPREAD, "disturbance": DISTURBANCE}
    found: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    if {name: found.get(name) for name in asked} != asked:
        found = asked | {"runs": {}}
    for seed in range(1, seeds + 1):
        for way, replay in WAYS.items():
            runs = found["runs"].setdefault(way, {})
            if str(seed) not in runs:
                console.print(f"{way}, seed {seed} ...", highlight=False)
                own = (f"model.path={model}", f"algorithm.router_replay={replay}", f"actor.optimizer.lr={lr}")
                each = (f"trainer.seed={seed}", f"trainer.steps={steps}")
                runs[str(seed)] = figures(training_run(OUT / "routing" / way, [*SETTINGS, *own, *each], cassette))
                RESULT.write_text(json.dumps(found, indent=1) + "\n")
    console.print(table(found["runs"]))
    console.print(f"Written to {RESULT}.", highlight=False)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].isdecimal():  # The child process of an engine; its argument is a pipe.
        run_child(int(sys.argv[1]), DisturbedDecoder)
    else:
        typer.run(main)
