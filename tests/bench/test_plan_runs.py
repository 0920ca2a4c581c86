"""Tests of the comparison of predictions with own runs: the rows, and the deeper model."""

from __future__ import annotations

from pathlib import Path

from bench.plan_runs import ROWS, deepen
from tests.support.composed import composed

POLICY = Path("examples/searchr1/tiny/policy")


def test_rows_of_own_runs_are_configs() -> None:
    for row in ROWS:
        assert composed(*row.settings, "trainer.steps=5").trainer.steps == 5


def test_deeper_model_computes_the_same(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    deepen(POLICY, tmp_path / "deep")
    models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in (POLICY, tmp_path / "deep")]
    tokens = torch.arange(5, 25).unsqueeze(0)
    with torch.no_grad():
        one, other = (model(tokens).logits for model in models)
    assert models[1].config.num_hidden_layers == 3 * models[0].config.num_hidden_layers
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
