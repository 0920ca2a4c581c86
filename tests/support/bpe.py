"""Trains real byte-level BPE tokenizers."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

EOS = "<|endoftext|>"
CORPUS = [
    "<think> I need to search. </think><search> capital of France </search>\n\n<information>Doc 1(Title: "
    '"Paris") Paris is the capital.\n</information>\n\n<answer> Paris </answer>',
    "My previous action is invalid. If I want to search, I should put the query between the tags.",
    "東京は日本の首都です。 Москва — столица России. naïve café über 🚀🚀 ñandú",
    ">\n\n >\n ></ search>> <<search>",
] * 3


def build_tokenizer(words: bool = False, trim_offsets: bool = False) -> PreTrainedTokenizerFast:
    """Train a tokenizer. Without `words`, tokens may span words, tags and white space, which is the hardest case."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    raw.decoder = decoders.ByteLevel()
    raw.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=[EOS, "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token=EOS, additional_special_tokens=["<|im_start|>", "<|im_end|>"]
    )
