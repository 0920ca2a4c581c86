"""Hugging Face -> Megatron -> Hugging Face is the same bytes for every family, and the files that belong to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlsys.apps.convert.verify import verify
from rlsys.config.schema import ParallelConfig
from rlsys.errors import UserError
from rlsys.weights.convert.conversion import hf_to_megatron, megatron_to_hf
from rlsys.weights.hf_io import INDEX, SINGLE
from tests.weights.convert.models import (
    assert_same_tensors,
    configs,
    json_of,
    logits_by_transformers,
    make_model,
    moved,
    tensors_of,
)

TOKENS = torch.tensor([[0, 5, 99, 7, 42, 7, 1]])


def there_and_back(model: Path, parallel: ParallelConfig | None = None, **options: object) -> Path:
    megatron, back = model.with_name(f"{model.name}-mg"), model.with_name(f"{model.name}-back")
    hf_to_megatron(model, megatron, parallel=parallel, processes=1, **options)  # type: ignore[arg-type]
    megatron_to_hf(megatron, back, model, processes=1)
    return back


def assert_same_logits(one: Path, other: Path, critic: bool = False) -> None:
    """Asserts that transformers computes the same bits of both, which are not zeros."""
    first, second = (logits_by_transformers(folder, TOKENS, critic) for folder in (one, other))
    assert first.shape == (*TOKENS.shape, 1 if critic else 100)
    assert first.any()
    assert torch.equal(first, second)


@pytest.mark.parametrize("family", configs())
@pytest.mark.parametrize("parallel", [ParallelConfig(), ParallelConfig(tp=4, pp=3)])
def test_a_model_comes_back_bit_for_bit(family: str, parallel: ParallelConfig, tmp_path: Path) -> None:
    """TP 4 is more than the query groups that the models have."""
    model = make_model(tmp_path / "model", family)
    back = there_and_back(model, parallel)
    assert_same_tensors(model, back)
    for file in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (back / file).read_bytes() == (model / file).read_bytes(), file
    assert_same_logits(model, back)


def test_experts_are_spread(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3-moe")
    assert_same_tensors(model, there_and_back(model, ParallelConfig(ep=2, tp=2, pp=3)))


@pytest.mark.parametrize("family", ["qwen2", "llama-tied"])
def test_a_critic_comes_back_bit_for_bit(family: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", family, torch.float32, critic=True)
    with pytest.raises(UserError, match=r"is a critic.*--values"):
        hf_to_megatron(model, tmp_path / "wrong")
    back = there_and_back(model, values=True)
    assert_same_tensors(model, back)
    assert_same_logits(model, back, critic=True)


@pytest.mark.parametrize("critic", [False, True], ids=["policy", "critic"])
@pytest.mark.parametrize("by", [4, 8, 40])
def test_where_weights_lie_in_a_file_changes_nothing(by: int, critic: bool, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen2", torch.float32, critic)
    other = moved(model, tmp_path / "other", by)
    assert_same_logits(model, other, critic)
    assert verify(model, other).same
    backs = [there_and_back(folder, values=critic) for folder in (model, other)]
    assert verify(tmp_path / "other-mg", other).same
    assert_same_tensors(model, backs[1])
    assert (backs[0] / SINGLE).read_bytes() == (backs[1] / SINGLE).read_bytes()


def test_a_critic_made_of_a_policy_has_a_head_of_zeros_and_loads_as_one(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen2")
    back = there_and_back(model, values=True)
    config = json_of(back / "config.json")
    assert config["architectures"] == ["Qwen2ForTokenClassification"]
    values = logits_by_transformers(back, TOKENS, critic=True)
    assert torch.equal(values, torch.zeros_like(values))
    before, after = tensors_of(model), tensors_of(back)
    assert before.keys() - after.keys() == {"lm_head.weight"}
    assert after.keys() - before.keys() == {"score.weight", "score.bias"}
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items() if name in before)


@pytest.mark.parametrize("direction", ["there", "back"])
def test_a_dtype_is_changed_on_request(direction: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama", torch.float32)
    hf_to_megatron(model, tmp_path / "mg", dtype="bfloat16" if direction == "there" else None)
    megatron_to_hf(tmp_path / "mg", tmp_path / "back", model, dtype="bfloat16" if direction == "back" else None)
    before, after = tensors_of(model), tensors_of(tmp_path / "back")
    assert after.keys() == before.keys()
    assert all(torch.equal(tensor, before[name].bfloat16()) for name, tensor in after.items())
    assert json_of(tmp_path / "back" / "config.json") == {
        **json_of(model / "config.json"),
        "dtype": "bfloat16",
    }


def test_each_tensor_keeps_its_own_dtype(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3-moe")
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    for layer in loaded.model.layers:
        layer.mlp.gate.weight.data = layer.mlp.gate.weight.data.float() + 1e-7
    loaded.save_pretrained(tmp_path / "mixed")
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "mixed").values()} == {
        torch.float32,
        torch.bfloat16,
    }
    assert_same_tensors(tmp_path / "mixed", there_and_back(tmp_path / "mixed"))


def test_a_number_that_a_dtype_cannot_hold_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    loaded.model.norm.weight.data[3] = 1e6
    loaded.save_pretrained(tmp_path / "large")
    with pytest.raises(UserError, match=r"model\.norm\.weight has numbers that float16 cannot hold"):
        hf_to_megatron(tmp_path / "large", tmp_path / "mg", dtype="float16", processes=1)


def test_it_comes_back_without_the_original(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    hf_to_megatron(model, tmp_path / "mg")
    for file in model.iterdir():
        file.unlink()
    megatron_to_hf(tmp_path / "mg", tmp_path / "back")
    assert (tmp_path / "back" / "tokenizer.json").is_file()
    AutoModelForCausalLM.from_pretrained(tmp_path / "back")


def test_the_originals_weights_are_not_needed(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", shard_size="40KB")
    hf_to_megatron(model, tmp_path / "mg")
    expected = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
    for file in (*model.glob("*.safetensors"), model / INDEX):
        file.unlink()
    megatron_to_hf(tmp_path / "mg", tmp_path / "back", model)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors_of(tmp_path / "back").items())
    assert not (tmp_path / "back" / INDEX).exists(), "an index of other files"


def test_shards_are_no_larger_than_asked(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3-moe")
    hf_to_megatron(model, tmp_path / "mg")
    megatron_to_hf(tmp_path / "mg", tmp_path / "back", model, shard_bytes=40_000, processes=1)
    shards = sorted((tmp_path / "back").glob("*.safetensors"))
    assert len(shards) > 3
    index = json.loads((tmp_path / "back" / INDEX).read_text())
    assert {shard.name for shard in shards} == set(index["weight_map"].values())
    sizes = {shard.name: 0 for shard in shards}
    for name, tensor in tensors_of(tmp_path / "back").items():
        sizes[index["weight_map"][name]] += tensor.nbytes
    assert max(sizes.values()) <= 40_000
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert_same_tensors(model, tmp_path / "back")
    AutoModelForCausalLM.from_pretrained(tmp_path / "back")


@pytest.mark.parametrize("way", ["there", "back"])
def test_one_process_and_two_write_the_same_bytes(way: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3-moe")
    pipeline = ParallelConfig(pp=3)
    for processes in (1, 2):
        hf_to_megatron(model, tmp_path / f"mg{processes}", parallel=pipeline, processes=processes)
        if way == "there":
            continue
        out = tmp_path / f"back{processes}"
        megatron_to_hf(tmp_path / "mg1", out, model, shard_bytes=60_000, processes=processes)
        pipeline = ParallelConfig()
    made = [tmp_path / f"{'mg' if way == 'there' else 'back'}{processes}" for processes in (1, 2)]
    if way == "there":
        for processes in (1, 2):
            megatron_to_hf(made[processes - 1], tmp_path / f"from{processes}", model, processes=1)
        assert len(list(made[0].glob("*.distcp"))) >= 3
    files = [{str(p.relative_to(one)): p for p in one.rglob("*") if p.is_file()} for one in made]
    assert files[0].keys() == files[1].keys()
    assert all(files[0][name].read_bytes() == path.read_bytes() for name, path in files[1].items())


def test_a_missing_tokenizer_is_said(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", tokenizer=False)
    notes = (
        *hf_to_megatron(model, tmp_path / "mg").notes,
        *megatron_to_hf(tmp_path / "mg", tmp_path / "back").notes,
    )
    assert len(notes) == 2
    assert all("has no tokenizer" in note for note in notes)
    assert not hf_to_megatron(make_model(tmp_path / "other"), tmp_path / "mg2").notes


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        ("{", "is damaged"),
        ("[]", "no JSON object"),
        ('{"model_type": "gpt2"}', "gpt2"),
        ('{"model_type": "no such"}', "model_type is no such"),
        ("{}", "model_type"),
        (None, r"has no config\.json"),
    ],
)
def test_a_broken_config_is_one_sentence(broken: str | None, sentence: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    hf_to_megatron(model, tmp_path / "mg")
    (model / "config.json").unlink()
    if broken is not None:
        (model / "config.json").write_text(broken)
    for call in (
        lambda: hf_to_megatron(model, tmp_path / "out"),
        lambda: megatron_to_hf(tmp_path / "mg", tmp_path / "out", model),
    ):
        with pytest.raises(UserError, match=sentence) as error:
            call()
        assert "\n" not in str(error.value)
        assert not (tmp_path / "out").exists()


def test_weights_that_are_not_the_configs_are_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    hf_to_megatron(model, tmp_path / "mg")
    config = json_of(model / "config.json")
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": 128}))
    with pytest.raises(UserError, match=r"gate_proj\.weight of shape \[96, 64\], .* says \[128, 64\]"):
        hf_to_megatron(model, tmp_path / "out")
    with pytest.raises(UserError, match="not this model's"):
        megatron_to_hf(tmp_path / "mg", tmp_path / "out", model)
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4, "layer_types": None}))
    with pytest.raises(UserError, match=r"lacks \d+ tensors"):
        hf_to_megatron(model, tmp_path / "out")
    with pytest.raises(UserError, match=r"lacks \d+ weights"):
        megatron_to_hf(tmp_path / "mg", tmp_path / "out", model)
    assert not list(tmp_path.glob("*out*")), "nothing was begun"


def rewritten(model: Path, **changes: Tensor | None) -> Path:
    """The model with other tensors: `__` stands for a point, and None for none."""
    tensors = tensors_of(model) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    kept = {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, model / "model.safetensors", metadata={"format": "pt"})
    return model


def reconfigured(model: Path, **changes: object) -> Path:
    config = json_of(model / "config.json")
    (model / "config.json").write_text(json.dumps(config | changes))
    return model


def test_a_trained_output_layer_is_not_dropped_because_a_config_says_tied(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen2")
    hf_to_megatron(model, tmp_path / "mg")
    reconfigured(model, tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"lm_head\.weight with other numbers than model\.embed_tokens\.weight"):
        hf_to_megatron(model, tmp_path / "out")
    with pytest.raises(UserError, match=r"output_layer\.weight with other numbers than embedding\."):
        megatron_to_hf(tmp_path / "mg", tmp_path / "out", model)
    for sides in ((model, model), (tmp_path / "mg", model), (model, tmp_path / "mg")):
        with pytest.raises(UserError, match="with other numbers than"):
            verify(*sides, hf=model, logits=False)
    assert not (tmp_path / "out").exists()


def test_a_repeated_embedding_of_another_shape_or_dtype_is_no_repetition(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen2-tied")
    embedding = tensors_of(model)["model.embed_tokens.weight"]
    for other in (embedding[:-1], embedding.float(), embedding.view(-1)):
        with pytest.raises(UserError, match=r"lm_head\.weight with other numbers"):
            hf_to_megatron(rewritten(model, lm_head__weight=other), tmp_path / "out")
    hf_to_megatron(rewritten(model, lm_head__weight=embedding), tmp_path / "out")


def test_a_vocabulary_is_not_cut_off_because_a_config_says_so(tmp_path: Path) -> None:
    large = make_model(tmp_path / "model", "qwen2")
    more = torch.randn(400, 64).bfloat16()
    rewritten(reconfigured(large, vocab_size=400), model__embed_tokens__weight=more, lm_head__weight=more)
    hf_to_megatron(large, tmp_path / "mg", processes=1)
    small = make_model(tmp_path / "small", "qwen2")
    with pytest.raises(UserError, match=r"vocabulary of 512 rows in .*config\.json says 100,.*\(--hf\)"):
        megatron_to_hf(tmp_path / "mg", tmp_path / "out", small)


def test_experts_in_one_tensor_become_those_of_each(tmp_path: Path) -> None:
    """As transformers 5 may write them; it says itself that they are the same model."""
    model = make_model(tmp_path / "model", "qwen3-moe")
    stacked = make_model(tmp_path / "stacked", "qwen3-moe")
    tensors = tensors_of(model)
    made = {name: tensor.clone() for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts"
        each = [[tensors[f"{prefix}.{e}.{part}_proj.weight"] for e in range(4)] for part in ("gate", "up", "down")]
        made[f"{prefix}.gate_up_proj"] = torch.cat([torch.stack(each[0]), torch.stack(each[1])], dim=1)
        made[f"{prefix}.down_proj"] = torch.stack(each[2])
    save_file(made, stacked / "model.safetensors", metadata={"format": "pt"})
    assert_same_logits(model, stacked)
    assert_same_tensors(model, there_and_back(stacked))
    assert verify(model, stacked, logits=False).same


def test_rotary_scaling_that_is_not_computed_here_is_no_matter_of_the_weights(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "original_max_position_embeddings": 16}
    model = reconfigured(make_model(tmp_path / "model", "qwen3"), rope_parameters=yarn)
    back = there_and_back(model)
    assert_same_tensors(model, back)
    assert json_of(back / "config.json") == json_of(model / "config.json")
    with_megatron = verify(model, tmp_path / "model-mg")
    assert with_megatron.same
    assert with_megatron.logits is None
    assert with_megatron.note.startswith("Logits were not compared: ")
    assert "config.json: rope_type is yarn" in with_megatron.note
    of_transformers = verify(model, back)
    assert of_transformers.logits is not None
    assert of_transformers.logits.same


def test_a_score_without_a_bias_is_a_critic_with_one_of_zero(tmp_path: Path) -> None:
    """As a sequence classification has it."""
    model = make_model(tmp_path / "model", "qwen2", critic=True)
    head = tensors_of(model)["score.weight"].clone()
    back = there_and_back(rewritten(model, score__bias=None), values=True)
    assert torch.equal(tensors_of(back)["score.bias"], torch.zeros(1).bfloat16())
    assert torch.equal(tensors_of(back)["score.weight"], head)


def test_whole_numbers_are_not_rounded_to_others(tmp_path: Path) -> None:
    model = rewritten(make_model(tmp_path / "model"), model__norm__weight=torch.ones(64, dtype=torch.int8))
    assert_same_tensors(model, there_and_back(model))
    with pytest.raises(UserError, match=r"model\.norm\.weight is int8, .* leave --dtype out"):
        hf_to_megatron(model, tmp_path / "out", dtype="float32", processes=1)


def test_a_destination_within_the_checkpoint_goes_on_too(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    hf_to_megatron(model, tmp_path / "mg", parallel=ParallelConfig(pp=3), processes=1)
    last, out = sorted((tmp_path / "mg").glob("__2_*.distcp"))[-1], tmp_path / "mg" / "inner"
    whole, stat = last.read_bytes(), last.stat()
    last.write_bytes(bytes(len(whole)))
    os.utime(last, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(UserError, match="damaged"):
        megatron_to_hf(tmp_path / "mg", out, model, shard_bytes=5000, processes=1)
    last.write_bytes(whole)
    os.utime(last, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    outcome = megatron_to_hf(tmp_path / "mg", out, model, shard_bytes=5000, processes=1)
    assert 0 < outcome.kept < outcome.files
    assert_same_tensors(model, out)


@pytest.mark.parametrize(
    ("options", "sentence"), [({"dtype": "int8"}, "dtype is int8"), ({"shard_bytes": 0}, "shard_bytes is 0")]
)
def test_wrong_settings_are_one_sentence(options: dict[str, object], sentence: str, tmp_path: Path) -> None:
    hf_to_megatron(make_model(tmp_path / "model"), tmp_path / "mg")
    with pytest.raises(UserError, match=sentence):
        megatron_to_hf(tmp_path / "mg", tmp_path / "out", **options)  # type: ignore[arg-type]


def test_a_killed_conversion_goes_on_with_the_same_source_alone(tmp_path: Path) -> None:
    """The whole command is killed; the shards that it finished are not touched again."""
    model = make_model(tmp_path / "model", "qwen3-moe")
    hf_to_megatron(model, tmp_path / "mg")
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    arguments = ["mg2hf", str(tmp_path / "mg"), str(out), "--hf", str(model), "--shard-size", "5KB"]
    code = "from rlsys.apps.cli.convert import app; app()"
    process = subprocess.Popen([sys.executable, "-c", code, *arguments, "--processes", "1"])
    while len(list(partial.glob("folder/*.safetensors"))) < 2:
        assert process.poll() is None, "it was too fast to be killed"
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = json.loads((partial / "journal.json").read_text())["files"]
    before = {name: (partial / "folder" / name).stat() for name in done}
    assert before
    assert not out.exists()

    outcome = megatron_to_hf(tmp_path / "mg", out, model, shard_bytes=5000, processes=1)
    assert outcome.kept == len(before) < outcome.files
    for name, stat in before.items():
        assert (out / name).stat().st_ino == stat.st_ino
        assert (out / name).stat().st_mtime_ns == stat.st_mtime_ns
    assert_same_tensors(model, out)
