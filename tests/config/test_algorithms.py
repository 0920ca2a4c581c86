"""Presets compose by their name alone; keys that do not fit together are refused with the reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rlsys.cluster.planning.plan import make_plan
from rlsys.config.algorithm import AlgorithmConfig
from rlsys.config.compose import PROJECT_CONFIGS, load_config
from rlsys.config.problems import algorithm_problems
from rlsys.config.schema import RunConfig, schema_keys
from rlsys.errors import UserError
from rlsys.orchestrator.validate import validate

TinyRun = Callable[..., RunConfig]
FILES = sorted((PROJECT_CONFIGS / "algorithm").glob("*.yaml"))


PRESETS = [file.stem for file in FILES]
DOCS = PROJECT_CONFIGS.parent / "docs"


def test_the_presets_are_those_of_the_documents_table() -> None:
    page = (DOCS / "algorithms.md").read_text().partition("## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == PRESETS


@pytest.mark.parametrize("page", ["algorithms.md", "rewards.md", "metrics.md", "pipeline.md"])
def test_keys_that_a_page_names_exist(page: str) -> None:
    sections = "|".join(RunConfig.__dataclass_fields__)
    named = re.findall(rf"`((?:{sections})\.[a-z_.]+)[`=]", (DOCS / page).read_text())
    parts = {key.rpartition(".")[0] for key in schema_keys()}
    known = {*schema_keys(), *parts, "cluster.placement.critic"}
    assert {key for key in named if key not in known} == set()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_composes_by_its_name_alone(tiny_run: TinyRun, preset: str) -> None:
    validate(tiny_run(f"algorithm={preset}"))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("experiment", ["searchr1_qwen2.5_3b_1node", "searchr1_published_grpo"])
def test_a_preset_goes_with_the_large_experiments(preset: str, experiment: str) -> None:
    assert list(algorithm_problems(load_config(experiment, [f"algorithm={preset}"]))) == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_preset_says_its_source(file: Path) -> None:
    text = file.read_text()
    assert "arXiv" in text or "Williams 1992" in text


def test_grpo_is_the_base(tiny_run: TinyRun) -> None:
    assert tiny_run("algorithm=grpo", "algorithm.n_samples=5").algorithm == AlgorithmConfig()


def test_published_settings() -> None:
    """Figures of the published scripts. A mini-batch of theirs has 256 episodes, whatever number a question has."""
    grpo, ppo, ema = (
        load_config(name) for name in ("searchr1_published_grpo", "searchr1_published_ppo", "ema_pg_published")
    )
    for run in (grpo, ppo, ema):
        assert run.trainer.prompts_per_step == 512
        assert run.trainer.mini_batches == 512 * run.algorithm.n_samples // 256
        assert (run.actor.optimizer.lr, run.algorithm.kl_coef) == (1e-6, 0.001)
        assert list(algorithm_problems(run)) == []
    assert (grpo.algorithm.n_samples, ppo.algorithm.n_samples, ema.algorithm.n_samples) == (5, 1, 5)
    assert (grpo.algorithm.entropy_coef, ema.algorithm.entropy_coef) == (0.001, 0.0)
    assert (ppo.critic.optimizer.lr, ppo.critic.optimizer.warmup_fraction) == (1e-5, 0.015)
    assert (ppo.critic.value_clip, ppo.algorithm.gamma, ppo.algorithm.gae_lambda) == (0.5, 1.0, 1.0)
    assert (ema.algorithm.ref_policy_ema_tau, ema.algorithm.ref_policy_ema_update_period) == (0.9, 10)
    assert (ema.algorithm.kl_topk_tokens, ema.algorithm.clip_high, ema.task.max_turns) == (32, 0.28, 4)


def test_quirks_are_off_unless_asked_for() -> None:
    compat = load_config("searchr1_published_grpo").compat
    assert not any((compat.answer_over_prompt, compat.sampled_validation, compat.observations_in_values))
    assert compat.validation_batch is None
    quirky = load_config("searchr1_published_grpo", ["compat=search_r1"])
    assert list(algorithm_problems(quirky)) == []
    assert quirky.compat.answer_over_prompt
    assert quirky.compat.validation_batch == 256


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["algorithm.n_samples=1"], ["algorithm.n_samples=1", "no sibling", "baseline=group"]),
        (
            ["algorithm=rloo", "algorithm.n_samples=1"],
            ["algorithm.n_samples=1", "baseline=leave_one_out", "at least 2"],
        ),
        (["algorithm.baseline=critic"], ["advantage_scale=group", "baseline=critic", "whiten or none"]),
        (["algorithm=ppo", "algorithm.advantage_scale=batch"], ["advantage_scale=batch", "token by token"]),
        (
            ["algorithm=ppo", "algorithm.credit=turn"],
            ["algorithm.credit=turn", "gae_lambda", "set credit=token"],
        ),
        (["algorithm=ppo", "critic.optimizer.min_lr=0.1"], ["critic.optimizer.min_lr=0.1", "lower it"]),
        (
            ["algorithm=ppo", "cluster.placement.actor='0,3'", "cluster.placement.critic=3"],
            ["critic", "share rank 3"],
        ),
        (["algorithm.use_kl_iw=true", "algorithm.kl_in=reward"], ["algorithm.use_kl_iw", "kl_in is reward"]),
        (
            ["algorithm.use_kl_iw=true", "algorithm.kl_iw_clip_lower=1.5"],
            ["kl_iw_clip_lower=1.5", "either side of 1"],
        ),
        (
            ["algorithm.kl_control=adaptive", "algorithm.kl_in=reward", "algorithm.kl_coef=0"],
            ["algorithm.kl_control=adaptive", "kl_coef 0"],
        ),
        (
            ["algorithm.ref_policy_reset_period=5", "algorithm.kl_coef=0"],
            ["ref_policy_reset_period=5", "nothing uses"],
        ),
        (
            ["algorithm.eval_ref_policy=true", "algorithm.kl_coef=0", "algorithm.recompute_logprobs=false"],
            ["eval_ref_policy=True", "inference group", "recompute_logprobs=true"],
        ),
        (["rollout.sampling.top_k=20"], ["top_k=20", "truncated"]),
        (["task.tags.answer=think"], ["answer=think", "none of them think"]),
        (
            ["algorithm=ema_pg", "algorithm.kl_topk_tokens=null"],
            ["algorithm.use_kl_iw=true", "samples nothing"],
        ),
        (
            ["algorithm=ema_pg", "algorithm.kl_use_tail_sampling=false"],
            ["algorithm.use_kl_iw=true", "set it to false"],
        ),
        (["algorithm.credit=token"], ["algorithm.credit=token", "baseline=group", "turn or trajectory"]),
        (["algorithm.gamma=0.9"], ["algorithm.gamma=0.9", "discounts nothing"]),
        (["algorithm.gae_lambda=0.9"], ["algorithm.gae_lambda=0.9", "no critic"]),
        (
            ["algorithm=reinforce", "algorithm.curation.drop_no_spread=true"],
            ["drop_no_spread", "baseline=batch", "do teach"],
        ),
        (["algorithm=gspo", "algorithm.dual_clip=3"], ["algorithm.dual_clip=3", "policy_loss=ppo"]),
        (["algorithm.dual_clip=1"], ["algorithm.dual_clip=1", "above 1"]),
        (["algorithm.loss_length=100"], ["algorithm.loss_length=100", "fixed-length", "token-mean"]),
        (["algorithm.kl_estimator=k1"], ["algorithm.kl_estimator=k1", "zero on average", "kl_in=reward"]),
        (
            ["algorithm.kl_in=reward", "algorithm.kl_estimator=k3++"],
            ["algorithm.kl_estimator=k3++", "by its gradient", "k1, k2, k3, abs"],
        ),
        (
            ["algorithm.kl_in=reward", "algorithm.kl_estimator=full_reverse"],
            ["algorithm.kl_estimator=full_reverse", "whole distributions"],
        ),
        (["algorithm.kl_topk_tokens=8"], ["algorithm.kl_topk_tokens=8", "full_reverse", "kl_estimator=k3"]),
        (["algorithm.kl_topk_tail=upstream"], ["algorithm.kl_topk_tail=upstream", "kl_topk_tokens is null"]),
        (["algorithm.kl_use_tail_sampling=false"], ["kl_use_tail_sampling=false", "kl_topk_tokens is null"]),
        (
            ["algorithm.kl_in=reward", "algorithm.kl_control=adaptive", "algorithm.kl_horizon=51"],
            ["algorithm.kl_horizon=51", "256 episodes"],
        ),
        (["algorithm.kl_control=adaptive"], ["algorithm.kl_control=adaptive", "kl_in is loss"]),
        (["algorithm.use_kl_iw=true", "algorithm.kl_coef=0"], ["algorithm.use_kl_iw", "kl_coef 0"]),
        (["algorithm.kl_iw_clip_upper=2"], ["kl_iw_clip_upper=2", "use_kl_iw=true"]),
        (["algorithm.use_kl_iw=true", "algorithm.kl_iw_clip_upper=0.5"], ["either side of 1"]),
        (
            ["algorithm.ref_policy_ema_tau=0.9", "algorithm.kl_coef=0"],
            ["ref_policy_ema_tau=0.9", "kl_coef=0"],
        ),
        (["algorithm.ref_policy_ema_tau=1.5"], ["algorithm.ref_policy_ema_tau=1.5", "from 0 to 1"]),
        (["algorithm.eval_ref_policy=true"], ["algorithm.eval_ref_policy=true", "stays what it was"]),
        (["algorithm=ppo", "critic.warmup_steps=12"], ["critic.warmup_steps=12", "trainer.steps=12"]),
        (["algorithm=ppo", "critic.micro_batch_tokens=99"], ["critic.micro_batch_tokens=99", "one episode"]),
        (["algorithm=ppo", "critic.parallel.tp=3"], ["critic.parallel", "tp*pp*cp = 3*1*1"]),
        (["cluster.placement.critic=3"], ["cluster.placement.critic", "algorithm.baseline"]),
        (["rollout.sampling.top_p=0.9"], ["top_p=0.9", "truncated", "accept_truncation=true"]),
        (["reward.terms={exactmatch: 1}"], ["reward.terms.exactmatch", "exact_match"]),
        (["reward.terms={judge: 1}"], ["reward.judge.url"]),
        (["reward.terms={no_such_module.reward: 1}"], ["no_such_module"]),
        (["algorithm=ema_pg", "algorithm.kl_topk_tokens=9999"], ["kl_topk_tokens=9999", "320"]),
    ],
    ids=lambda value: " ".join(value) if value and "=" in value[0] else "",
)
def test_what_does_not_fit_is_refused_with_the_reason(
    tiny_run: TinyRun, overrides: list[str], named: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        validate(tiny_run(*overrides))
    sentences = str(caught.value).splitlines()
    assert any(all(part in sentence for part in named) for sentence in sentences), sentences


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.sampling.top_p=0.9", "rollout.sampling.accept_truncation=true"],
        ["algorithm=ppo", "algorithm.n_samples=1"],
        ["algorithm=ppo", "cluster.placement.critic=3"],
        ["algorithm.kl_in=reward", "algorithm.kl_control=adaptive"],
        ["algorithm=ema_pg", "algorithm.eval_ref_policy=true"],
        ["algorithm=ema_pg", "algorithm.kl_topk_tokens=null", "algorithm.use_kl_iw=false"],
        ["algorithm.credit=turn", "algorithm.gamma=0.9"],
        ["reward.terms={correct_answer: 10.0, search_penalty: -0.1, invalid_format: -5.0}"],
    ],
    ids=" ".join,
)
def test_what_fits_is_taken(tiny_run: TinyRun, overrides: list[str]) -> None:
    validate(tiny_run(*overrides))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["algorithm.policy_loss=gspo"], ["algorithm.clip_high=0.2", "algorithm=gspo"]),
        (["algorithm=rloo"], ["policy_gradient", "trainer.mini_batches=4", "1 is exact"]),
        (["algorithm=rloo", "trainer.mini_batches=1"], None),
        (["algorithm=gspo"], None),
    ],
)
def test_what_runs_otherwise_than_meant_is_noted(
    tiny_run: TinyRun, overrides: list[str], named: list[str] | None
) -> None:
    config = tiny_run(*overrides)
    validate(config)
    notes = make_plan(config)["notes"]
    assert len(notes) == (named is not None)
    assert all(part in notes[0] for part in named or ())
