"""Presets compose by their name alone; keys that do not fit together are refused by the one to change."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from rlsys.config.compose import PROJECT_CONFIGS, load_config
from rlsys.config.problems import Problem, algorithm_problems
from rlsys.config.schema import RunConfig, schema_keys
from rlsys.orchestrator.validate import validate

TinyRun = Callable[..., RunConfig]
PRESETS = sorted(file.stem for file in (PROJECT_CONFIGS / "algorithm").glob("*.yaml"))
DOCS = PROJECT_CONFIGS.parent / "docs"


def test_the_presets_are_those_of_the_documents_table_and_say_their_source() -> None:
    page = (DOCS / "algorithms.md").read_text().partition("## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == PRESETS
    texts = [(PROJECT_CONFIGS / "algorithm" / f"{name}.yaml").read_text() for name in PRESETS]
    assert all("arXiv" in text or "Williams 1992" in text for text in texts)


@pytest.mark.parametrize("page", ["algorithms.md", "rewards.md", "metrics.md", "pipeline.md"])
def test_keys_that_a_page_names_exist(page: str) -> None:
    sections = "|".join(RunConfig.__dataclass_fields__)
    named = re.findall(rf"`((?:{sections})\.[a-z_.]+)[`=]", (DOCS / page).read_text())
    parts = {key.rpartition(".")[0] for key in schema_keys()}
    assert {*named} - {*schema_keys(), *parts, "cluster.placement.critic"} == set()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_composes_by_its_name_alone(tiny_run: TinyRun, preset: str) -> None:
    validate(tiny_run(f"algorithm={preset}"))


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
    assert not grpo.compat.answer_over_prompt
    assert load_config("searchr1_published_grpo", ["compat=search_r1"]).compat.answer_over_prompt


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ("algorithm=rloo n_samples=1", "n_samples"),
        ("baseline=critic", "advantage_scale credit"),
        ("algorithm=ppo advantage_scale=batch", "advantage_scale"),
        ("algorithm=ppo credit=turn", "credit"),
        ("credit=token", "credit"),
        ("gamma=0.9", "gamma"),
        ("gae_lambda=0.9", "gae_lambda"),
        ("algorithm=reinforce curation.drop_no_spread=true", "curation.drop_no_spread"),
        ("algorithm=gspo dual_clip=3", "dual_clip"),
        ("loss_length=100", "loss_length"),
        ("correction.kind=mask correction.low=1.5", "correction.low"),
        ("correction.kind=truncate correction.high=0.5", "correction.low"),
        ("recompute_logprobs=false kl_coef=0 correction.kind=truncate", "correction.kind"),
        ("kl_estimator=k1", "kl_estimator"),
        ("kl_in=reward kl_estimator=k3++", "kl_estimator"),
        ("kl_in=reward kl_estimator=full_reverse", "kl_estimator"),
        ("kl_topk_tokens=8", "kl_topk_tokens"),
        ("kl_topk_tail=upstream", "kl_topk_tail"),
        ("kl_use_tail_sampling=false", "kl_use_tail_sampling"),
        ("algorithm=ema_pg kl_topk_tokens=null", "use_kl_iw"),
        ("algorithm=ema_pg kl_use_tail_sampling=false", "use_kl_iw"),
        ("use_kl_iw=true kl_in=reward", "use_kl_iw"),
        ("use_kl_iw=true kl_iw_clip_lower=1.5", "kl_iw_clip_lower"),
        ("kl_iw_clip_upper=2", "kl_iw_clip_lower"),
        ("kl_control=adaptive", "kl_control"),
        ("kl_control=adaptive kl_in=reward kl_horizon=51", "kl_horizon"),
        ("recompute_logprobs=false", "kl_coef"),
        ("ref_policy_reset_period=5 kl_coef=0", "ref_policy_ema_tau"),
        ("eval_ref_policy=true", "eval_ref_policy"),
        ("algorithm=ppo critic.warmup_steps=12", "critic.warmup_steps"),
        ("rollout.sampling.top_k=20", "rollout.sampling.top_p"),
        ("rollout.sampling.top_p=0.9", "rollout.sampling.top_p"),
    ],
)
def test_settings_that_do_not_go_together_are_each_named_once(tiny_run: TinyRun, settings: str, keys: str) -> None:
    """Names without a section are those of `algorithm`."""
    found = [Problem.of(sentence) for sentence in algorithm_problems(tiny_run(*map(whole, settings.split())))]
    assert [problem.key for problem in found] == [whole(key) for key in keys.split()]


def whole(name: str) -> str:
    """`name` with its section in front."""
    return name if name.startswith(("algorithm=", "critic.", "rollout.")) else f"algorithm.{name}"


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.sampling.top_p=0.9", "rollout.sampling.accept_truncation=true"],
        ["algorithm=ppo", "algorithm.n_samples=1", "cluster.placement.critic=3"],
        ["algorithm.kl_in=reward", "algorithm.kl_control=adaptive", "algorithm.kl_horizon=52"],
        ["algorithm=ema_pg", "algorithm.eval_ref_policy=true"],
        ["algorithm=ema_pg", "algorithm.kl_topk_tokens=null", "algorithm.use_kl_iw=false"],
        ["algorithm.credit=turn", "algorithm.gamma=0.9"],
        ["reward.terms={correct_answer: 10.0, search_penalty: -0.1, invalid_format: -5.0}"],
    ],
    ids=" ".join,
)
def test_settings_that_go_together_are_taken(tiny_run: TinyRun, overrides: list[str]) -> None:
    validate(tiny_run(*overrides))
