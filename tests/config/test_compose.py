"""Bad YAML and bad overrides become one sentence that names the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.config.compose import as_dict, load_config
from rlsys.config.schema import Device, Dtype, RunConfig, TokenMode, schema_keys
from rlsys.errors import UserError

NAME = "searchr1_tiny_cpu"


def complaint(*overrides: str, name: str = NAME, config_dir: Path | None = None) -> str:
    with pytest.raises(UserError) as caught:
        load_config(name, overrides, config_dir)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert sentence.endswith((".", "?"))
    return sentence


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("trainer.stepz=5", ["trainer.stepz is not a key", "did you mean trainer.steps?"]),
        ("+trainer.stepz=5", ["trainer.stepz is not a key", "did you mean trainer.steps?"]),
        ("++algoritm.kl_coef=0", ["algoritm is not a key"]),
        ("actor.parallel={tpp: 2}", ["actor.parallel.tpp is not a key", "did you mean actor.parallel.tp?"]),
        ("optimizer.lr=1", ["optimizer is not a key", "did you mean actor.optimizer.lr?"]),
        ("cluster.placment.critic=3", ["cluster.placment", "cluster.placement"]),
        ("lr=1", ["lr is not a key", "docs/configuration.md"]),
        ("trainer.steps=many", ["trainer.steps=many must be a whole number; see docs/configuration.md."]),
        ("trainer.steps=1.5", ["trainer.steps=1.5 must be a whole number"]),
        ("trainer.steps=null", ["trainer.steps=null must be a whole number"]),
        ("rollout.sampling.top_p=high", ["rollout.sampling.top_p=high must be a number"]),
        ("model.recompute=maybe", ["model.recompute=maybe must be true or false"]),
        ("model.dtype=float64", ["model.dtype=float64 must be float32 or bfloat16"]),
        ("actor.parallel.pp_layers=[two]", ["actor.parallel.pp_layers[0]=two must be a whole number"]),
        ("actor.parallel.pp_layers=3", ["actor.parallel.pp_layers=3 must be a list"]),
        ("actor.parallel=3", ["actor.parallel=3 must be a group of keys"]),
        ("cluster.placement=3", ["cluster.placement=3 must be a map"]),
        ("trainer.seed=${nowhere}", ["trainer.seed", "nowhere"]),
        ("model=nope", ["model=nope is not a choice of model", "qwen3-30b-a3b, tiny"]),
        ("algorithm=pop", ["algorithm=pop is not a choice of algorithm", "grpo"]),
        ("task.train_path=???", ["task.train_path has no value", "task.train_path=VALUE"]),
        ("trainer.steps", ['"trainer.steps" is not a setting', "KEY=VALUE"]),
        ("trainer steps=3", ['"trainer steps=3" is not a setting', "KEY=VALUE"]),
        ("=3", ['"=3" is not a setting', "KEY=VALUE"]),
        ("hydra.run.dir=there", ['"hydra.run.dir=there" is not a setting']),
        ("trainer.steps=[1", ['"trainer.steps=[1"', "quotes"]),
        ("trainer.steps=1,2", ["trainer.steps=1,2 is a sweep", "start a run for each"]),
        ("trainer.steps=range(1,3)", ["trainer.steps=range(1,3) is a sweep"]),
        ("~trainer.steps", ['"~trainer.steps" would take a key out', "another value"]),
    ],
)
def test_a_bad_override_is_named_in_one_sentence(override: str, named: list[str]) -> None:
    sentence = complaint(override)
    for words in named:
        assert words in sentence


def test_an_unknown_config_name_lists_the_known() -> None:
    sentence = complaint(name="searchr1_huge")
    assert "--config-name searchr1_huge" in sentence
    assert "searchr1_qwen2.5_3b_1node, " in sentence
    assert ", searchr1_tiny_cpu." in sentence


def test_a_config_without_a_required_value_names_it(tmp_path: Path) -> None:
    (tmp_path / "bare.yaml").write_text("defaults: [rlsys_schema, _self_]\ntrainer: {steps: 3}\n")
    assert complaint(name="bare", config_dir=tmp_path).startswith("model.path has no value")


@pytest.mark.parametrize(
    ("yaml", "named"),
    [
        ("defaults: [rlsys_schema, _self_]\ntrainer: {step: 3}\n", "trainer.step is not a key"),
        ("defaults: [rlsys_schema, _self_]\ntrainer: {steps: many}\n", "trainer.steps=many must be a whole number"),
        ("defaults: [rlsys_schema, _self_]\ntrainer: 3\n", "trainer=3 must be a group of keys"),
        ("defaults: [rlsys_schema, _self_]\ntrainer: {steps: [}\n", "bad.yaml, line 2 is not YAML"),
        ("defaults: [rlsys_schema, other, _self_]\n", "Could not load 'other'"),
        ("defaults: 3\n", "defaults must be a list"),
        ("- 1\n", "'bad' must be a DictConfig"),
        ("trainer: {steps: 3}\n", "bad.yaml does not build on the schema"),
        ("", "bad.yaml does not build on the schema"),
    ],
)
def test_a_mistake_in_the_file_is_one_sentence(tmp_path: Path, yaml: str, named: str) -> None:
    (tmp_path / "bad.yaml").write_text(yaml)
    assert named in complaint(name="bad", config_dir=tmp_path)


def test_values_arrive_typed_from_file_group_and_command_line() -> None:
    config = load_config(
        NAME,
        ["trainer.steps=7", "task.token_mode=append", "actor.parallel.pp_layers=[1,3]", 'name="a b"'],
    )
    assert isinstance(config, RunConfig)
    assert (config.trainer.steps, config.name) == (7, "a b")  # the command line
    assert config.task.token_mode is TokenMode.append
    assert config.actor.parallel.pp_layers == [1, 3]
    assert config.algorithm.n_samples == 8  # the file
    assert config.model.dtype is Dtype.float32  # its profile, which is applied globally
    assert config.cluster.device is Device.cpu
    assert config.cluster.placement == {"actor": "0", "inference": "1", "rollout": "2"}  # a group
    assert config.trainer.seed == 1234  # the schema


def test_nothing_of_one_composition_reaches_the_next() -> None:
    untouched = load_config(NAME).trainer.steps
    assert load_config(NAME, [f"trainer.steps={untouched + 7}"]).trainer.steps == untouched + 7
    assert load_config(NAME).trainer.steps == untouched
    assert load_config("searchr1_qwen2.5_3b_1node").cluster.device is Device.gpu


def test_the_published_settings_stand_in_the_one_node_config() -> None:
    """Qwen2.5-3B-Instruct on 8 H100, from RLinf's Search-R1 example."""
    config = load_config("searchr1_qwen2.5_3b_1node")
    assert config.cluster.placement == {"actor": "0-3", "inference": "4", "rollout": "5-7"}
    assert (config.trainer.prompts_per_step, config.algorithm.n_samples) == (512, 5)
    assert (config.actor.optimizer.lr, config.actor.optimizer.beta2) == (1e-6, 0.95)
    assert (config.task.max_prompt_tokens, config.task.max_turn_tokens) == (2048, 500)
    assert config.task.token_mode is TokenMode.retokenize
    assert config.algorithm.recompute_logprobs


def test_as_dict_is_plain_and_has_every_key() -> None:
    def leaves(tree: dict, prefix: str = "") -> list[str]:
        found: list[str] = []
        for key, value in tree.items():
            path = prefix + key
            found += leaves(value, path + ".") if isinstance(value, dict) and path not in keys else [path]
        return found

    keys = set(schema_keys())
    tree = as_dict(load_config(NAME))
    other_kinds = {"trainer.schedule.max_staleness", "trainer.schedule.on_update"}
    assert set(leaves(tree)) == keys - other_kinds
    assert tree["model"]["dtype"] == "float32"
