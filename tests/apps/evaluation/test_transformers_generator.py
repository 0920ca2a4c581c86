"""The batched generator against `generate` of Hugging Face, one prompt at a time."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rlsys.apps.evaluation.execution import TransformersGenerator
from rlsys.config.schema import Device, Dtype
from rlsys.rollout.agent.episode import Generation, TurnSampling
from tests.support.bpe import build_tokenizer
from tests.support.refusals import refused

PROMPTS = [
    "I need",
    "What is the capital of France? I should search for the capital of France between <search> and </search>.",
    "東京は",
    "Paris is the capital.\n</information>\n\n<answer>",
    "ñandú 🚀",
]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    return build_tokenizer(words=True)


@pytest.fixture(scope="module")
def model(words: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=words.eos_token_id,
        initializer_range=0.6,  # random weights that small would repeat one token
    )
    return Qwen2ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folder(model: Qwen2ForCausalLM, words: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen2")
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def reference(
    model: Qwen2ForCausalLM, words: PreTrainedTokenizerFast, prompt: list[int], stop: tuple[str, ...]
) -> tuple[list[int], list[float]]:
    """Tokens and log-probs of Hugging Face's own greedy search."""
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        stop_strings=list(stop) or None,
        tokenizer=words,
        pad_token_id=words.eos_token_id,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = found.sequences[0, len(prompt) :].tolist()
    logprobs = [
        float(torch.log_softmax(logits[0], dim=-1)[token]) for logits, token in zip(found.logits, tokens, strict=True)
    ]
    return tokens, logprobs


def generate_all(folder: Path, prompts: list[list[int]], stop: tuple[str, ...], batch: int) -> list[Generation]:
    generator = TransformersGenerator(str(folder), Dtype.float32, Device.cpu, batch)
    sampling = TurnSampling(0.0, stop=stop, max_new_tokens=NEW_TOKENS)

    async def together() -> list[Generation]:
        return await asyncio.gather(
            *(generator.generate(prompt, sampling, str(number)) for number, prompt in enumerate(prompts))
        )

    return asyncio.run(together())


@pytest.mark.parametrize(("batch", "with_stop"), [(1, True), (3, True), (16, False)])
def test_a_batch_says_what_hugging_face_says_alone(
    folder: Path, model: Qwen2ForCausalLM, words: PreTrainedTokenizerFast, batch: int, with_stop: bool
) -> None:
    prompts = [words(prompt)["input_ids"] for prompt in PROMPTS]
    assert len({len(prompt) for prompt in prompts}) > 3
    stop: tuple[str, ...] = ()
    if with_stop:  # a text that occurs in the middle of one answer, and so ends it
        tokens, _ = reference(model, words, prompts[1], ())
        said = [words.decode([token]) for token in tokens[4:12]]
        stop = (next(text for text in said if text.isascii() and text.isprintable()), "never said")
    ends = set()
    for prompt, got in zip(prompts, generate_all(folder, prompts, stop, batch), strict=True):
        tokens, logprobs = reference(model, words, prompt, stop)
        assert got.token_ids == tokens
        assert got.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert got.finish == ("length" if len(tokens) == NEW_TOKENS else "stop")
        ends.add(got.finish)
    assert ends == ({"length", "stop"} if with_stop else {"length"})


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_further_end_tokens_of_either_config_end_too(
    folder: Path, model: Qwen2ForCausalLM, words: PreTrainedTokenizerFast, file: str, tmp_path: Path
) -> None:
    """Chat models have several; the engine stops at each of them."""
    prompt = words(PROMPTS[1])["input_ids"]
    said, _ = reference(model, words, prompt, ())
    end = next(token for token in said[3:] if token not in said[:3])
    other = shutil.copytree(folder, tmp_path / "model")
    config = json.loads((other / file).read_text())
    (other / file).write_text(json.dumps(config | {"eos_token_id": [words.eos_token_id, end]}))
    (got,) = generate_all(other, [prompt], (), 1)
    assert (got.token_ids, got.finish) == (said[: said.index(end) + 1], "stop")


async def test_a_cut_vocabulary_is_refused(folder: Path) -> None:
    generator = TransformersGenerator(str(folder), Dtype.float32, Device.cpu, 1)
    with pytest.raises(ValueError, match="r1"):
        await generator.generate([1], TurnSampling(0.7, top_p=0.9, max_new_tokens=1), "r1")


async def test_tokens_are_drawn_as_the_model_says(
    folder: Path, model: Qwen2ForCausalLM, words: PreTrainedTokenizerFast
) -> None:
    """Frequencies over many requests against the distribution at that temperature, and its log-probs."""
    prompt, temperature, draws = words(PROMPTS[1])["input_ids"], 0.7, 800
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1].double()
    expected = torch.softmax(logits / temperature, dim=-1)
    generator = TransformersGenerator(str(folder), Dtype.float32, Device.cpu, draws)
    sampling = TurnSampling(temperature, max_new_tokens=1)
    got = await asyncio.gather(*(generator.generate(prompt, sampling, f"r{n}") for n in range(draws)))
    counts = torch.bincount(torch.tensor([one.token_ids[0] for one in got]), minlength=len(expected)) / draws
    likeliest = expected.topk(5).indices
    deviation = (expected * (1 - expected) / draws).sqrt()
    assert ((counts - expected).abs()[likeliest] < 4 * deviation[likeliest]).all()
    for one in got[:5]:
        assert one.logprobs[0] == pytest.approx(float(expected[one.token_ids[0]].log()), abs=1e-4)


async def test_a_drawn_answer_depends_on_its_request_alone(folder: Path, words: PreTrainedTokenizerFast) -> None:
    prompts, sampling = ([words(prompt)["input_ids"] for prompt in PROMPTS], TurnSampling(1.0, max_new_tokens=8))

    async def drawn(batch: int, seed: int = 0) -> list[list[int]]:
        generator = TransformersGenerator(str(folder), Dtype.float32, Device.cpu, batch, seed)
        asked = (generator.generate(prompt, sampling, str(number)) for number, prompt in enumerate(prompts))
        return [one.token_ids for one in await asyncio.gather(*asked)]

    alone = await drawn(1)
    assert await drawn(16) == alone
    assert await drawn(16, seed=1) != alone


def test_weights_that_are_missing_or_of_another_shape_are_refused(folder: Path, tmp_path: Path) -> None:
    """Transformers would draw them at random, and the answers with them."""
    other = shutil.copytree(folder, tmp_path / "model")
    weights = load_file(other / "model.safetensors")
    head = weights.pop("lm_head.weight")
    for changed in (weights, weights | {"lm_head.weight": head[:, :5].contiguous()}):
        save_file(changed, other / "model.safetensors", {"format": "pt"})
        with refused("mismatch", "model.path") as caught:
            TransformersGenerator(str(other), Dtype.float32, Device.cpu, 1)
        assert "lm_head.weight" in str(caught.value)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_file_that_is_cut_short_is_refused(folder: Path, tmp_path: Path, file: str) -> None:
    other = shutil.copytree(folder, tmp_path / "model")
    (other / file).write_bytes((other / file).read_bytes()[:100])
    with refused("malformed", "model.path"):
        TransformersGenerator(str(other), Dtype.float32, Device.cpu, 1)


def test_a_listener_hears_every_token(folder: Path, model: Qwen2ForCausalLM, words: PreTrainedTokenizerFast) -> None:
    generator = TransformersGenerator(str(folder), Dtype.float32, Device.cpu, 8)
    sampling = TurnSampling(0.0, max_new_tokens=NEW_TOKENS)
    prompt = words(PROMPTS[1])["input_ids"]
    heard: list[list[int]] = []

    async def listen() -> None:
        await asyncio.gather(
            generator.generate(prompt, sampling, "followed", heard.append),
            generator.generate(prompt[:4], sampling, "not followed"),
        )

    asyncio.run(listen())
    tokens, _ = reference(model, words, prompt, ())
    assert heard == [tokens[: count + 1] for count in range(len(tokens))]


@pytest.mark.parametrize("leaves", ["first", "second"])
def test_a_cancelled_request_does_not_disturb_the_others(
    folder: Path, model: Qwen2ForCausalLM, words: PreTrainedTokenizerFast, leaves: str
) -> None:
    """Whoever decodes for both, and whoever waits for it; the one that stays gets what it gets alone."""
    generator = TransformersGenerator(str(folder), Dtype.float32, Device.cpu, 8)
    prompt = words(PROMPTS[1])["input_ids"]
    long = TurnSampling(0.0, max_new_tokens=60)

    async def run() -> tuple[Generation, Generation]:
        begun = asyncio.Event()
        tasks = {
            name: asyncio.create_task(generator.generate(prompt, long, name, lambda _: begun.set()))
            for name in ("first", "second")
        }
        await begun.wait()
        gone = tasks.pop(leaves)
        gone.cancel()
        (stays,) = await asyncio.gather(*tasks.values())
        assert isinstance((await asyncio.gather(gone, return_exceptions=True))[0], asyncio.CancelledError)
        return await generator.generate(prompt, TurnSampling(0.0, max_new_tokens=NEW_TOKENS), "after"), stays

    after, stays = asyncio.run(run())
    tokens, _ = reference(model, words, prompt, ())
    assert after.token_ids == tokens
    assert stays.token_ids[:NEW_TOKENS] == tokens
    assert len(stays.token_ids) == 60
