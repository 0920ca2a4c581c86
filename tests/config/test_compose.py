"""Tests of composing configs from files, groups and the command line, and of settings that must stay on resume."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlsys.config.algorithm import (
    AdvantageBaseline,
    AdvantageScale,
    AlgorithmConfig,
    Credit,
    FullKl,
    GaeAdvantage,
    PolicyGradientLoss,
    PpoLoss,
    ReturnsAdvantage,
    SampledKl,
)
from rlsys.config.compose import KeyDifference, as_dict, differences, load_config, recorded, typed
from rlsys.config.schema import (
    AsyncSchedule,
    Device,
    Dtype,
    OnUpdate,
    PipelinedSchedule,
    RunConfig,
    SequentialSchedule,
    TokenMode,
    TrainerConfig,
)
from rlsys.errors import Code
from tests.support.refusals import refused

NAME = "searchr1_tiny_cpu"
TinyRun = Callable[..., RunConfig]


@pytest.mark.parametrize(
    ("override", "code", "key"),
    [
        ("trainer.stepz=5", "unknown", "trainer.stepz"),
        ("++algoritm.kl_coef=0", "unknown", "algoritm"),
        ("actor.parallel={tpp: 2}", "unknown", "actor.parallel.tpp"),
        ("trainer.steps=1.5", "wrong_type", "trainer.steps"),
        ("trainer.steps=null", "wrong_type", "trainer.steps"),
        ("actor.parallel.pp_layers=[two]", "wrong_type", "actor.parallel.pp_layers[0]"),
        ("actor.parallel=3", "wrong_type", "actor.parallel"),
        ("cluster.placement=3", "wrong_type", "cluster.placement"),
        ("model.dtype=float64", "unknown", "model.dtype"),
        ("model=nope", "unknown", "model"),
        ("trainer.seed=${nowhere}", "malformed", "trainer.seed"),
        ("trainer.steps=[1", "malformed", "trainer.steps=[1"),
        ("hydra.run.dir=there", "malformed", "hydra.run.dir=there"),
        ("trainer.steps=1,2", "unsupported", "trainer.steps"),
        ("~trainer.steps", "unsupported", "trainer.steps"),
        ("task.train_path=???", "missing", "task.train_path"),
    ],
)
def test_bad_override_is_refused_by_its_key(override: str, code: Code, key: str) -> None:
    with refused(code, key) as caught:
        load_config(NAME, [override])
    assert "\n" not in str(caught.value)


def test_unknown_config_name_is_refused_with_the_known_names(tmp_path: Path) -> None:
    with refused("unknown", "--config-name") as caught:
        load_config("searchr1_huge")
    assert NAME in str(caught.value)
    with refused("not_found", "--config-name"):
        load_config(str(tmp_path / "no such.yaml"))


@pytest.mark.parametrize(
    ("yaml", "code", "key"),
    [
        ("defaults: [rlsys_schema, _self_]\ntrainer: {steps: 3}\n", "missing", "model.path"),
        ("defaults: [rlsys_schema, _self_]\ntrainer: {step: 3}\n", "unknown", "trainer.step"),
        ("defaults: [rlsys_schema, _self_]\ntrainer: {steps: [}\n", "malformed", None),
        ("defaults: [rlsys_schema, other, _self_]\n", "not_found", None),
        ("defaults: 3\n", "malformed", None),
        ("trainer: {steps: 3}\n", "malformed", None),
        ("", "malformed", None),
    ],
)
def test_mistake_in_a_config_file_is_refused_by_key_or_file(
    tmp_path: Path, yaml: str, code: Code, key: str | None
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(yaml)
    with refused(code, key or file) as caught:
        load_config("bad", (), tmp_path)
    assert "\n" not in str(caught.value)


def test_values_arrive_typed_from_file_group_and_command_line() -> None:
    config = load_config(
        NAME, ["trainer.steps=7", "task.token_mode=append", "actor.parallel.pp_layers=[1,3]", 'name="a b"']
    )
    assert (config.trainer.steps, config.name) == (7, "a b")  # set by the command line
    assert config.task.token_mode is TokenMode.append
    assert config.actor.parallel.pp_layers == [1, 3]
    assert config.algorithm.n_samples == 8  # set by the file
    assert config.model.dtype is Dtype.float32  # set by the profile, which is a global package
    assert config.cluster.placement == {"actor": "0", "inference": "1", "rollout": "2"}  # set by a group
    assert config.trainer.seed == 1234  # the schema's default
    # A composition leaves nothing behind for the next one.
    assert load_config("searchr1_qwen2.5_3b_1node").cluster.device is Device.gpu
    assert load_config(NAME).trainer.steps != 7


def test_own_config_extends_the_projects_from_any_folder(tmp_path: Path) -> None:
    file = tmp_path / "my configs" / "mine.v2.yaml"
    file.parent.mkdir()
    file.write_text("defaults: [searchr1_tiny_cpu, override algorithm: rloo, _self_]\nname: mine\n")
    config = load_config(str(file), ["trainer.steps=3"])
    assert (config.name, config.trainer.steps, config.cluster.device) == ("mine", 3, Device.cpu)
    assert config.algorithm.advantage == ReturnsAdvantage(
        baseline=AdvantageBaseline.leave_one_out, scale=AdvantageScale.none
    )


def test_tiny_run_fixture_equals_what_hydra_composes(tiny_run: TinyRun, files: list[str]) -> None:
    overrides = ["algorithm=ppo", "cluster.placement={critic: 3}", "reward.terms={f1: 0.5}", "search.index=no"]
    overrides += ["rollout.engine=transformers", "trainer.schedule=async", "task.agent.kind=react"]
    overrides += ["actor.optimizer=torch.optim.RAdam", "actor.optimizer.lr=2e-3"]
    assert tiny_run(*overrides) == load_config(NAME, [*files, *overrides])


ASYNC = {"kind": "async", "max_staleness": 4, "on_update": "continue"}
FOUR = AsyncSchedule("async", 4, OnUpdate("continue"))
Composed = Callable[..., Any]


@pytest.fixture
def composed(tmp_path: Path) -> Composed:
    """Function that composes a schedule from the file `mine`, the file `beneath` that it extends, and overrides."""

    def compose(mine: dict[str, Any], beneath: dict[str, Any], *overrides: str) -> Any:
        files = {"beneath": ("searchr1_tiny_cpu", beneath), "mine": ("beneath", mine)}
        for name, (base, schedule) in files.items():
            tree = {"defaults": [base, "_self_"], "trainer": {"schedule": schedule}}
            (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(tree))
        return load_config("mine", overrides, tmp_path).trainer.schedule

    return compose


@pytest.mark.parametrize(
    ("mine", "beneath", "overrides", "expected"),
    [
        (ASYNC, {}, (), FOUR),
        (ASYNC, {}, ("trainer.schedule.kind=pipelined",), PipelinedSchedule()),
        ({}, ASYNC, ("trainer.schedule={kind: sequential}",), SequentialSchedule()),
        ({"kind": "sequential"}, ASYNC, ("trainer.schedule.kind=async",), FOUR),
        (ASYNC, {}, ("trainer.schedule.max_staleness='2'",), AsyncSchedule("async", 2, FOUR.on_update)),
        ({"max_staleness": 2}, {"kind": "async"}, (), AsyncSchedule("async", 2)),
        (ASYNC, {}, ("trainer.schedule=pipelined",), PipelinedSchedule()),
        (ASYNC, {}, ("trainer.schedule=async", "trainer.schedule.max_staleness=4"), FOUR),
    ],
)
def test_schedule_kind_keeps_its_own_keys_and_drops_inherited_ones(
    composed: Composed, mine: dict[str, Any], beneath: dict[str, Any], overrides: tuple[str, ...], expected: Any
) -> None:
    assert composed(mine, beneath, *overrides) == expected


STALENESS, KIND = "trainer.schedule.max_staleness", "trainer.schedule.kind"


@pytest.mark.parametrize(
    ("mine", "beneath", "overrides", "code", "key"),
    [
        ({}, {}, (f"{STALENESS}=4",), "conflict", STALENESS),
        (ASYNC, {}, ("trainer.schedule={kind: sequential, max_staleness: 4}",), "conflict", STALENESS),
        ({"kind": "pipelined", "max_staleness": 4}, {}, (), "conflict", STALENESS),
        ({"max_staleness": 4}, {"kind": "pipelined"}, (), "conflict", STALENESS),
        ({}, {}, (f"{KIND}=asnyc",), "unknown", KIND),
        ({}, {}, ("trainer.schedule=asnyc",), "unknown", KIND),
    ],
)
def test_keys_of_another_schedule_kind_are_refused(
    composed: Composed, mine: dict[str, Any], beneath: dict[str, Any], overrides: tuple[str, ...], code: Code, key: str
) -> None:
    with refused(code, key):
        composed(mine, beneath, *overrides)


def test_recorded_config_of_a_run_is_refused_as_a_config_file(tmp_path: Path) -> None:
    (tmp_path / "record.yaml").write_text(yaml.safe_dump(as_dict(RunConfig())))
    with refused("malformed", tmp_path / "record.yaml"):
        load_config("record", (), tmp_path)


@pytest.mark.parametrize(
    ("value", "hint", "meant"),
    [("5", int, 5), (5, str, "5"), (5, float, 5.0), ("1e-6", float, 1e-6), ("yes", bool, True), (0, bool, False)],
)
def test_plain_value_is_converted_to_its_type(value: Any, hint: type, meant: Any) -> None:
    found = typed(value, hint, "key")
    assert (found, type(found)) == (meant, hint)


@pytest.mark.parametrize(("value", "hint"), [("1.5", int), (1.5, int), (True, int), ("many", float), ("many", bool)])
def test_plain_value_of_another_type_is_refused(value: Any, hint: type) -> None:
    with refused("wrong_type", "key"):
        typed(value, hint, "key")


@pytest.mark.parametrize(
    "setting",
    [
        "algorithm.kl_coef=0.5",
        "actor.optimizer.lr=1e-7",
        "critic.value_clip=0.1",
        "trainer.prompts_per_step=16",
        "task.tags.search=find",
        "reward.terms={exact_match: 2.0}",
        "rollout.sampling.temperature=0.7",
        "search.topk=5",
    ],
)
def test_learning_settings_must_not_change_on_resume(tiny_run: TinyRun, setting: str) -> None:
    key, _, value = setting.partition("=")
    key += ".exact_match" if value.startswith("{") else ""
    assert [one.key for one in differences(as_dict(tiny_run()), tiny_run(setting))] == [key]


def test_placement_and_speed_settings_may_change_on_resume(tiny_run: TinyRun) -> None:
    changed = tiny_run(
        "trainer.steps=99",
        "actor.parallel.tp=2",
        "cluster.placement={actor: '0-1', inference: '2', rollout: '3'}",
        "search.url=http://127.0.0.1:9000",
        "eval.interval=9",
        "checkpoint.keep_last=1",
        "task.train_path=elsewhere.jsonl",
        "resume=auto",
    )
    assert differences(as_dict(tiny_run()), changed) == []


def test_steps_must_not_change_if_the_learning_rate_depends_on_them(tiny_run: TinyRun) -> None:
    for shape in ("actor.optimizer.decay=cosine", "critic.optimizer.warmup_fraction=0.1"):
        found = differences(as_dict(tiny_run(shape)), tiny_run(shape, "trainer.steps=99"))
        assert [one.key for one in found] == ["trainer.steps"]


def test_added_or_removed_key_is_compared_with_its_default(tiny_run: TinyRun) -> None:
    before = as_dict(tiny_run("search.enabled=true"))
    del before["task"]["tools"], before["search"]["enabled"], before["algorithm"]["kl_coef"]
    before["algorithm"]["old_key"] = 1
    found = differences(before, tiny_run("search.enabled=false", "algorithm.kl_coef=0.5"))
    assert [one.key for one in found] == ["algorithm.kl_coef", "algorithm.old_key", "search.enabled"]
    assert found[2] == KeyDifference("search.enabled", True, False)


def test_renamed_key_of_an_older_run_counts_under_its_new_name(tiny_run: TinyRun) -> None:
    before = as_dict(tiny_run("reward.custom_timeout_s=5"))
    before["reward"] = {"own_timeout_s": 5.0} | {k: v for k, v in before["reward"].items() if k != "custom_timeout_s"}
    assert differences(before, tiny_run("reward.custom_timeout_s=5")) == []
    assert [one.key for one in differences(before, tiny_run())] == ["reward.custom_timeout_s"]


FORMER_PPO = {
    "kl_estimator": "k1",
    **{"baseline": "critic", "advantage_scale": "whiten", "credit": "token", "gamma": 0.5, "gae_lambda": 0.9},
    **{"policy_loss": "ppo", "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 3.0},
    **{"kl_topk_tokens": None, "kl_topk_tail": "exact", "kl_use_tail_sampling": True},
}
FORMER_EMA = FORMER_PPO | {
    **{"baseline": "leave_one_out", "advantage_scale": "none", "credit": "turn"},
    **{"policy_loss": "policy_gradient", "kl_estimator": "full_forward", "kl_topk_tokens": 8},
}


@pytest.mark.parametrize(
    ("former", "present"),
    [
        (
            FORMER_PPO,
            {
                "advantage": GaeAdvantage(gamma=0.5, gae_lambda=0.9, whiten=True),
                "policy_loss": PpoLoss(clip_low=0.1, clip_high=0.3, dual_clip=3.0),
                "kl_estimator": SampledKl("k1"),
            },
        ),
        (
            FORMER_EMA,
            {
                "advantage": ReturnsAdvantage(
                    baseline=AdvantageBaseline.leave_one_out,
                    scale=AdvantageScale.none,
                    credit=Credit.turn,
                    gamma=0.5,
                ),
                "policy_loss": PolicyGradientLoss(),
                "kl_estimator": FullKl("full_forward", topk_tokens=8),
            },
        ),
    ],
)
def test_algorithm_keys_of_an_older_run_are_read_into_their_groups(
    former: dict[str, Any], present: dict[str, Any]
) -> None:
    now = RunConfig(algorithm=AlgorithmConfig(**present))
    before = as_dict(now)
    before["algorithm"] = {key: value for key, value in before["algorithm"].items() if key not in present} | former
    assert differences(before, now) == []
    other = RunConfig(algorithm=AlgorithmConfig(**present, n_samples=7))
    assert [one.key for one in differences(before, other)] == ["algorithm.n_samples"]


def test_changed_schedule_kind_is_a_difference() -> None:
    now = RunConfig(trainer=TrainerConfig(schedule=AsyncSchedule(max_staleness=2)))
    found = [(one.key, one.before, one.now) for one in differences(as_dict(RunConfig()), now)]
    assert ("trainer.schedule.kind", "pipelined", "async") in found
    assert ("trainer.schedule.max_staleness", None, 2) in found


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)
PLACES = [
    "task",
    "task.agent",
    "task.agent.kind",
    "task.tools",
    "task.invalid_message",
    "algorithm",
    "algorithm.baseline",
]
PLACES += [
    "algorithm.advantage.kind",
    "algorithm.recompute_logprobs",
    "algorithm.policy_loss",
    "reward",
    "rollout.engine",
]


@given(st.dictionaries(st.sampled_from(PLACES), JSON, max_size=4))
def test_a_damaged_record_is_converted_without_an_error(values: dict[str, Any]) -> None:
    tree = as_dict(RunConfig())
    for place, value in sorted(values.items()):
        *above, last = place.split(".")
        inner = reduce(lambda at, key: at[key] if isinstance(at.get(key), dict) else {}, above, tree)
        inner[last] = value
    assert recorded(tree)["trainer"] == as_dict(RunConfig())["trainer"]


@pytest.mark.parametrize(
    "schedule", [SequentialSchedule(), PipelinedSchedule(), AsyncSchedule(max_staleness=0)], ids=lambda one: one.kind
)
def test_old_record_with_keys_of_every_kind_shows_no_difference(schedule: Any) -> None:
    """Earlier versions wrote all three keys of every schedule, and did not yet have the keys deleted here."""
    now = RunConfig(trainer=TrainerConfig(schedule=schedule))
    old = as_dict(now)
    old["trainer"]["schedule"] = {"max_staleness": 7, "on_update": "finish", **old["trainer"]["schedule"]}
    del old["actor"]["optimizer"]["kind"], old["rollout"]["engine"]["kind"], old["task"]["tools"]
    assert recorded(old) == as_dict(now)
    assert differences(old, now) == []
