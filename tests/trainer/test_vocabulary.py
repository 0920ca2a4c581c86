"""Tests of log-probs and KL of sharded logits against float64 softmax and autograd over the whole vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlsys.algorithms.kl import SampledLogprobs, TopKKl
from rlsys.config.algorithm import AlgorithmConfig, FullKl
from rlsys.trainer.model import logprobs as vocabulary
from rlsys.trainer.model.logprobs import (
    VocabShard,
    divergence_of,
    logprobs_at,
    token_logprobs,
    top_tokens,
    whole_vocabulary_kl,
)
from tests.support.megatron_processes import Group, on_ranks
from tests.trainer.memory_meter import MemoryMeter

DIRECTIONS = ("full_reverse", "full_forward")
TP = 2
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """Logits of two models, and how they are sharded and cut into chunks."""

    vocab: int
    columns: int
    """Number of columns per rank; columns beyond the vocabulary are padding."""
    count: int = 37
    k: int = 5
    temperature: float = 0.7
    dtype: torch.dtype = torch.float32
    chunk_rows: int = 4
    ties: bool = False

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Logits of policy and reference, [count, TP * columns]; padding holds large numbers and NaN."""
        torch.manual_seed(self.vocab)
        logits = 3 * torch.randn(2, self.count, TP * self.columns)
        logits[1] = logits[0] + 0.5 * logits[1]
        logits = logits.round() if self.ties else logits
        logits[..., self.vocab :] = torch.tensor([90.0, float("nan")])[torch.arange(self.columns * TP - self.vocab) % 2]
        policy, reference = logits.to(self.dtype)
        return policy, reference

    def rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Targets [count]; weights of losses [count, k + 3]; old and reference log-probs [count]."""
        torch.manual_seed(1)
        old, ref = -3 * torch.rand(2, self.count)
        return torch.randint(0, self.vocab, (self.count,)), torch.randn(self.count, self.k + 3), old, ref


CASES = [
    Case(vocab=23, columns=16),
    # All columns of the second rank are padding.
    Case(vocab=9, columns=9, k=9, chunk_rows=1, temperature=1.3),
    Case(vocab=31, columns=16, k=1, dtype=torch.bfloat16),
    Case(vocab=30, columns=16, k=6, ties=True),
    Case(vocab=23, columns=16, count=0),
]


def everything(case: Case, shard: VocabShard) -> Results:
    """Return every value and, as `d <name>`, the gradient of its weighted sum with respect to the local columns."""
    part = slice(shard.start, shard.start + case.columns) if shard.group is not None else slice(None)
    logits, reference = (tensor[:, part].clone() for tensor in case.tensors())
    logits.requires_grad_()
    reference.requires_grad_()
    targets, weights, old, ref = case.rows()
    results: Results = {}

    def keep(name: str, values: Tensor) -> None:
        results[name] = values.detach()
        weight = weights[:, : values.shape[1]] if values.dim() == 2 else weights[:, 0]
        (results[f"d {name}"], nothing) = torch.autograd.grad(
            (weight * values).sum(), (logits, reference), retain_graph=True, allow_unused=True
        )
        assert nothing is None, "the reference must get no gradient"

    logprobs, entropy = token_logprobs(logits, targets, shard, case.temperature, with_entropy=True)
    assert entropy is not None
    keep("logprobs", logprobs)
    keep("entropy", entropy)
    for name, model in (("policy", logits), ("reference", reference)):
        results[f"{name} tokens"], results[f"{name} top"] = top_tokens(model, shard, case.temperature, case.k)
    # The target is repeated, and must count twice.
    asked = torch.cat([targets[:, None], targets[:, None], results["reference tokens"]], dim=1)
    keep("at", logprobs_at(logits, asked.int(), shard, case.temperature))
    for estimator in DIRECTIONS:
        forward_kl = estimator == "full_forward"
        keep(f"{estimator}", whole_vocabulary_kl(logits, reference, shard, case.temperature, forward_kl))
        divergence = divergence_of(AlgorithmConfig(kl_estimator=FullKl(estimator, case.k), use_kl_iw=True))
        assert divergence is not None
        tokens = results["reference tokens" if forward_kl else "policy tokens"]
        values = divergence(
            logits,
            shard,
            case.temperature,
            targets=targets,
            logprobs=logprobs,
            old_logprobs=old,
            ref_logprobs=ref,
            pick_tokens=tokens.int(),
            pick_logprobs=logprobs_at(reference.detach(), tokens, shard, case.temperature),
            ref_logits=None,
        )
        keep(f"{estimator} top", values)
    return results


def in_chunks(case: Case, shard: VocabShard, columns: int) -> Results:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vocabulary.CHUNK_ELEMENTS, "cpu", case.chunk_rows * columns)
        return everything(case, shard)


def sharded(group: Group) -> list[Results]:
    """Results of `everything` for each case, on one TP rank."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{group.ports[0]}", rank=group.rank, world_size=group.world)
    found = []
    for case in CASES:
        start = group.rank * case.columns
        shard = VocabShard(dist.group.WORLD, start, min(max(case.vocab - start, 0), case.columns))
        found.append(in_chunks(case, shard, case.columns))
    return found


def joined(parts: Sequence[Results]) -> Results:
    """Return the values, which all ranks must share, and the gradients, which are concatenated over the ranks."""
    for part in parts:
        for name, values in part.items():
            assert name.startswith("d ") or torch.equal(values, parts[0][name]), f"ranks differ in {name}"
    return {
        name: torch.cat([part[name] for part in parts], dim=1) if name.startswith("d ") else values
        for name, values in parts[0].items()
    }


def dense(case: Case, picks: Results) -> Results:
    """Return the expected results; ties between picked tokens are broken as in `picks`."""
    targets, weights, old, ref = case.rows()
    weights = weights.double()
    whole, reference = (tensor.double() for tensor in case.tensors())
    whole.requires_grad_()
    log_p = (whole[:, : case.vocab] / case.temperature).log_softmax(-1)
    log_r = (reference[:, : case.vocab] / case.temperature).log_softmax(-1)
    results: Results = {}

    def keep(name: str, values: Tensor) -> None:
        results[name] = values.detach()
        weight = weights[:, : values.shape[1]] if values.dim() == 2 else weights[:, 0]
        (results[f"d {name}"],) = torch.autograd.grad((weight * values).sum(), whole, retain_graph=True)

    logprobs = log_p.gather(1, targets[:, None])[:, 0]
    keep("logprobs", logprobs)
    keep("entropy", -(log_p.exp() * log_p).sum(-1))
    for name, log in (("policy", log_p.detach()), ("reference", log_r)):
        results[f"{name} top"], tokens = log.topk(case.k)[0], picks[f"{name} tokens"]
        assert all(len(set(row)) == case.k for row in tokens.tolist())
        torch.testing.assert_close(log.gather(1, tokens), results[f"{name} top"], rtol=0, atol=2e-5)
    asked = torch.cat([targets[:, None], targets[:, None], picks["reference tokens"]], dim=1)
    keep("at", log_p.gather(1, asked))
    for estimator in DIRECTIONS:
        forward_kl = estimator == "full_forward"
        first, second = (log_r, log_p) if forward_kl else (log_p, log_r)
        keep(f"{estimator}", (first.exp() * (first - second)).sum(-1))
        tokens = picks["reference tokens" if forward_kl else "policy tokens"]
        sampled = SampledLogprobs(logprobs, old.double(), ref.double(), (tokens == targets[:, None]).any(-1))
        full = FullKl(estimator, case.k)
        config = AlgorithmConfig(kl_estimator=full, use_kl_iw=True)
        keep(f"{estimator} top", TopKKl(config, full)(log_p.gather(1, tokens), log_r.gather(1, tokens), sampled))
    return results


def check(case: Case, actual: Results) -> None:
    expected = dense(case, actual)
    assert set(actual) == {*expected, "policy tokens", "reference tokens"}
    for name, values in expected.items():
        rounded = case.dtype is torch.bfloat16 and name.startswith("d ")
        tolerance = {"rtol": 1e-2, "atol": 1e-3} if rounded else {"rtol": 1e-4, "atol": 2e-5}
        assert actual[name].dtype is (case.dtype if rounded else torch.float32), name
        torch.testing.assert_close(
            actual[name].double(), values, **tolerance, msg=lambda text, name=name: f"{case} {name}: {text}"
        )
        if name.startswith("d "):
            assert not actual[name][:, case.vocab :].any(), "padding columns must get no gradient"


def test_sharded_logprobs_and_kl_equal_autograd_over_the_whole_vocabulary() -> None:
    for case, *parts in zip(CASES, *on_ranks(sharded, TP), strict=True):
        check(case, joined(parts))
        check(case, in_chunks(case, VocabShard(None, 0, case.vocab), TP * case.columns))


def test_no_float32_copy_of_all_logits_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns = 512, 256
    monkeypatch.setitem(vocabulary.CHUNK_ELEMENTS, "cpu", 4 * columns)
    torch.manual_seed(0)
    logits, ref_logits = torch.randn(2, rows, columns).bfloat16()
    logits.requires_grad_()
    targets, shard = torch.arange(rows) % columns, VocabShard(None, 0, columns)
    for name, function in {
        "log-probs": lambda: sum(part.sum() for part in token_logprobs(logits, targets, shard, 1.0, True)),
        "top tokens": lambda: top_tokens(logits, shard, 1.0, 4)[1].sum() * logits[0, 0],
        "divergence": lambda: whole_vocabulary_kl(logits, ref_logits, shard, 1.0, True).sum(),
    }.items():
        with MemoryMeter([logits, ref_logits]) as meter:
            before = meter.alive
            torch.autograd.grad(function(), logits)
        # The gradient is as large as the bfloat16 logits; a float32 copy of them would be twice as large.
        assert meter.peak - before < 1.5 * logits.nbytes, name


@pytest.mark.parametrize("forward_kl", [False, True])
def test_bfloat16_logits_far_apart_give_finite_values_and_gradients(forward_kl: bool) -> None:
    logits = torch.tensor([[0.0, 3e4, -3e4], [1.0, 2.0, 3.0]], dtype=torch.bfloat16, requires_grad=True)
    shard = VocabShard(None, 0, 3)
    same = whole_vocabulary_kl(logits, logits.detach().clone(), shard, 1.0, forward_kl)
    assert same.tolist() == [0.0, 0.0]
    other = torch.tensor([[0.0, -3e4, 3e4], [1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    apart = whole_vocabulary_kl(logits, other, shard, 1.0, forward_kl)
    assert apart.tolist() == [pytest.approx(59904.0), 0.0]
    logprobs, entropy = token_logprobs(logits[:1], torch.tensor([2]), shard, 1.0, True)
    assert entropy is not None
    assert (logprobs.tolist(), entropy.tolist()) == ([pytest.approx(-59904.0)], [0.0])
    (grad,) = torch.autograd.grad(apart.sum() + logprobs.sum() + entropy.sum(), logits)
    assert grad.isfinite().all()
