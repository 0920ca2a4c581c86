"""Tests of model families from outside of rlsys: the example in training, conversion and runs, and wrong functions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from examples.extend import family as example
from rlsys.apps.api import HttpRetriever, TrainingResult, training_result
from rlsys.apps.api.arguments import RunSettings
from rlsys.apps.cli.convert import app
from rlsys.cluster.planning.resolve import make_plan
from rlsys.config.schema import ParallelConfig
from rlsys.errors import Code, UserError
from rlsys.orchestrator.validate import find_problems
from rlsys.trainer import mesh
from rlsys.trainer.export import load_hf
from rlsys.trainer.model.stage_model import PolicyModel
from rlsys.weights.weight_map import layer_spec_of, read_architecture
from tests.support import tiny_configs
from tests.support.composed import composed
from tests.support.hf_models import assert_same_tensors
from tests.support.made_run import made_run
from tests.support.megatron_processes import Group, on_ranks
from tests.support.refusals import refused
from tests.support.runs import NO_INFERENCE, NO_SEARCH, Finished
from tests.support.tiny_models import ON_SGLANG, even_tokens, tiny_model
from tests.support.tiny_shape import SHAPE
from tests.trainer import reference
from tests.trainer.against_transformers import check_training
from tests.trainer.harness import Layout, local_model

FAMILY = tiny_configs.OWN_FAMILY
TOYS = "tests.extensions.family_toys"
RUNS = [(model, "null", "sglang") for model in ON_SGLANG]
RUNS.append(("exaone4", FAMILY, "transformers"))  # SGLang has it on GPUs only.
"""Tiny model, its family as in `model.family`, and the engine."""


@pytest.fixture
def exaone(tmp_path: Path) -> Path:
    return reference.make_model(tiny_configs.exaone4(), tmp_path / "exaone")


def own(folder: Path, layer_spec: str, more: str = "") -> str:
    """Write a family like Qwen2 with a function of its own; return its path."""
    (folder / "own.yaml").write_text(f"extends: qwen2\nlayer_spec: {layer_spec}\n{more}\n")
    return str(folder / "own.yaml")


def test_example_trains_like_transformers_on_a_parallel_layout(exaone: Path) -> None:
    check_training(Layout(tp=2, pp=2, pp_layers=(1, 2), sequence_parallel=True, tied=False), exaone, FAMILY)


def test_example_converts_bit_for_bit(exaone: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "megatron", tmp_path / "back"
    for command in (["hf2mg", exaone, there, "--tp", 2], ["mg2hf", there, back]):
        with refused("unsupported", "model_type"):
            CliRunner().invoke(app, [*map(str, command)], catch_exceptions=False)
        assert CliRunner().invoke(app, [*map(str, command), "--family", FAMILY]).exit_code == 0
    assert_same_tensors(exaone, back)


def test_result_of_a_run_is_saved_with_the_family_of_its_config(
    exaone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made_run(tmp_path / "run")
    there, config = run / "checkpoints" / "global_step_3" / "actor", run / "config.yaml"
    there.parent.mkdir(parents=True)
    assert CliRunner().invoke(app, ["hf2mg", str(exaone), str(there), "--family", FAMILY]).exit_code == 0
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | {"model": {"family": FAMILY}}))
    monkeypatch.setattr(training_result, "_rlsys", lambda _, *words: app(words, standalone_mode=False))
    result = TrainingResult(
        run, {"checkpoint": str(there)}, RunSettings("searchr1_tiny_cpu", ()), HttpRetriever("http://a:1")
    )
    assert_same_tensors(exaone, result.save_pretrained(tmp_path / "back"))


def test_config_alone_chooses_the_family(exaone: Path) -> None:
    def problems(family: str) -> dict[str, Code]:
        config = composed(f"model.path={exaone}", f"model.family={family}")
        return {problem.key: problem.code for problem in find_problems(config) if problem.key.startswith("model.")}

    assert problems(FAMILY) == {}
    assert problems("null") == {"model.path": "unsupported"}
    assert problems("glm") == {"model.family": "unknown"}
    assert problems("no.yaml") == {"model.family": "not_found"}
    plan = make_plan(composed(f"model.path={exaone}", f"model.family={FAMILY}"))
    assert plan["model"]["parameters"] == AutoModelForCausalLM.from_pretrained(exaone).num_parameters()


def test_family_names_the_keys_of_sizes(tmp_path: Path) -> None:
    """A config.json with GPT-2's words for sizes is read like one with Qwen2's, and can be trained."""
    family = tmp_path / "own.yaml"
    family.write_text("extends: qwen2\nconfig: {hidden: n_embd, ffn: n_inner, layers: n_layer, heads: n_head}\n")
    names = {"hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer"}
    names["num_attention_heads"] = "n_head"
    (tmp_path / "qwen2").mkdir()
    (tmp_path / "own").mkdir()
    (tmp_path / "qwen2" / "config.json").write_text(json.dumps(SHAPE))
    renamed = {names.get(key, key): value for key, value in SHAPE.items()}
    (tmp_path / "own" / "config.json").write_text(json.dumps(renamed))
    read = read_architecture(tmp_path / "own", str(family))
    assert replace(read, family="qwen2") == read_architecture(tmp_path / "qwen2")
    config = composed(f"model.path={tmp_path / 'own'}", f"model.family={family}")
    assert [problem for problem in find_problems(config) if problem.key.startswith("model.")] == []


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(("model", "family", "engine"), RUNS)
def test_run_by_config_alone(model: str, family: str, engine: str, tmp_path: Path) -> None:
    """After every update, the engine's tensors have the predicted hashes. Its log-probs equal Megatron's."""
    run = Finished(
        tmp_path / "runs",
        f"model.path={tiny_model(model, tmp_path / 'model')}",
        f"model.family={family}",
        f"rollout.engine.kind={engine}",
        f"reward.terms.{even_tokens.__module__}.{even_tokens.__name__}=1.0",
        "trainer.steps=2",
        "task.max_turns=1",
        *NO_SEARCH,
        *([] if family == FAMILY else NO_INFERENCE),  # An own family is also loaded by an inference group.
    )
    assert run.summary["weight_syncs"] >= 2
    assert 0 < run.summary["logprob_max_diff"] < 1e-3


@pytest.mark.parametrize(
    ("spec", "code", "key"),
    [
        ("nowhere.at_all", "user_code", "layer_spec"),
        (f"{TOYS}.missing", "unknown", "layer_spec"),
        (f"{TOYS}.not_a_function", "user_code", "layer_spec"),
        (f"{TOYS}.takes_one", "user_code", "layer_spec"),
        ("undotted", "malformed", "layer_spec"),
        (f"{TOYS}.asks_for", "missing", "layer_spec.share"),
        (f"{{kind: {TOYS}.asks_for, share: much}}", "wrong_type", "layer_spec.share"),
        (f"{{kind: {TOYS}.asks_for, share: 0.5, size: 1}}", "unknown", "layer_spec.size"),
    ],
)
def test_function_that_does_not_fit_is_refused_before_the_start(
    spec: str, code: Code, key: str, tmp_path: Path
) -> None:
    file = own(tmp_path, spec)
    with refused(code, key) as caught:
        layer_spec_of(file)
    assert file in str(caught.value)
    assert "\n" not in str(caught.value)
    config = composed(f"model.family={file}")
    assert [problem.code for problem in find_problems(config) if problem.key == "model.family"] == [code]


NORM = "decoder.layers.{layer}.self_attention.linear_proj.norm_after.weight"
ADDED = f"tensors: {{'{NORM}': {{cut: whole, hf: {{'model.layers.{{layer}}.after.weight': [hidden]}}}}}}"
WRONG: dict[str, tuple[str, Code, str]] = {
    "fails": ("", "user_code", "layer_spec"),
    "returns_nothing": ("", "user_code", "layer_spec"),
    "cannot_be_built": ("", "user_code", "layer_spec"),
    "adds_a_tensor": ("", "mismatch", "model.family"),
    "changes_nothing": (ADDED, "mismatch", "model.family"),
    "changes_a_shape": ("", "mismatch", "decoder.layers.0.mlp.linear_fc2.weight"),
}
"""Toy -> (rest of its family's file, code and key of the error)."""


def _errors(group: Group, model: Path, families: Mapping[str, str]) -> dict[str, UserError | None]:
    place = mesh.start(group.meet(), ParallelConfig(), seed=1)
    found: dict[str, UserError | None] = {}
    for toy, family in families.items():
        found[toy] = None
        try:
            config = local_model(model, family=family)
            load_hf(PolicyModel(read_architecture(model, family), config, ParallelConfig(), place), model)
        except UserError as error:
            found[toy] = error
    return found


def test_wrong_layers_end_in_one_sentence_with_the_name_of_the_function_or_file(tmp_path: Path) -> None:
    families = {}
    for toy, (more, *_) in WRONG.items():
        (tmp_path / toy).mkdir()
        families[toy] = own(tmp_path / toy, f"{TOYS}.{toy}", more)
    model = reference.make_model(tiny_configs.qwen2(tied=False), tmp_path / "model")
    (found,) = on_ranks(_errors, 1, model, families)
    expected = {toy: (code, key) for toy, (_, code, key) in WRONG.items()}
    assert {toy: error and (error.code, error.key) for toy, error in found.items()} == expected
    for toy, error in found.items():
        assert toy in str(error), "the name of the function, or of the file's folder"
        assert "\n" not in str(error)


def test_example_works_once_it_is_copied(exaone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(example.__file__, tmp_path / "copied_family.py")
    monkeypatch.syspath_prepend(tmp_path)
    copied = tmp_path / "copied.yaml"
    copied.write_text(Path(FAMILY).read_text().replace(example.__name__, "copied_family"))
    spec = layer_spec_of(str(copied))
    assert spec is not None
    assert spec.settings.component.__module__ == "copied_family"
    assert read_architecture(exaone, str(copied)).post_norms
