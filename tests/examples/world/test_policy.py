"""The shipped policy is the one the README speaks of, and traces are what its agent will see."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import examples.searchr1.tiny as tiny
from examples.searchr1.tiny.tokenizer import TAGS
from examples.searchr1.tiny.world import World

FOLDER = Path(tiny.__file__).parent
POLICY = FOLDER / "policy"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(POLICY)


def test_checksums_are_those_of_the_readme() -> None:
    stated = {
        name: digest
        for digest, name in re.findall(r"^([0-9a-f]{64})  (\S+)$", (FOLDER / "README.md").read_text(), re.M)
    }
    shipped = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in POLICY.iterdir()}
    assert stated == shipped


def test_the_tokenizer_round_trips_the_corpus(world: World, tokenizer: PreTrainedTokenizerFast) -> None:
    texts = [row["contents"] for row in world.corpus()] + [question.prompt for question in world.heldout]
    ids = tokenizer(texts)["input_ids"]
    assert tokenizer.batch_decode(ids) == texts


def test_tags_are_single_tokens_that_decoding_keeps(tokenizer: PreTrainedTokenizerFast) -> None:
    for tag in TAGS:
        ids = tokenizer(tag)["input_ids"]
        assert len(ids) == 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == tag
