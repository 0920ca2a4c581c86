"""Tests of versions that are adapters (LoRA) alone: staged weights against a merge in float64, and a real engine."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from rlsys.config.schema import LoraConfig, LoraSync
from rlsys.errors import RunError
from rlsys.rollout.sglang_weights import Layout, SglangWeights, sha256_prefix
from rlsys.rollout.staging import AdapterMerger, PlainWeights, StagedVersion
from rlsys.weights.bucket import Bucket, ChecksumError, checksum, unpack
from rlsys.weights.checkpoint.adapters import BaseModel
from rlsys.weights.lora import adapter_map
from rlsys.weights.weight_map import ADAPTER_PREFIX, Architecture, WeightMap, read_architecture
from tests.rollout.bench import Bench, endless, greedy
from tests.support import tiny, tiny_configs
from tests.support.tensors import digest_of, pack
from tests.trainer import reference

ALL = LoraConfig(rank=3, alpha=6.0, sync=LoraSync.adapters)
SOME = replace(ALL, targets=["q_proj", "v_proj", "up_proj"])
Tensors = dict[str, Tensor]


def adapters_of(architecture: Architecture, lora: LoraConfig, seed: int, size: float = 0.1) -> Tensors:
    """Random adapters under PEFT's names. As in an export, B of a layer's part that is no target is zero."""
    torch.manual_seed(seed)
    found: Tensors = {}
    for entry in adapter_map(architecture, lora).entries():
        for name, shape in zip(entry.hf, entry.rule.shapes, strict=True):
            target = lora.targets is None or name.split(".")[-3] in lora.targets
            found[name] = size * torch.randn(shape) if target else torch.zeros(shape)
    return found


def merged(base: Tensors, adapters: Tensors, lora: LoraConfig) -> Tensors:
    """W + (alpha / rank) B A in float64, rounded to float32."""
    result = dict(base)
    for name, a in adapters.items():
        if ".lora_A." in name:
            hf = name.removeprefix(ADAPTER_PREFIX).replace(".lora_A", "")
            b = adapters[name.replace("lora_A", "lora_B")]
            result[hf] = (base[hf].double() + lora.alpha / lora.rank * b.double() @ a.double()).float()
    return result


def layers_of(architecture: Architecture, lora: LoraConfig) -> set[str]:
    """Weights of the Megatron layers that have an adapter, by hand."""
    fused = [{"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}, {"o_proj"}, {"down_proj"}]
    modules = {module for one in fused if lora.targets is None or one & set(lora.targets) for module in one}
    names = WeightMap(architecture).hf_names()
    return {one for one in names if one.endswith("proj.weight") and one.split(".")[-2] in modules and "exp" not in one}


def staged(merger: AdapterMerger, version: int, adapters: Tensors) -> tuple[StagedVersion, list[Bucket]]:
    """A version whose buckets are so small that A and B of a layer arrive apart, in memory that is used again."""
    found = StagedVersion(version, PlainWeights(torch.float32, tied=False), merger)
    sent = list(pack(adapters.items(), bucket_bytes=1))
    for bucket in sent:
        lent = Bucket(bucket.data.copy(), bucket.records)
        found.stage(lent)
        lent.data[:] = 255
    return found, sent


def loaded(version: StagedVersion) -> Tensors:
    return {record.name: tensor for bucket in version.pop_buckets() for record, tensor in unpack(bucket)}


@pytest.mark.parametrize(
    ("family", "lora"), [("qwen2", ALL), ("qwen3", SOME), ("qwen3_moe", replace(SOME, targets=["q_proj"]))]
)
def test_engine_gets_every_weight_once_and_then_the_merged_layers(
    family: str, lora: LoraConfig, tmp_path: Path
) -> None:
    model = reference.make_model(tiny_configs.FAMILIES[family](tied=False), tmp_path)
    base, architecture = reference.named_tensors(reference.load(model)), read_architecture(model)
    merger, digest = AdapterMerger(str(model), architecture, lora), BaseModel.of(model).digest
    held: dict[str, str] = {}
    for number, whole in ((1, True), (2, False), (3, False), (4, True)):
        merger.loaded = not whole  # As the driver does: version 4 follows a failed update.
        adapters = adapters_of(architecture, lora, seed=number)
        version, sent = staged(merger, number, adapters)
        assert version.nbytes == sum(tensor.nbytes for tensor in adapters.values())
        version.check(number, digest_of(sent, digest))
        for other in (digest_of(sent[1:], digest), digest_of(sent), digest_of(sent, "another model")):
            with pytest.raises(ChecksumError):
                version.check(number, other)
        given, expected = loaded(version), merged(base, adapters, lora)
        assert given.keys() == (base.keys() if whole else layers_of(architecture, lora))
        for name, tensor in given.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2e-7 * float(expected[name].abs().max()))
            adapted = f"{ADAPTER_PREFIX}{name.removesuffix('.weight')}.lora_A.weight" in adapters
            assert torch.equal(tensor, base[name]) != adapted, name
        held |= {name: checksum(name, tensor) for name, tensor in given.items()}
        assert version.weights.mismatches([held]) == []
        assert version.weights.mismatches([held | {next(iter(base)): "another"}]) == [next(iter(base))]


def test_a_frozen_model_that_changes_during_the_run_is_refused(tmp_path: Path) -> None:
    models = [
        reference.make_model(tiny_configs.FAMILIES["qwen2"](), tmp_path / str(seed), seed=seed) for seed in (1, 2)
    ]
    merger = AdapterMerger(str(models[0]), read_architecture(models[0]), SOME)
    adapters = adapters_of(read_architecture(models[0]), SOME, seed=1)
    staged(merger, 1, adapters)
    merger.loaded = True
    (models[1] / "model.safetensors").rename(models[0] / "model.safetensors")
    with pytest.raises(ChecksumError, match=r"model\.layers\.0\.\S+_proj\.weight"):
        staged(merger, 2, adapters)


def test_predicted_hashes_of_unchanged_tensors_are_those_of_each_rank(tmp_path: Path) -> None:
    model = reference.make_model(tiny_configs.FAMILIES["qwen3_moe"](tied=False), tmp_path)
    architecture, lora = read_architecture(model), replace(SOME, targets=["q_proj"])
    merger = AdapterMerger(str(model), architecture, lora)
    checks = []
    for number in (1, 2):
        check = SglangWeights(WeightMap(architecture), Layout(tp=2, dtype=torch.bfloat16), sha256_prefix)
        version = StagedVersion(number, check, merger)
        for bucket in pack(adapters_of(architecture, lora, seed=1).items(), bucket_bytes=1 << 20):
            version.stage(bucket)
        checks.append(check.hashes)
        merger.loaded = True
        assert not check.incomplete()
    whole = SglangWeights(WeightMap(architecture), Layout(tp=2, dtype=torch.bfloat16), sha256_prefix)
    for name, tensor in merged(
        reference.named_tensors(reference.load(model)), adapters_of(architecture, lora, seed=1), lora
    ).items():
        whole.predict(name, tensor)
    assert checks[0] == checks[1]
    assert checks[0][0].keys() == whole.hashes[0].keys()
    different = {name for rank in (0, 1) for name, one in checks[0][rank].items() if one != whole.hashes[rank][name]}
    assert different <= {f"model.layers.{n}.self_attn.qkv_proj.weight" for n in range(architecture.layers)}


def policy_with(base: Qwen2ForCausalLM, adapters: Tensors, lora: LoraConfig) -> Qwen2ForCausalLM:
    """A copy of `base` with the adapters merged into it."""
    copy = deepcopy(base)
    weights = merged({name: tensor.detach() for name, tensor in base.named_parameters()}, adapters, lora)
    copy.load_state_dict(weights, strict=False)
    return copy


async def send(bench: Bench, model: Qwen2ForCausalLM, adapters: Tensors, base: str) -> tuple[int, str]:
    """Send adapters, which make `model` of the engine's own; return the new version and its digest."""
    version, buckets = bench.new_version(model), list(pack(adapters.items(), bucket_bytes=1))
    await bench.engine.begin_update(version)
    for bucket in buckets:
        await bench.engine.load_bucket(bucket)
    return version, digest_of(buckets, base)


@pytest.mark.engine
@pytest.mark.asyncio(loop_scope="package")
async def test_real_engine_follows_adapters_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Requests in flight continue with the new adapters, and a refused version is followed by a whole one."""
    base, engine = endless(bench.first, bench.words), bench.engine
    ids, other = bench.encode(tiny.FIRST.prompt), bench.encode("zzz")
    base.save_pretrained(tmp_path)
    architecture, digest = read_architecture(tmp_path), BaseModel.of(tmp_path).digest
    merger = AdapterMerger(str(tmp_path), architecture, ALL)
    monkeypatch.setattr(engine, "_merger", merger)
    versions = [adapters_of(architecture, ALL, seed, size=0.02) for seed in range(3)]
    policies = [policy_with(base, one, ALL) for one in versions]
    received = engine.counts.update_bytes

    old, total = await send(bench, policies[0], versions[0], digest)
    await engine.finish_update(old, total)
    bench.assert_logprobs(ids, await engine.generate(ids, greedy(8), "before"))
    flying = asyncio.create_task(engine.generate(other, greedy(3000), "flying"))
    new, total = await send(bench, policies[1], versions[1], digest)
    await bench.until_generating(requests=1)
    await engine.finish_update(new, total)
    held = max(len(state.output_ids) for state in bench.sglang._manager.rid_to_state.values())
    await bench.until_generating(requests=1, tokens=held + 50)
    bench.sglang.abort_all()
    generation = await flying
    assert set(generation.versions) == {old, new}
    bench.assert_logprobs(other, generation)
    after = await engine.generate(ids, greedy(8), "after")
    assert after.cached_tokens == 0, "the prefix cache has keys of other adapters"
    assert engine.counts.update_bytes - received == 2 * sum(tensor.nbytes for tensor in versions[0].values())

    merger._hashes[0]["model.norm.weight"] = "of another model"
    refused, total = await send(bench, policies[2], versions[2], digest)
    with pytest.raises(RunError, match=r"1 of its tensors .*first model\.norm\.weight"):
        await engine.finish_update(refused, total)
    with pytest.raises(RunError, match="refused a weight update"):
        await engine.generate(ids, greedy(4), "refused")
    later, total = await send(bench, policies[2], versions[2], digest)
    await engine.finish_update(later, total)
    bench.assert_logprobs(ids, await engine.generate(ids, greedy(20), "later"))
