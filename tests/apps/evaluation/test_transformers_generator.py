"""Tests of the batched generator against `generate` of Hugging Face, one prompt at a time, with the tiny policy."""

import asyncio
import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2ForCausalLM

from rlsys.apps.evaluation.execution import TransformersGenerator
from rlsys.config.schema import Device, Dtype
from rlsys.rollout.agent.recorder import Generation, TurnSampling
from tests.support.refusals import refused
from tests.support.tiny_models import POLICY

QUESTION = "Question: What is the capital of Mali?\n"
PROMPTS = ["I need", QUESTION, "東京は", "Paris is the capital.\n</information>\n\n<answer>", "ñandú 🚀"]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(POLICY)


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32).eval()


def reference(
    model: Qwen2ForCausalLM, words: PreTrainedTokenizerFast, prompt: list[int], *stop: str
) -> tuple[list[int], list[float]]:
    """Return tokens and log-probs of Hugging Face's own greedy search."""
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        stop_strings=list(stop) or None,
        tokenizer=words,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = found.sequences[0, len(prompt) :].tolist()
    logprobs = [
        float(torch.log_softmax(logits[0], dim=-1)[token]) for logits, token in zip(found.logits, tokens, strict=True)
    ]
    return tokens, logprobs


def generator_of(folder: Path = POLICY, batch: int = 8, seed: int = 0) -> TransformersGenerator:
    return TransformersGenerator(str(folder), Dtype.float32, Device.cpu, batch, seed)


async def generate_all(
    generator: TransformersGenerator, prompts: list[list[int]], sampling: TurnSampling
) -> list[Generation]:
    return await asyncio.gather(
        *(generator.generate(prompt, sampling, str(number)) for number, prompt in enumerate(prompts))
    )


async def test_a_batch_generates_what_hugging_face_generates_for_each_prompt(
    model: Qwen2ForCausalLM, words: PreTrainedTokenizerFast
) -> None:
    prompts = [words(prompt)["input_ids"] for prompt in PROMPTS]
    assert len({len(prompt) for prompt in prompts}) > 2
    tokens, _ = reference(model, words, prompts[1])
    stop = (words.decode(tokens[2:4]), "never said")  # The first stop is within one answer and ends it.
    sampling, ends = TurnSampling(0.0, stop=stop, max_new_tokens=NEW_TOKENS), set()
    for prompt, got in zip(prompts, await generate_all(generator_of(batch=3), prompts, sampling), strict=True):
        tokens, logprobs = reference(model, words, prompt, *stop)
        assert got.token_ids == tokens
        assert got.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert got.finish == ("length" if len(tokens) == NEW_TOKENS else "stop")
        ends.add(got.finish)
    assert ends == {"length", "stop"}


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
async def test_end_tokens_of_both_configs_end_an_answer(
    model: Qwen2ForCausalLM, words: PreTrainedTokenizerFast, file: str, tmp_path: Path
) -> None:
    """Chat models have several end tokens; the engine stops at each of them."""
    prompt = words(QUESTION)["input_ids"]
    said, _ = reference(model, words, prompt)
    end = next(token for token in said[2:] if token not in said[:2])
    folder = shutil.copytree(POLICY, tmp_path / "model")
    config = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(config | {"eos_token_id": [words.eos_token_id, end]}))
    (got,) = await generate_all(generator_of(folder), [prompt], TurnSampling(0.0, max_new_tokens=NEW_TOKENS))
    assert (got.token_ids, got.finish) == (said[: said.index(end) + 1], "stop")


async def test_tokens_are_drawn_from_the_models_distribution(
    model: Qwen2ForCausalLM, words: PreTrainedTokenizerFast
) -> None:
    """Compares the frequencies of many drawn tokens, and their log-probs, with the model's distribution."""
    prompt, temperature, draws = words(PROMPTS[0])["input_ids"], 1.7, 400
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1].double()
    expected = torch.softmax(logits / temperature, dim=-1)
    sampling = TurnSampling(temperature, max_new_tokens=1)
    got = await generate_all(generator_of(batch=draws), [prompt] * draws, sampling)
    counts = torch.bincount(torch.tensor([one.token_ids[0] for one in got]), minlength=len(expected)) / draws
    likeliest = expected.topk(5).indices
    deviation = (expected * (1 - expected) / draws).sqrt()
    assert ((counts - expected).abs()[likeliest] < 4 * deviation[likeliest]).all()
    for one in got[:5]:
        assert one.logprobs[0] == pytest.approx(float(expected[one.token_ids[0]].log()), abs=1e-4)


async def test_a_drawn_answer_does_not_depend_on_its_batch(words: PreTrainedTokenizerFast) -> None:
    prompts, sampling = [words(prompt)["input_ids"] for prompt in PROMPTS], TurnSampling(1.0, max_new_tokens=8)

    async def drawn(batch: int, seed: int = 0) -> list[list[int]]:
        return [one.token_ids for one in await generate_all(generator_of(POLICY, batch, seed), prompts, sampling)]

    alone = await drawn(1)
    assert await drawn(16) == alone
    assert await drawn(16, seed=1) != alone


def test_missing_misshaped_and_truncated_weights_are_refused(tmp_path: Path) -> None:
    """Transformers would initialise them at random."""
    folder, name = shutil.copytree(POLICY, tmp_path / "model"), "model.norm.weight"
    weights = load_file(folder / "model.safetensors")
    norm = weights.pop(name)
    for changed in (weights, weights | {name: norm[:5].contiguous()}):
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        with refused("mismatch", "model.path") as caught:
            generator_of(folder)
        assert name in str(caught.value)
    for file in ("model.safetensors", "tokenizer.json", "config.json"):
        (folder / file).write_bytes((folder / file).read_bytes()[:100])
        with refused("malformed", "model.path"):
            generator_of(folder)


@pytest.mark.parametrize("leaves", ["first", "second"])
async def test_a_cancelled_request_does_not_disturb_the_others(
    model: Qwen2ForCausalLM, words: PreTrainedTokenizerFast, leaves: str
) -> None:
    """`leaves` names the cancelled request. The first request decodes for both; the second waits for its own tokens."""
    generator, prompt = generator_of(), words(PROMPTS[0])["input_ids"]
    sampling = TurnSampling(0.0, max_new_tokens=NEW_TOKENS)
    heard: dict[str, list[list[int]]] = {"first": [], "second": []}

    def follow(name: str, tokens: list[int]) -> None:
        heard[name].append(tokens)
        if not tasks[leaves].cancelling():
            tasks[leaves].cancel()

    tasks = {
        name: asyncio.create_task(generator.generate(prompt, sampling, name, partial(follow, name))) for name in heard
    }
    (stays,) = tasks.keys() - {leaves}
    tokens, _ = reference(model, words, prompt)
    assert (await tasks[stays]).token_ids == tokens
    assert heard[stays] == [tokens[: count + 1] for count in range(len(tokens))]
    with pytest.raises(asyncio.CancelledError):
        await tasks[leaves]
    assert (await generator.generate(prompt, sampling, "after")).token_ids == tokens
