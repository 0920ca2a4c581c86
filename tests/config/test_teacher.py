"""Tests of a teacher's settings: what cannot be distilled is refused before the start, and the plan knows the teacher."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from rlsys.cluster.planning.cost import StepCost
from rlsys.cluster.planning.memory import count_parameters, group_memory
from rlsys.config.schema import RunConfig
from rlsys.errors import Code
from rlsys.orchestrator.validate import find_problems, validate
from rlsys.weights.flops import flops_of
from rlsys.weights.weight_map import Architecture, read_architecture
from tests.support.tiny_shape import SHAPE

TinyRun = Callable[..., RunConfig]
MODEL = "algorithm.teacher.model"
SERVER = f"{MODEL}=http://teacher.test:30000"
WORDS = {"a": 0, "b": 1, "c": 2}
BIG: dict[str, Any] = {**SHAPE, "hidden_size": 128, "num_hidden_layers": 6}


def write_model(folder: Path, shape: Mapping[str, Any] = SHAPE, words: Mapping[str, int] = WORDS) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(shape)))
    Tokenizer(models.WordLevel(dict(words), unk_token="a")).save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.fixture
def distilled(tiny_run: TinyRun, tmp_path: Path) -> TinyRun:
    """Composes a run that distils the model in the folder `teacher` of this test, with further overrides."""
    write_model(tmp_path / "model")
    write_model(tmp_path / "teacher", BIG)
    return lambda *more: tiny_run("algorithm=opd", f"{MODEL}={tmp_path / 'teacher'}", *more)


def weights(model: Architecture) -> int:
    """Bytes of a model in float32, with the padding of its vocabulary."""
    return 4 * (count_parameters(model) + (model.padded_vocab(1) - model.vocab) * model.hidden)


def found(config: RunConfig) -> list[tuple[str, Code]]:
    return [(problem.key, problem.code) for problem in find_problems(config)]


def test_teachers_of_other_sizes_and_behind_addresses_are_accepted(distilled: TinyRun) -> None:
    validate(distilled())
    validate(distilled("reward.terms={exact_match: 0}"))
    validate(distilled("algorithm.kl_in=loss", "algorithm.kl_estimator={kind: full_reverse, topk_tokens: 8}"))
    append = ("task.token_mode=append", "task.train_eos=false")
    validate(distilled("model.lora.rank=4", "algorithm.old_logprobs=engine", *append))
    validate(distilled(SERVER))
    validate(distilled(SERVER, "algorithm.kl_in=loss", "algorithm.kl_estimator.kind=k2", "algorithm.kl_coef=0.1"))


@pytest.mark.parametrize(
    ("shape", "words", "code"),
    [
        (BIG, {"a": 0, "b": 2, "c": 1}, "mismatch"),
        (BIG, {**WORDS, "d": 3}, "mismatch"),
        ({**BIG, "vocab_size": 319}, WORDS, "mismatch"),
        ({**BIG, "max_position_embeddings": 512}, WORDS, "mismatch"),
        ({"model_type": "qwen2"}, WORDS, "missing"),
        ({**BIG, "model_type": "elman"}, WORDS, "unsupported"),
    ],
    ids=["tokens swapped", "token more", "fewer logits", "shorter context", "no language model", "unknown family"],
)
def test_model_that_cannot_score_the_policys_tokens_is_refused(
    distilled: TinyRun, tmp_path: Path, shape: Mapping[str, Any], words: Mapping[str, int], code: Code
) -> None:
    write_model(tmp_path / "teacher", shape, words)
    assert found(distilled()) == [(MODEL, code)]


@pytest.mark.parametrize(
    ("file", "text", "code"),
    [("config.json", None, "not_found"), ("tokenizer.json", None, "not_found"), ("tokenizer.json", "{", "malformed")],
)
def test_folder_that_lacks_a_part_of_a_model_is_refused(
    distilled: TinyRun, tmp_path: Path, file: str, text: str | None, code: Code
) -> None:
    (tmp_path / "teacher" / file).unlink()
    if text is not None:
        (tmp_path / "teacher" / file).write_text(text)
    assert found(distilled()) == [(MODEL, code)]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        # Six layers and four heads do not fit.
        (["cluster.placement={actor: 0, inference: 1-4, rollout: 5}", "inference.parallel.pp=4"], (MODEL, "conflict")),
        ([SERVER.replace("http", "ftp")], (MODEL, "malformed")),
        ([SERVER, "algorithm.teacher.api=openai"], ("algorithm.teacher.served_model", "missing")),
        ([SERVER, "algorithm.teacher.token_env=NOT_EXPORTED"], ("algorithm.teacher.token_env", "missing")),
        ([SERVER, "algorithm.teacher.max_concurrent=0"], ("algorithm.teacher.max_concurrent", "out_of_range")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_impossible_distillation_is_refused_once(
    distilled: TinyRun, settings: list[str], problem: tuple[str, Code]
) -> None:
    assert found(distilled(*settings)) == [problem]


def test_sum_over_the_vocabulary_needs_a_teacher_with_the_same_logits(distilled: TinyRun, tmp_path: Path) -> None:
    """A sampled token needs only its own log-prob, so more logits, as other paddings have, do not matter to it."""
    write_model(tmp_path / "teacher", {**BIG, "vocab_size": 384})
    assert found(distilled()) == []
    full = ("algorithm.kl_in=loss", "algorithm.kl_estimator.kind=full_forward")
    assert found(distilled(*full)) == [(MODEL, "mismatch")]


def test_rewards_without_weight_need_a_teacher_to_learn_from(tiny_run: TinyRun) -> None:
    assert found(tiny_run("reward.terms={exact_match: 0}")) == [("reward.terms", "empty")]


def test_plan_has_the_weights_and_operations_of_the_teacher(distilled: TinyRun, tmp_path: Path) -> None:
    """The inference group holds policy and teacher; with a server it holds the policy alone."""
    policy, teacher = (read_architecture(tmp_path / name) for name in ("model", "teacher"))
    held = group_memory(distilled(), policy, "inference").parts
    assert (held["parameters"], held["reference"]) == (weights(policy), weights(teacher))
    assert weights(teacher) > 3 * weights(policy)
    alone = group_memory(distilled(SERVER), policy, "inference").parts
    assert alone["parameters"] == held["parameters"]
    assert "reference" not in alone
    assert held["activations"] > 1.5 * alone["activations"], "the teacher's hidden size is twice the policy's"
    cost = StepCost(distilled(), policy)
    theirs, ours = (flops_of(one).of(cost.episode.total, cost.episode.generated) for one in (teacher, policy))
    assert cost.work.passes()["inference"] == pytest.approx(1.0 + theirs / ours)
    assert StepCost(distilled(SERVER), policy).work.passes()["inference"] == 1.0
