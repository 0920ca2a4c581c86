"""The learning rate as a pure function of the step, so that a resumed run cannot disagree."""

from __future__ import annotations

from math import cos, pi

from rlsys.config.schema import LrDecay, OptimizerConfig


def learning_rate(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """The rate of optimiser step `step`, counted from 0, of `total_steps`.

    It rises linearly over the first W = round(warmup_fraction x total_steps) steps, of which the first
    already learns (lr / W), then decays towards `min_lr`, which it reaches after the last step.
    """
    warmup = round(config.warmup_fraction * total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.decay is LrDecay.constant:
        return config.lr
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    share = 1.0 - progress if config.decay is LrDecay.linear else 0.5 * (1.0 + cos(pi * progress))
    return config.min_lr + share * (config.lr - config.min_lr)
