"""Tests of Muon without a model, against singular value decompositions in float64 and torch's own optimisers."""

import pytest
import torch
from torch.nn import Parameter

from rlsys.algorithms.optimizers import make_optimizer, orthogonalised
from rlsys.config.schema import MuonConfig
from tests.trainer import reference

CONFIG = MuonConfig(lr=0.02, weight_decay=0.1, eps=1e-6)


def _drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32), (1, 7)])
def test_newton_schulz_iterations_take_each_singular_value_through_the_polynomial(shape: tuple[int, int]) -> None:
    matrix = _drawn(*shape)
    expected = reference.orthogonalised(matrix)
    assert (orthogonalised(matrix) - expected).norm() < 1e-12 * expected.norm()
    assert (orthogonalised(matrix.float()) - expected).norm() < 1e-5 * expected.norm()
    assert (orthogonalised(matrix.bfloat16()) - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize(("dtype", "slack"), [(torch.float32, 0.0), (torch.bfloat16, 0.05)])
def test_singular_values_end_near_one(dtype: torch.dtype, slack: float) -> None:
    left, right = (torch.linalg.qr(_drawn(rows, 32))[0] for rows in (48, 32))
    values = torch.logspace(-2, 0, 32, dtype=torch.float64)
    found = torch.linalg.svdvals(orthogonalised(((left * values) @ right.T).to(dtype)).double())
    assert 0.003 < values[0] / values.norm() < 0.01
    assert 0.68 - slack < found.min()
    assert found.max() < 1.21 + slack
    assert not orthogonalised(torch.zeros(3, 5, dtype=dtype)).any()


def test_matrix_is_stepped_like_torchs_muon_and_a_vector_like_its_adamw() -> None:
    start = {"matrix": _drawn(24, 40).float(), "vector": _drawn(24).float()}
    ours, theirs = ({name: Parameter(one.clone()) for name, one in start.items()} for _ in range(2))
    made = make_optimizer(CONFIG, [{"params": [ours["matrix"]]}, {"params": [ours["vector"]]}])
    decay, betas = CONFIG.weight_decay, (CONFIG.beta1, CONFIG.beta2)
    others = [
        torch.optim.Muon([theirs["matrix"]], CONFIG.lr, decay, CONFIG.momentum, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([theirs["vector"]], CONFIG.lr, betas, CONFIG.eps, decay),
    ]
    for step in range(3):
        for name, one in start.items():
            ours[name].grad, theirs[name].grad = (_drawn(*one.shape, seed=step).float() for _ in range(2))
        for optimizer in (made, *others):
            optimizer.step()
    assert torch.equal(ours["vector"], theirs["vector"])
    moved = (theirs["matrix"] - start["matrix"]).norm()
    assert (ours["matrix"] - theirs["matrix"]).norm() < 0.01 * moved
