"""Trains the tiny policy's tokeniser: byte-level BPE, with each tag of the protocol as one token.

The tags are not special tokens: they are decoded as text, so that stop strings and parsers see them. The tokeniser adds
no tokens to a text and has no chat template: a prompt is used unchanged.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from examples.searchr1.tiny.passages import observation
from examples.searchr1.tiny.world import World

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|pad|>"
TAGS = tuple(f"<{slash}{tag}>" for tag in ("think", "search", "information", "answer") for slash in ("", "/"))
VOCABULARY = 4_096
NAMES_FOR_MERGES = 12_000


def train_tokenizer(world: World, names: Sequence[str], seed: int) -> PreTrainedTokenizerFast:
    """Learn merges from the world's texts and from names, so that unseen names split into known parts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS),
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(world, names, random.Random(seed)), trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        model_max_length=2_048,
        clean_up_tokenization_spaces=False,
    )


def _texts(world: World, names: Sequence[str], rng: random.Random) -> Iterator[str]:
    for row in world.corpus():
        yield observation([row["contents"]])
    for question in (*world.train, *world.heldout):
        yield question.prompt
    thoughts = "I need to search. I know this. I know the rest."
    yield from [thoughts] * 50
    for name in rng.sample(list(names), min(NAMES_FOR_MERGES, len(names))):
        yield f'"{name}" {name}'
