"""Runs two steps of the experiment for one GPU with `rlsys train`: all groups colocated, each offloaded for the others.

The model has the experiment's shape and random weights. Episodes cannot search, and a reward term of this module lets
their rewards differ, so that gradients are not zero. The step is compared with the estimate for its own tokens. On a CPU
the demo's config runs colocated with a few prompts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench.gpu.figures import PROJECT, Figure, Setting, compared, holds
from bench.gpu.part import in_new_process
from bench.gpu.random_model import write_random_model
from rlsys.cluster.planning.cost import StepCost
from rlsys.cluster.planning.hardware import SPEEDS
from rlsys.cluster.planning.work import EpisodeTokens
from rlsys.config.compose import load_config
from rlsys.config.schema import Device, RunConfig
from rlsys.data.question import Question
from rlsys.data.trajectory import Trajectory
from rlsys.weights.weight_map import read_architecture

STEPS = 2
EXPERIMENTS: Mapping[Device, tuple[str, ...]] = {
    Device.gpu: ("searchr1_qwen2.5_1.5b_1gpu",),
    Device.cpu: (
        *("searchr1_tiny_cpu", "cluster=one_slot", "trainer.schedule.kind=sequential"),
        *("trainer.prompts_per_step=4", "trainer.mini_batches=1", "task.max_prompt_tokens=512"),
    ),
}
"""Device -> the config, and settings that it has besides those of `overrides`."""
SHAPES = {
    Device.gpu: PROJECT / "configs/model/shapes/qwen2.5-1.5b-instruct",
    Device.cpu: PROJECT / "examples/searchr1/tiny/policy",
}
STAGES = {
    **{"rollout": "time/rollout", "log-probs": "time/inference", "training": "time/training"},
    **{"weight sync": "time/sync_weights", "leaving and taking the device": "time/switch"},
}
"""Figure -> metric of a step, in seconds."""
_QUESTIONS = 256


def measure(setting: Setting) -> Iterator[Figure]:
    """Yield the figures of the last step, after one step in which kernels compile."""
    with TemporaryDirectory(prefix="rlsys-colocated-") as scratch:
        folder = Path(scratch)
        in_new_process(write_random_model, SHAPES[setting.device], folder / "model", setting.device)
        name, *settings = overrides(setting.device, folder)
        ended = subprocess.run([*command(name, settings)], cwd=PROJECT, check=False)
        if ended.returncode:
            raise RuntimeError(f"rlsys train ended with status {ended.returncode}")
        (metrics,) = folder.glob("runs/*/metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        yield from figures(rows)
        device = torch.cuda.get_device_name() if setting.on_gpu else ""
        yield from against_estimate(load_config(name, settings), rows[-1], device)


def overrides(device: Device, folder: Path) -> list[str]:
    """Write the questions into `folder`; return the config's name and all settings of the run."""
    questions = folder / "questions.jsonl"
    asked = (
        {"question": f"What is {number} plus 1?", "golden_answers": [str(number + 1)]} for number in range(_QUESTIONS)
    )
    questions.write_text("".join(json.dumps(row) + "\n" for row in asked))
    return [
        *EXPERIMENTS[device],
        f"model.path={folder / 'model'}",
        *(f"task.{split}_path={questions}" for split in ("train", "eval")),
        f"output_dir={folder / 'runs'}",
        f"reward.terms={{{__name__}.{parity.__name__}: 1.0}}",
        f"trainer.steps={STEPS}",
        "task.agent.invalid_message='My previous action is invalid. Let me try again.'",
        *("search.enabled=false", "eval.interval=0", "eval.limit=8", "checkpoint.interval=0"),
        *("tracking.wandb=false", "tracking.tensorboard=false"),
    ]


def command(config: str, settings: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "rlsys.apps.cli.main", "train", "--config-name", config, *settings]


def parity(_: Question, trajectory: Trajectory) -> float:
    """Return 1 for an odd number of characters in the response, else 0: a reward that random episodes differ in."""
    return float(len(trajectory.response) % 2)


def figures(rows: Sequence[Mapping[str, Any]]) -> Iterator[Figure]:
    """Yield the figures of a run's steps, from the rows of its metrics.jsonl."""
    last = rows[-1]
    yield holds("both steps trained, with gradients", [row["actor/grad_norm"] > 0 for row in rows] == [True] * STEPS)
    yield holds("the engine has the last version", last["engine/0/version"] == STEPS)
    for name, key in STAGES.items():
        yield Figure(name, last[key], "s")
    yield Figure("rollout speed", last["rollout/tokens_per_s"], "tokens/s")
    if "mfu/actor" in last:
        yield Figure("MFU", last["mfu/actor"])
    yield Figure("largest distance of a first ratio from 1", max(row["actor/first_ratio_dev_max"] for row in rows))
    yield Figure("largest difference of engine and recomputed log-probs", last["logprob/max_diff"], "nats")


def against_estimate(config: RunConfig, row: Mapping[str, Any], device: str) -> Iterator[Figure]:
    """Yield the seconds of a step over their estimate for its own tokens; alone on a device without a data sheet."""
    known = next((name for name in SPEEDS if name in device), None)
    if known is None:
        yield Figure("step", row["time/step"], "s")
        return
    generated = row["rollout/generated_tokens"] / row["rollout/episodes"]
    prompt, response = row["prompt_length/mean"], row["response_length/mean"]
    tokens = EpisodeTokens(round(prompt), max(0, round(response - generated)), round(generated))
    cost = StepCost(config, read_architecture(config.model.path), known, tokens)
    estimated = cost.stages().of_step(config.cluster.mode)
    yield compared("step", row["time/step"], "s", "the estimate for its tokens", estimated)
