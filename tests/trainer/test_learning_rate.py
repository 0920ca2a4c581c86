"""The learning rate, by hand."""

from __future__ import annotations

import pytest

from rlsys.config.schema import LrDecay, OptimizerConfig
from rlsys.trainer.optimizer import learning_rate


@pytest.mark.parametrize(
    ("decay", "warmup_fraction", "expected"),
    [
        (LrDecay.constant, 0.0, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        (LrDecay.constant, 1 / 3, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        (LrDecay.linear, 1 / 3, [0.5, 1.0, 1.0, 0.8, 0.6, 0.4]),
        (LrDecay.cosine, 1 / 3, [0.5, 1.0, 1.0, 0.882843, 0.6, 0.317157]),
    ],
)
def test_warm_up_and_decay(decay: LrDecay, warmup_fraction: float, expected: list[float]) -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.2, decay=decay, warmup_fraction=warmup_fraction)
    assert [learning_rate(step, 6, config) for step in range(6)] == pytest.approx(expected, abs=1e-6)


def test_steps_past_the_end_keep_the_lowest_rate() -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.2, decay=LrDecay.linear)
    assert learning_rate(9, 6, config) == pytest.approx(0.2)
