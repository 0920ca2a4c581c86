"""Tests of algorithm presets, and of algorithm settings that contradict each other."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import get_type_hints

import pytest

from rlsys.algorithms.losses import POLICY_LOSSES
from rlsys.config.algorithm import AdvantageBaseline, AdvantageScale, Aggregation, AlgorithmConfig, LldsGate
from rlsys.config.compose import PROJECT_CONFIGS, load_config
from rlsys.config.derived import mini_batch_sizes
from rlsys.config.problems import algorithm_problems, conflict
from rlsys.config.schema import RunConfig, variants
from rlsys.orchestrator.validate import validate

TinyRun = Callable[..., RunConfig]
PRESETS = sorted(file.stem for file in (PROJECT_CONFIGS / "algorithm").glob("*.yaml"))
DOCS = PROJECT_CONFIGS.parent / "docs"


def test_presets_match_the_documents_table_and_cite_their_source() -> None:
    page = (DOCS / "algorithms.md").read_text().partition("## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == PRESETS
    texts = [(PROJECT_CONFIGS / "algorithm" / f"{name}.yaml").read_text() for name in PRESETS]
    assert all("arXiv" in text or "Williams 1992" in text for text in texts)


def rows(section: str) -> dict[str, list[str]]:
    """Return the rows of the tables in a section of the page, without heads: first column -> other columns."""
    page = (DOCS / "algorithms.md").read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    return {
        name: re.split(r"(?<!\\) \| ?", rest)
        for name, rest in re.findall(r"^\| `(\S+)` \| (.*)\|$(?!\n\|---)", page, re.MULTILINE)
    }


def test_documents_tables_have_every_kind() -> None:
    assert {*rows("Policy loss and aggregation")} == {*POLICY_LOSSES} | {*map(str, Aggregation)}
    assert {*rows("Advantages")} == {*map(str, AdvantageBaseline)} | {*map(str, AdvantageScale)}
    assert {*rows("Lazy likelihood displacement")} == {*map(str, LldsGate)}
    assert {*rows("The reference policy")} == {*variants(get_type_hints(AlgorithmConfig)["kl_estimator"])}


@pytest.mark.parametrize("kind", [*variants(get_type_hints(AlgorithmConfig)["kl_estimator"])])
def test_documents_say_where_a_kl_estimator_is_refused(tiny_run: TinyRun, kind: str) -> None:
    allowed = rows("The reference policy")[kind][3:6]
    for place, said in zip(("loss", "reward", "advantage"), allowed, strict=True):
        run = tiny_run("algorithm.kl_coef=0.1", f"algorithm.kl_estimator.kind={kind}", f"algorithm.kl_in={place}")
        refused = any("kl_estimator" in problem for problem in algorithm_problems(run))
        assert refused == (said.strip() != "yes"), (place, said)


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_composes_by_its_name_alone(tiny_run: TinyRun, preset: str) -> None:
    run = tiny_run(f"algorithm={preset}")
    if preset == "opd":
        # Its policy is its own teacher, for want of another model here.
        run.algorithm.teacher.model = run.model.path
    validate(run)


TENTHS = (51, 51, 51, 51, 52, 51, 51, 51, 51, 52)
"""Groups of each of ten updates of a step of 512: they end after 51.2, 102.4, ... 512 groups, rounded down."""


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("searchr1_published_grpo", TENTHS), ("searchr1_published_ppo", (256, 256)), ("ema_pg_published", TENTHS)],
)
def test_published_mini_batch_of_256_episodes_differs_by_less_than_a_group(name: str, sizes: tuple[int, ...]) -> None:
    run = load_config(name, ["compat=search_r1"])
    assert mini_batch_sizes(run.trainer.prompts_per_step, run.trainer.mini_batches) == sizes
    assert all(abs(size * run.algorithm.n_samples - 256) < run.algorithm.n_samples for size in sizes)
    assert list(algorithm_problems(run)) == []
    assert run.compat.answer_over_prompt
    assert not load_config(name).compat.answer_over_prompt


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ("algorithm=rloo n_samples=1", "n_samples"),
        ("algorithm=ppo curation.drop_no_spread=true", "curation.drop_no_spread"),
        ("advantage.baseline=none", "advantage.scale"),
        ("advantage.credit=token", "advantage.credit"),
        ("advantage.gamma=0.9", "advantage.gamma"),
        ("algorithm=reinforce curation.drop_no_spread=true", "curation.drop_no_spread"),
        ("loss_length=100", "loss_length"),
        ("correction.kind=mask correction.low=1.5", "correction.low"),
        ("correction.kind=reject correction.high=0.5", "correction.low"),
        ("correction.kind=truncate correction.level=geometric", "correction.level"),
        ("old_logprobs=engine correction.kind=truncate", "correction.kind"),
        ("llds.coef=0.2 trainer.mini_batches=1", "llds.coef"),
        ("old_logprobs=actor", "old_logprobs"),
        ("old_logprobs=actor trainer.mini_batches=1 kl_in=reward kl_estimator=k1", "old_logprobs"),
        ("algorithm=opd teacher.model=http://a:1 trainer.mini_batches=1 old_logprobs=actor", "old_logprobs"),
        ("algorithm=opd", "kl_in"),
        ("algorithm=opd teacher.model=a kl_estimator=k3", "kl_estimator.kind"),
        ("algorithm=opd teacher.model=a kl_coef=0", "teacher.model"),
        ("algorithm=opd teacher.model=a ref_policy_ema_tau=0.9", "ref_policy_ema_tau"),
        ("algorithm=opd teacher.model=a curation.drop_no_spread=true", "curation.drop_no_spread"),
        ("algorithm=opd teacher.model=a kl_control=adaptive", "kl_control"),
        ("algorithm=opd teacher.model=a eval_ref_policy=true", "eval_ref_policy"),
        ("algorithm=opd teacher.model=http://a:1 rollout.sampling.temperature=0.7", "rollout.sampling.temperature"),
        ("teacher.model=http://a:1 kl_estimator=full_reverse", "kl_estimator.kind"),
        ("old_logprobs=engine kl_estimator=full_reverse kl_estimator.topk_tokens=8", "kl_estimator.topk_tokens"),
        ("kl_estimator=k1", "kl_estimator.kind"),
        ("kl_in=reward kl_estimator=k3++", "kl_estimator.kind"),
        ("kl_estimator=full_reverse kl_estimator.topk_tail=upstream", "kl_estimator.topk_tail"),
        ("kl_estimator=full_reverse kl_estimator.use_tail_sampling=false", "kl_estimator.use_tail_sampling"),
        ("algorithm=ema_pg kl_estimator.topk_tokens=null", "use_kl_iw"),
        ("algorithm=ema_pg kl_estimator.use_tail_sampling=false", "use_kl_iw"),
        ("use_kl_iw=true kl_in=reward", "use_kl_iw"),
        ("use_kl_iw=true kl_iw_clip_lower=1.5", "kl_iw_clip_lower"),
        ("kl_iw_clip_upper=2", "kl_iw_clip_lower"),
        ("kl_control=adaptive", "kl_control"),
        ("kl_control=adaptive kl_in=reward kl_horizon=51", "kl_horizon"),
        ("ref_policy_reset_period=5 kl_coef=0", "ref_policy_ema_tau"),
        ("eval_ref_policy=true", "eval_ref_policy"),
        ("model.lora.rank=4 ref_policy_ema_tau=0.9", "model.lora.rank"),
        ("model.lora.rank=4 ref_policy_reset_period=5", "model.lora.rank"),
        ("algorithm=ppo critic.warmup_steps=12", "critic.warmup_steps"),
        ("rollout.sampling.top_k=20", "rollout.sampling.top_p"),
        ("rollout.sampling.top_p=0.9", "rollout.sampling.top_p"),
    ],
)
def test_conflicting_settings_are_each_named_once(tiny_run: TinyRun, settings: str, keys: str) -> None:
    found = [conflict(sentence) for sentence in algorithm_problems(tiny_run(*map(whole, settings.split())))]
    assert [problem.key for problem in found] == [whole(key) for key in keys.split()]


def whole(name: str) -> str:
    """Return the full key of `name`; a name without a section is in `algorithm`."""
    return name if name.startswith(("algorithm=", "critic.", "model.", "rollout.", "trainer.")) else f"algorithm.{name}"


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.sampling.top_p=0.9", "rollout.sampling.accept_truncation=true"],
        ["algorithm=ppo", "algorithm.n_samples=1", "cluster.placement.critic=3"],
        ["algorithm.llds.coef=0.2", "trainer.mini_batches=1", "trainer.schedule=async"],
        ["algorithm.kl_in=reward", "algorithm.kl_control=adaptive", "algorithm.kl_horizon=52"],
        ["algorithm=ema_pg", "algorithm.eval_ref_policy=true"],
        ["algorithm=ema_pg", "algorithm.kl_estimator.topk_tokens=null", "algorithm.use_kl_iw=false"],
        ["reward.terms={correct_answer: 10.0, search_penalty: -0.1, invalid_format: -5.0}"],
    ],
    ids=" ".join,
)
def test_compatible_settings_are_accepted(tiny_run: TinyRun, overrides: list[str]) -> None:
    validate(tiny_run(*overrides))
